"""What a streamed pass brings: its result, put together from segments, and what it leaves for its backward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrnn.backends.rows import aligned, views
from fusedrnn.cells import state_dtype
from fusedrnn.streaming.transfer import Departures


class Record(NamedTuple):
    """Tensors that wait in one slot of the stack."""

    handle: Any
    like: list[tuple[torch.Size, torch.dtype]]

    def get(self) -> list[Tensor]:
        """Return the tensors, views of the slot."""
        return views(self.handle.get(), self.like)


def record_in(stack: Any, tensors: Sequence[Tensor]) -> Record:
    """Copy tensors into a slot of a stack."""
    like = [(tensor.shape, tensor.dtype) for tensor in tensors]
    slot = stack.reserve(sum(aligned(tensor.nbytes) for tensor in tensors))
    for part, tensor in zip(views(slot.buffer, like), tensors, strict=True):
        part.copy_(tensor)
    del part  # it would count as another user of the buffer
    return Record(stack.push(slot), like)


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
