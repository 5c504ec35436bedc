"""The plain stack: buffers stay where they are."""

import torch
from torch import Tensor


class ResidentBuffer:
    """A buffer that is its own slot and its own handle."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer

    def get(self, writable: bool = False) -> Tensor:
        """Return the buffer, uint8 [nbytes]."""
        return self.buffer

    def release(self) -> None:
        """Free the buffer."""
        self.buffer = self.buffer.new_empty(0)


class ResidentStack:
    """A stack without offloading, with the interface of `ActivationStack`."""

    def __init__(self, device: torch.device):
        self._device = device

    def reserve(self, nbytes: int) -> ResidentBuffer:
        """Return a fresh buffer of `nbytes` bytes."""
        return ResidentBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def push(self, slot: ResidentBuffer) -> ResidentBuffer:
        """Return the buffer's handle."""
        return slot
