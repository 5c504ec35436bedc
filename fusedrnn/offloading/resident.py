"""The plain stack: buffers stay where they are, and autograd keeps them as it keeps any saved tensor."""

import torch
from torch import Tensor


class ResidentSlot:
    """A reserved buffer, uint8 [nbytes]."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer


class ResidentHandle:
    """A pushed buffer, known by its place in the stack."""

    def __init__(self, stack: "ResidentStack", index: int):
        self._stack, self._index = stack, index

    def get(self, writable: bool = False) -> Tensor:
        """Return the buffer."""
        return self._stack.buffers[self._index]

    def release(self) -> None:
        """Do nothing: autograd frees what it keeps."""


class ResidentStack:
    """A stack without offloading, with the interface of `ActivationStack`.

    Between the passes its buffers are autograd's: `take` hands them over to be saved, `give` puts back what was read
    again. So they live as long as the graph, and saved-tensor hooks (checkpointing, `save_on_cpu`) see them.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.buffers: list[Tensor] = []

    def reserve(self, nbytes: int) -> ResidentSlot:
        """Return a slot with a fresh buffer of `nbytes` bytes."""
        return ResidentSlot(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def push(self, slot: ResidentSlot) -> ResidentHandle:
        """Take the slot's buffer and return its handle."""
        self.buffers.append(slot.buffer)
        return ResidentHandle(self, len(self.buffers) - 1)

    def take(self) -> list[Tensor]:
        """Return the buffers, for the caller to save, and forget them."""
        buffers, self.buffers = self.buffers, []
        return buffers

    def handles(self) -> list[ResidentHandle]:
        """Return the handles of the buffers that were put back."""
        return [ResidentHandle(self, index) for index in range(len(self.buffers))]

    def give(self, buffers: list[Tensor]) -> None:
        """Put the buffers back."""
        self.buffers = buffers
