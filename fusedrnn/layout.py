"""Where each step's rows lie, and how time is cut into chunks.

Every tensor over time is a matrix of rows, time-major. Step `t` owns the rows `offset[t] .. offset[t] + batch[t]`:
for dense input `offset[t] = t * B` and `batch[t] = B`; packed input is the general case. A *chunk* is a run of
consecutive steps; its `Steps` list them in the order in which they are processed, so that a reverse direction differs
from a forward one in nothing but that order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor


class Link(NamedTuple):
    """Rows `start .. stop` of a chunk follow the rows from `source` on: of the chunk, or of the state before it."""

    start: int
    stop: int
    source: int
    from_state: bool


@dataclass(frozen=True)
class Steps:
    """The steps of one chunk, in processing order; offsets count from the chunk's first row."""

    offsets: Sequence[int]
    batches: Sequence[int]

    def __len__(self) -> int:
        return len(self.offsets)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, number of rows) of every step."""
        return zip(self.offsets, self.batches, strict=True)

    @property
    def row_step(self) -> int | None:
        """Distance in rows from one step to the next where all steps are alike (dense input), else None."""
        return self.offsets.step if isinstance(self.offsets, range) else None

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The state each row follows, in as few runs of rows as possible.

        Row b of a step follows row b of the step before it where that step has one, and row b of the state the chunk
        starts from otherwise.
        """
        links: list[Link] = []
        before_offset, before = 0, 0
        for offset, batch in self.spans():
            shared = min(batch, before)
            for link in (
                Link(offset, offset + shared, before_offset, False),
                Link(offset + shared, offset + batch, shared, True),
            ):
                if link.start == link.stop:
                    continue
                merged = _merge(links[-1], link) if links else None
                if merged:
                    links[-1] = merged
                else:
                    links.append(link)
            before_offset, before = offset, batch
        return tuple(links)

    @cached_property
    def finals(self) -> tuple[tuple[int, int, int], ...]:
        """Runs (start, stop, row): rows `start .. stop` of the state after the chunk are its rows from `row` on."""
        runs = []
        after = [*self.batches[1:], 0]
        for (offset, batch), remaining in zip(self.spans(), after, strict=True):
            if remaining < batch:
                runs.append((remaining, batch, offset + remaining))
        return tuple(runs)


def _merge(a: Link, b: Link) -> Link | None:
    """Join two links into one where both their rows and what they follow are neighbours."""
    if a.from_state or b.from_state:
        return None
    if a.stop == b.start and a.source + (a.stop - a.start) == b.source:
        return Link(a.start, b.stop, a.source, False)
    if b.stop == a.start and b.source + (b.stop - b.start) == a.source:
        return Link(b.start, a.stop, b.source, False)
    return None


@lru_cache(maxsize=512)
def dense_steps(steps: int, batch: int, reverse: bool) -> Steps:
    """Return the steps of a dense chunk; equal chunks share one object and what it has cached."""
    offsets = range(0, steps * batch, batch)
    return Steps(offsets[::-1] if reverse else offsets, (batch,) * steps)


@dataclass(frozen=True)
class Chunk:
    """Steps `first .. last` of a sequence (`last` excluded), which lie in rows `start .. stop`."""

    first: int
    last: int
    start: int
    stop: int
    steps: Steps

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class SequenceLayout:
    """Rows of a batch of sequences.

    Args:
        steps: Number of timesteps T.
        batch: Number of sequences B (of the longest step, where they differ).
        batch_sizes: Active sequences per step, never growing (those of a `PackedSequence`); None for dense input.
    """

    steps: int
    batch: int
    batch_sizes: tuple[int, ...] | None = None

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.batch_sizes or (), initial=0))

    @property
    def rows(self) -> int:
        """Number of rows of the whole sequence."""
        return self.steps * self.batch if self.batch_sizes is None else self._offsets[-1]

    def chunks(self, length: int, reverse: bool = False, halve_tail: bool = False) -> list[Chunk]:
        """Cut time into chunks of `length` steps, in processing order.

        Args:
            length: Steps per chunk.
            reverse: Whether the last step comes first.
            halve_tail: Cut what remains after the full chunks into powers of two, so that sequences of any length
                use only a few different chunk lengths.
        """
        borders = self.borders(length, halve_tail)
        chunks = [self._chunk(a, b, reverse) for a, b in pairwise(borders)]
        return chunks[::-1] if reverse else chunks

    def borders(self, length: int, halve_tail: bool = False) -> list[int]:
        """Return the steps between which `chunks` cuts, in the order of time, 0 and T included."""
        borders = list(range(0, self.steps, length))
        tail = self.steps - borders[-1] if borders else 0
        if halve_tail and tail < length:
            first = borders.pop() if borders else 0
            while tail:
                piece = 1 << (tail.bit_length() - 1)
                borders.append(first)
                first, tail = first + piece, tail - piece
        return [*borders, self.steps]

    def _chunk(self, first: int, last: int, reverse: bool) -> Chunk:
        if self.batch_sizes is None:
            steps = dense_steps(last - first, self.batch, reverse)
            return Chunk(first, last, first * self.batch, last * self.batch, steps)
        start, stop = self._offsets[first], self._offsets[last]
        offsets = tuple(offset - start for offset in self._offsets[first:last])
        batches = self.batch_sizes[first:last]
        if reverse:
            offsets, batches = offsets[::-1], batches[::-1]
        return Chunk(first, last, start, stop, Steps(offsets, batches))

    def take(self, tensor: Tensor, chunk: Chunk) -> Tensor:
        """Return the chunk's rows [rows, features] of `tensor`, [T, B, features] or [rows, features].

        A view where the strides allow one, else a copy of this chunk only.
        """
        if tensor.dim() == 3:
            return tensor[chunk.first : chunk.last].reshape(chunk.rows, tensor.shape[2])
        return tensor[chunk.start : chunk.stop]
