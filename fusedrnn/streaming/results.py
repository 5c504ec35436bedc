"""What a streamed pass brings: its result, put together from segments, and what it leaves for its backward pass."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.rows import aligned, views
from fusedrnn.cells import state_dtype
from fusedrnn.streaming.transfer import Departures

_BLOCK = 1 << 16
"""Bytes gathered in one slot, so that short segments are worth a copy; more would take memory for little."""


_Like = tuple[tuple[torch.Size, torch.dtype], ...]


class _Block:
    """A slot of a stack, with a handle once it is full."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle: Any = None


def append_shared(items: list[Any], item: Any) -> None:
    """Append an item, or the last one once more where they are equal: one object then serves many segments."""
    items.append(items[-1] if items and items[-1] == item else item)


class Records:
    """Tensors of segments, numbered from 0, gathered in slots of a stack.

    A sequence may have a great many segments, so there is no object for each.

    Args:
        stack: Where the slots come from.
    """

    def __init__(self, stack: Any):
        self._stack = stack
        self._slot: Any = None
        self._filled = self._total = 0
        self._blocks: list[_Block] = []
        self._starts = array("q")
        self._likes: list[_Like] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the next segment to the end of the present slot, or to a new one."""
        like = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        if self._slot is not None and self._filled + nbytes > self._slot.buffer.numel():
            self.close()
        if self._slot is None:
            # As large as all before it, so that a short sequence takes no more than twice its need.
            self._slot, self._filled = self._stack.reserve(max(nbytes, min(_BLOCK, self._total))), 0
            block = _Block()
        else:
            block = self._blocks[-1]
        for part, tensor in zip(views(self._slot.buffer[self._filled :], like), tensors, strict=True):
            part.copy_(tensor)
        self._blocks.append(block)
        self._starts.append(self._filled)
        append_shared(self._likes, like)
        self._filled += nbytes
        self._total += nbytes

    def close(self) -> None:
        """Push the present slot."""
        if self._slot is not None:
            self._blocks[-1].handle = self._stack.push(self._slot)
            self._slot = None

    def get(self, number: int) -> list[Tensor]:
        """Return the tensors of a segment, views of a slot."""
        return views(self._blocks[number].handle.get()[self._starts[number] :], self._likes[number])

    def release(self, number: int) -> None:
        """Give back the slot, if the segment is the first in it: they are released from the last to the first."""
        if self._starts[number] == 0:
            self._blocks[number].handle.release()


class Result:
    """What becomes of the outputs: rows of a tensor, its last row, or a sum of losses.

    Args:
        output: "sequence", "last" or "host"; see `fusedrnn.LSTM.forward`.
        steps: Timesteps in all, None where not known before the end.
        device: Where the outputs are computed.
    """

    def __init__(self, output: str, steps: int | None, device: torch.device):
        self._output, self._steps = output, steps
        self._device = torch.device("cpu") if output == "host" else device
        self._departures = Departures(device)
        self._parts: list[Tensor] = []

    def put(self, at: slice, y: Tensor) -> None:
        """Take the output [n, B, P] of a segment."""
        if self._output == "last":
            self._parts = [y[-1].clone()] if len(y) else []
            return
        if self._steps is None:
            self._parts.append(torch.empty(y.shape, dtype=y.dtype, device=self._device))
            rows = self._parts[-1]
        else:
            if not self._parts:
                self._parts.append(torch.empty(self._steps, *y.shape[1:], dtype=y.dtype, device=self._device))
            rows = self._parts[0][at]
        self._departures.put(rows, y)

    def add(self, value: Tensor) -> None:
        """Take the loss of a segment."""
        wide = value.to(state_dtype(value.dtype))
        self._parts = [self._parts[0] + wide if self._parts else wide]

    def close(self) -> None:
        """Wait until everything has arrived."""
        self._departures.close()

    def value(self) -> Tensor:
        """Return the result."""
        if not self._parts:
            raise ValueError('`input` must have at least one timestep with output="last", got none')
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
