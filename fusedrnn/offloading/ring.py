"""The ring of device buffers that offloading works with."""

import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor

from fusedrnn.offloading.device import Device


class Slot:
    """A device buffer and what must have happened before it may be written again.

    Args:
        buffer: The memory.
        nbytes: Its size.
        home: Stream on which it was allocated, to which its memory returns.
        source: The tensor whose memory it is, where it is not the ring's but adopted. The slot is gone with its entry.
    """

    __slots__ = ("buffer", "free", "generation", "home", "nbytes", "owner", "source", "start", "version", "writer")

    def __init__(self, buffer: Any, nbytes: int, home: Any, source: Tensor | None = None):
        self.buffer, self.nbytes, self.home, self.source = buffer, nbytes, home, source
        self.version = 0 if source is None else source._version
        self.free: tuple[Any, ...] = ()
        self.start: Any = None
        """Timed event at which its writer began, where times are taken."""
        self.writer: Any = None
        """Stream of the writer."""
        self.owner: Any = None
        """Who has reserved it, as an `Owner`."""
        self.generation = 0
        """Of the scheduler's state to which it belongs, while it is reserved."""

    def changed(self) -> bool:
        """Return whether an adopted tensor was changed in place since."""
        return self.source is not None and self.source._version != self.version


class Ring:
    """Device buffers that are used again and again, each under its own storage.

    Args:
        device: Where they live.
        slots: How many of the largest size may exist while the device is full.
        budget: Most bytes that may be held at any time, or None.
    """

    def __init__(self, device: Device, slots: int, budget: int | None = None):
        self._device, self._slots, self.budget = device, slots, budget
        self._free: dict[int, deque[Slot]] = {}
        self._largest = 0
        self._most = sys.maxsize
        self.held = 0
        self.free = 0
        self.peak = 0
        self.bound = 0
        """Bytes that the ring keeps to while the device is full."""

    def take(self, nbytes: int, at_most: int | None = None) -> Slot | None:
        """Return a free slot of at least `nbytes` and at most `at_most` bytes, the smallest and longest free one."""
        slots = self._free.get(nbytes)
        if not slots:
            sizes = [size for size, found in self._free.items() if found and size >= nbytes]
            if not sizes or (at_most is not None and min(sizes) > at_most):
                return None
            slots = self._free[min(sizes)]
        slot = slots.popleft()
        self.free -= slot.nbytes
        return slot

    def give(self, slot: Slot, events: tuple[Any, ...]) -> None:
        """Take a slot back, to be written again after `events` (edge E7)."""
        if slot.source is not None:
            self.drop(slot, events)
            return
        slot.free, slot.start, slot.owner = events, None, None
        self._free.setdefault(slot.nbytes, deque()).append(slot)
        self.free += slot.nbytes

    def may_grow(self, nbytes: int) -> bool:
        """Return whether a slot of `nbytes` more keeps the ring within its bound."""
        bound = self.bound if nbytes <= self._largest else min(self._slots * nbytes, self._most)
        return self.held + nbytes <= bound

    def refuse(self) -> None:
        """Keep to what is held, since the device has no room, until `reset`."""
        self._most = self.held
        self.bound = min(self.bound, self.held)

    def reset(self) -> None:
        """Forget a refusal, and keep no more free slots than the bound allows."""
        self._most = sys.maxsize
        self.bound = self._slots * self._largest
        if self.held > self.bound:
            self.shrink(self.bound)

    def grow(self, nbytes: int) -> Slot:
        """Return a new slot.

        Raises:
            torch.OutOfMemoryError: If the device has no room, or the budget none.
        """
        if self.budget is not None and self.held + nbytes > self.budget:
            raise torch.OutOfMemoryError(
                f"`memory_budget` of {self.budget} bytes has no room for a buffer of {nbytes} bytes beside the "
                f"{self.held} bytes in use. Raise it, raise `host_limit`, or take shorter chunks (`chunk`)"
            )
        stream = self._device.current_stream()
        slot = Slot(self._device.allocate(nbytes), nbytes, stream)
        # The allocator orders the memory's earlier uses before this stream, and before no other.
        slot.free = (self._device.record(stream),)
        if nbytes > self._largest:
            self._largest = nbytes
            self.bound = min(self._slots * nbytes, self._most)
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return slot

    def drop(self, slot: Slot, events: tuple[Any, ...]) -> None:
        """Give a slot's memory back to the allocator, to be used again after `events`.

        It is freed when nobody refers to it any more.
        """
        for event in events:
            self._device.wait(slot.home, event)
        if slot.source is None:
            self.held -= slot.nbytes
        slot.buffer, slot.source, slot.free, slot.owner = None, None, (), None

    def lend(self, slot: Slot) -> None:
        """Leave a slot to somebody who refers to it: it is not the ring's until `take_back`."""
        self.held -= slot.nbytes if slot.source is None else 0

    def take_back(self, slot: Slot, events: tuple[Any, ...]) -> None:
        """Take back a slot that was lent, to be written again after `events`, or drop it if there are enough."""
        self.held += slot.nbytes if slot.source is None else 0
        if self.held <= self.bound:
            self.give(slot, events)
        else:
            self.drop(slot, events)

    def shrink(self, target: int = 0) -> None:
        """Drop free slots, the largest first, until no more than `target` bytes are held."""
        for nbytes in sorted(self._free, reverse=True):
            slots = self._free[nbytes]
            while slots and self.held > target:
                slot = slots.popleft()
                self.free -= nbytes
                self.drop(slot, slot.free)
