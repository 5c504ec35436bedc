"""Pools of memory below the device: slabs of powers of two, pinned or in files, cut into slots of any size."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from fusedrnn.offloading.accounts import Account
from fusedrnn.offloading.device import Device, Span

_LEAST_SLAB = 1 << 20


class _Free(NamedTuple):
    """A free range of a slab, to be written again after `events`."""

    slab: int
    start: int
    stop: int
    events: tuple[Any, ...]


class HostSlot:
    """A range of a slab and what must have happened before it may be written again."""

    __slots__ = ("events", "slab", "span")

    def __init__(self, slab: int, span: Span, events: tuple[Any, ...]):
        self.slab, self.span, self.events = slab, span, events


class HostPool:
    """Memory under a limit.

    Pinning takes milliseconds and the allocator rounds every request up to a power of two, so memory is taken in
    slabs that are powers of two, each as large as all before it together, and cut here. So it is with files, of which
    a process may have only so many open.

    Args:
        device: Whose events are waited for.
        allocate: Returns a slab of so many bytes, or None where there is none.
        limit: Most bytes in slabs, of this and all other pools of the account together.
        account: Counts them.
        alignment: What the size of slots is a multiple of.
        most: Size of the largest slabs.
    """

    def __init__(
        self,
        device: Device,
        allocate: Callable[[int], Any | None],
        limit: int,
        account: Account,
        alignment: int = 256,
        most: int = 1 << 30,
    ):
        self._device, self._allocate, self._alignment, self._most = device, allocate, alignment, most
        self.limit, self.account = limit, account
        self._slabs: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._next = 0
        self._free: dict[int, deque[_Free]] = {}
        self._refused = most * 2
        self.reserved = 0
        self.used = 0
        self.peak = 0
        self.failures = 0
        self.calls = 0

    @property
    def capacity(self) -> int:
        """Bytes that it can hold, as far as is known."""
        return self.reserved if self.failures else self.limit - self.account.others(self)

    def take(self, nbytes: int) -> HostSlot | None:
        """Return a slot of `nbytes`, or None where the host has no room for it."""
        size = self._aligned(nbytes)
        free = self._find(size)
        if free is None and self._merge():
            free = self._find(size)
        if free is None and self.reserve(size):
            free = self._find(size)
        if free is None:
            return None
        if free.start + size < free.stop:
            self._put(free._replace(start=free.start + size))
        self.used += size
        self.peak = max(self.peak, self.used)
        span = Span(self._slabs[free.slab], free.start, free.start + nbytes)
        return HostSlot(free.slab, span, free.events)

    def give(self, slot: HostSlot, events: tuple[Any, ...]) -> None:
        """Take a slot back, to be written again after `events` (edge E8)."""
        start, stop = slot.span.start, slot.span.start + self._aligned(slot.span.stop - slot.span.start)
        self.used -= stop - start
        self._put(_Free(slot.slab, start, stop, events))

    def reserve(self, nbytes: int) -> bool:
        """Take a slab in which `nbytes` fit; return whether there was one."""
        least = _power(nbytes)
        with self.account.lock:
            if self.reserved + least > self.limit - self.account.others(self):
                self.account.reclaim(self)
            return self._reserve(least, self.limit - self.account.others(self))

    def _reserve(self, least: int, limit: int) -> bool:
        """Take a slab of at least `least` bytes, within `limit`."""
        size = max(least, min(max(_LEAST_SLAB, _power(self.reserved)), self._most))
        while size > least and (self.reserved + size > limit or size >= self._refused):
            size //= 2
        while size >= least and self.reserved + size <= limit and size < self._refused:
            self.calls += 1
            slab = self._allocate(size)
            if slab is not None:
                self._slabs[self._next], self._sizes[self._next] = slab, size
                self._put(_Free(self._next, 0, size, ()))
                self._next += 1
                self.reserved += size
                return True
            # What was refused once is not asked for again: each refusal costs milliseconds and may poison a launch.
            self.failures += 1
            self._refused = size
            size //= 2
        return False

    def trim(self, wait: bool = True) -> int:
        """Give back the slabs of which nothing is in use and return their bytes.

        Args:
            wait: Whether the host waits for what still reads or writes them; otherwise such slabs stay.
        """
        self._merge()
        trimmed = 0
        for size, ranges in list(self._free.items()):
            for free in list(ranges):
                if size == self._sizes[free.slab] and (wait or all(map(self._device.query, free.events))):
                    for event in free.events:
                        self._device.synchronize(event)
                    ranges.remove(free)
                    del self._slabs[free.slab], self._sizes[free.slab]
                    trimmed += size
            if not ranges:
                del self._free[size]
        self.reserved -= trimmed
        self._refused = self._most * 2
        return trimmed

    def give_up(self) -> None:
        """Hold nothing any more."""
        self._slabs, self._sizes, self._free = {}, {}, {}
        self.reserved = self.used = 0

    def audit(self, used: list[HostSlot]) -> None:
        """Check that free ranges and `used` slots together are the slabs, none of them twice."""
        ranges = [(free.slab, free.start, free.stop) for found in self._free.values() for free in found]
        taken = [
            (slot.slab, slot.span.start, slot.span.start + self._aligned(slot.span.stop - slot.span.start))
            for slot in used
        ]
        assert self.used == sum(stop - start for _, start, stop in taken)
        ends = dict.fromkeys(self._slabs, 0)
        for slab, start, stop in sorted(ranges + taken):
            assert ends[slab] == start, (slab, start, stop)
            ends[slab] = stop
        assert ends == self._sizes and sum(ends.values()) == self.reserved <= max(self.limit, 0)

    def _find(self, size: int) -> _Free | None:
        """Remove and return the smallest free range in which `size` fits."""
        if size not in self._free:
            size = min((found for found in self._free if found > size), default=0)
            if not size:
                return None
        ranges = self._free[size]
        free = ranges.popleft()
        if not ranges:
            # Every size that was ever cut would be looked at otherwise.
            del self._free[size]
        return free

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def _put(self, free: _Free) -> None:
        self._free.setdefault(free.stop - free.start, deque()).append(free)

    def _merge(self) -> bool:
        """Join neighbouring free ranges; return whether there were any."""
        ranges = sorted(free for found in self._free.values() for free in found)
        joined: list[_Free] = []
        for free in ranges:
            if joined and (joined[-1].slab, joined[-1].stop) == (free.slab, free.start):
                pending = tuple(event for event in joined[-1].events + free.events if not self._device.query(event))
                joined[-1] = joined[-1]._replace(stop=free.stop, events=pending)
            else:
                joined.append(free)
        self._free = {}
        for free in joined:
            self._put(free)
        return len(joined) < len(ranges)


def _power(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()
