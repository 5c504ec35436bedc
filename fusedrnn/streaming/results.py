"""What a streamed pass brings: its result, put together from segments, and what it leaves for its backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrnn.backends.rows import aligned, views
from fusedrnn.cells import state_dtype
from fusedrnn.streaming.transfer import Departures

_BLOCK = 1 << 18
"""Bytes of records gathered in one slot, so that those of short segments are worth a copy to the host or a disk."""


class _Block:
    """A slot of a stack, with a handle once it is full."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle: Any = None


class Record(NamedTuple):
    """Tensors that wait in a slot of the stack, together with those of other segments."""

    block: _Block
    start: int
    first: bool
    like: tuple[tuple[torch.Size, torch.dtype], ...]

    def get(self) -> list[Tensor]:
        """Return the tensors, views of the slot."""
        return views(self.block.handle.get()[self.start :], self.like)

    def release(self) -> None:
        """Give the slot back, if this is the first in it: records are released from the last to the first."""
        if self.first:
            self.block.handle.release()


class Records:
    """Gathers the tensors that segments leave in slots of a stack.

    Args:
        stack: Where the slots come from.
    """

    def __init__(self, stack: Any):
        self._stack = stack
        self._slot: Any = None
        self._block = _Block()
        self._filled = self._total = 0
        self._like: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def add(self, tensors: Sequence[Tensor]) -> Record:
        """Copy tensors to the end of the present slot, or to a new one."""
        like = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        # One object for all segments that are alike.
        self._like = like = self._like if like == self._like else like
        nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        if self._slot is not None and self._filled + nbytes > self._slot.buffer.numel():
            self.close()
        first = self._slot is None
        if first:
            # As large as all before it, so that a short sequence takes no more than twice its need.
            self._slot = self._stack.reserve(max(nbytes, min(_BLOCK, self._total)))
        start, self._filled = self._filled, self._filled + nbytes
        self._total += nbytes
        for part, tensor in zip(views(self._slot.buffer[start:], like), tensors, strict=True):
            part.copy_(tensor)
        return Record(self._block, start, first, like)

    def close(self) -> None:
        """Push the present slot."""
        if self._slot is not None:
            self._block.handle = self._stack.push(self._slot)
            self._slot, self._block, self._filled = None, _Block(), 0


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
