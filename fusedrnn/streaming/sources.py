"""Where a streamed input comes from: a tensor, an array such as a memory-mapped file, or chunks one after another."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Read = Callable[[], Tensor]
"""Returns the rows [n, B, I] of one segment; it may take its time, and is called on a thread."""


class Source:
    """An input in segments.

    Args:
        batch_first: Whether the user's dimensions are (B, T, I).
        check: Raises unless a tensor's dimensions, width and dtype are those of an input.
    """

    tensor: Tensor | None = None
    """The whole input, where it is a tensor: a gradient goes there."""
    steps: int | None = None
    """Timesteps in all, None where nobody knows before the end."""
    batch: int | None = None
    """Batch size, None where nobody knows before the first segment."""
    again: bool
    """Whether it can be read a second time."""
    unbatched: bool = False
    """Whether it has no dimension for the batch; for chunks, known after the first."""

    def __init__(self, batch_first: bool, check: Callable[[Tensor], None]):
        self._batch_first, self._check = batch_first, check

    def is_on(self, device: torch.device) -> bool:
        """Return whether it is a tensor on this device already, so that there is nothing to fetch."""
        return self.tensor is not None and self.tensor.device == device

    def reads(self) -> Iterator[Read]:
        """Yield the segments in the order of time."""
        raise NotImplementedError

    def reads_again(self, segments: Sequence[slice]) -> Iterator[Read]:
        """Yield segments that were read before, the last one first."""
        raise NotImplementedError

    def rows(self, whole: Tensor, at: slice) -> Tensor:
        """Return the timesteps `at` of a tensor shaped as the whole input, a view [n, B, I]."""
        raise NotImplementedError

    def _arranged(self, piece: Tensor) -> Tensor:
        """Return a checked piece as [n, B, I], a view."""
        self._check(piece)
        return self._arrange(piece)

    def _arrange(self, piece: Tensor) -> Tensor:
        if piece.dim() == 2:
            return piece.unsqueeze(1)
        return piece.transpose(0, 1) if self._batch_first else piece


class _Whole(Source):
    """A tensor or an array that can be cut anywhere.

    Args:
        data: What is cut.
        length: Timesteps per segment.
        batch_first: See `Source`.
        check: See `Source`.
    """

    again = True

    def __init__(self, data: Any, length: int, batch_first: bool, check: Callable[[Tensor], None]):
        super().__init__(batch_first, check)
        check(data if isinstance(data, Tensor) else torch.from_numpy(data[:0].copy()))
        self._data, self._length = data, length
        self.unbatched = len(data.shape) == 2
        self._time = 1 if batch_first and not self.unbatched else 0
        self.steps = int(data.shape[self._time])
        self.batch = 1 if self.unbatched else int(data.shape[1 - self._time])
        self.tensor = data if isinstance(data, Tensor) else None

    def reads(self) -> Iterator[Read]:
        """See `Source.reads`."""
        assert self.steps is not None
        for first in range(0, max(1, self.steps), self._length):
            yield partial(self._cut, slice(first, min(first + self._length, self.steps)))

    def reads_again(self, segments: Sequence[slice]) -> Iterator[Read]:
        """See `Source.reads_again`."""
        return (partial(self._cut, at) for at in reversed(segments))

    def rows(self, whole: Tensor, at: slice) -> Tensor:
        """See `Source.rows`."""
        return self._arrange(whole[(slice(None),) * self._time + (at,)])

    def _cut(self, at: slice) -> Tensor:
        piece = self._data[(slice(None),) * self._time + (at,)]
        if not isinstance(piece, Tensor):
            piece = torch.from_numpy(piece.copy())
            self._let_go()
        return self._arranged(piece.detach())

    def _let_go(self) -> None:
        """Unmap the pages of a mapped file that were read; they stay in the system's cache, and count for nobody."""
        mapped, mode = getattr(self._data, "_mmap", None), getattr(self._data, "mode", "c")
        # A private mapping would lose what was written to it.
        if isinstance(mapped, mmap.mmap) and mode != "c":
            mapped.madvise(mmap.MADV_DONTNEED)


class _Chunks(Source):
    """Chunks as the user cut them; read again if they can be asked for by number."""

    def __init__(self, chunks: Iterable[Any], *args: Any):
        super().__init__(*args)
        self._chunks, self._dimensions = chunks, 0
        self._made = not isinstance(chunks, (list, tuple))
        self.again = hasattr(chunks, "__getitem__") and hasattr(chunks, "__len__")

    def reads(self) -> Iterator[Read]:
        """See `Source.reads`."""
        for number, chunk in enumerate(self._chunks):
            yield partial(self._take, number, chunk)

    def reads_again(self, segments: Sequence[slice]) -> Iterator[Read]:
        """See `Source.reads_again`."""
        chunks: Any = self._chunks
        return (partial(self._take_again, number, chunks) for number in reversed(range(len(segments))))

    def _take_again(self, number: int, chunks: Any) -> Tensor:
        return self._take(number, chunks[number])

    def _take(self, number: int, chunk: Any) -> Tensor:
        copied = hasattr(chunk, "__array_interface__")
        if copied:
            chunk = torch.from_numpy(chunk.copy())
        if not isinstance(chunk, Tensor):
            raise TypeError(f"`input` must yield tensors or arrays, got {type(chunk).__name__} as chunk {number}")
        if chunk.requires_grad:
            raise ValueError(
                f"`input` must yield tensors without gradients, got one with `requires_grad` as chunk {number}: give "
                "the input as one tensor (on the host, if it is long), which then gets its gradient there"
            )
        if self._made and not copied:
            # Whoever makes chunks one by one may make the next in the same memory, while this one waits for its turn.
            chunk = chunk.clone()
        try:
            arranged = self._arranged(chunk)
            dimensions = self._dimensions or chunk.dim()
            if chunk.dim() != dimensions or (self.batch is not None and arranged.shape[1] != self.batch):
                raise ValueError(
                    f"`input` must yield chunks that differ in nothing but their length, got {tuple(chunk.shape)} "
                    f"after chunks of {dimensions} dimensions and batch size {self.batch}"
                )
        except ValueError as error:
            error.add_note(f"This is chunk {number} of `input`, counted from 0.")
            raise
        self._dimensions, self.unbatched, self.batch = dimensions, dimensions == 2, arranged.shape[1]
        return arranged


def source_of(data: Any, batch_first: bool, length: int, check: Callable[[Tensor], None]) -> Source:
    """Return the source for whatever a user gave as an input.

    Args:
        data: A tensor, an array of NumPy (a memory-mapped file is one), or an iterable of chunks of either kind.
        batch_first: See `Source`.
        length: Timesteps per segment where the input can be cut anywhere.
        check: See `Source`.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is not checked successfully.
    """
    if isinstance(data, Tensor) or hasattr(data, "__array_interface__"):
        return _Whole(data, length, batch_first, check)
    if not isinstance(data, Iterable):
        raise TypeError(f"`input` must be a tensor, an array or an iterable of chunks, got {type(data).__name__}")
    return _Chunks(data, batch_first, check)
