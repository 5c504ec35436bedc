"""What happens when: whom to spill, what to fetch ahead, and where a slot comes from."""

from collections.abc import Iterator
from itertools import islice

import torch

from fusedrnn.offloading import policy
from fusedrnn.offloading.config import OffloadConfig, OffloadHostFull
from fusedrnn.offloading.device import Device
from fusedrnn.offloading.disk_tier import DiskTier
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.policy import Pressure
from fusedrnn.offloading.ring import Slot
from fusedrnn.offloading.transitions import from_newest

_LOOKED_AT = 16
"""Tensors looked at in search of one to spill."""


class Decisions(DiskTier):
    """The decisions over the entries of one device. No method here is thread-safe.

    Args:
        device: Where the buffers live.
        config: What the user wants.
    """

    def __init__(self, device: Device, config: OffloadConfig):
        super().__init__(device, config)
        self._level = Pressure.NONE
        self._above = False
        self._credit = 0.0
        self._room: int | None = None
        self._announced = self._most = self._most_before = 0
        self._told = False

    def _sample(self) -> None:
        """Ask how full the device is."""
        counters, config, ring = self.counters, self.config, self.ring
        total, allocated = None, 0
        if config.occupancy is not None:
            occupancy = config.occupancy()
        else:
            total, allocated = self.device.memory(), self.device.allocated()
            occupancy = (allocated - ring.free) / total if total else 0.0
        if ring.budget is not None:
            occupancy = max(occupancy, (ring.held - ring.free + self._adopted) / ring.budget)
        counters.occupancy_asked += 1
        counters.occupancy_peak = max(counters.occupancy_peak, occupancy)
        speeds = self.recorder.speeds
        self._level = policy.pressure(occupancy, config.occupancy_limit, config.low_watermark, self._level, speeds)
        self._above = occupancy > config.occupancy_limit
        if total is not None:
            self._room = policy.capacity(ring.held, allocated, total, config.occupancy_limit, ring.bound)
        else:
            self._room = None if self._level is Pressure.NONE else ring.bound
        if ring.budget is not None:
            most = policy.capacity(ring.held, ring.held, ring.budget, config.occupancy_limit, 0)
            self._room = most if self._room is None else min(self._room, most)

    def _make_room(self, nbytes: int) -> None:
        """Spill the oldest behind a push of `nbytes`, and let the ring shrink while the device is too full."""
        ring, held = self.ring, self._bytes
        full = self._level is Pressure.FULL
        excess = max(0, ring.held - ring.bound) if full and self._above else 0
        if excess and held[State.SPILLING] >= 2 * nbytes:
            self._retire(next(iter(self._states[State.SPILLING])))
            ring.shrink(ring.held - nbytes)
        missing = None
        if self._room is not None and (self._told or self._most_before):
            missing = max(self._live + self._announced, self._most_before) - self._room
        if self._level is Pressure.PACED and (missing is None or missing > held[State.SPILLING] + self._away()):
            self._credit = min(2.0, self._credit + policy.hidden_fraction(self.recorder.speeds))
            if self._credit >= 1 and self._spill_oldest("paced"):
                self._credit -= 1
            return
        for _ in range(3 if full else 1):
            away = held[State.SPILLING] + self._away()
            behind = ring.free + held[State.SPILLING] + max(0, ring.bound - ring.held)
            left = None if missing is None else missing - away
            if policy.spill_target(full, nbytes, left, behind, excess) <= 0:
                return
            if not self._spill_oldest("full" if full else "will be full"):
                return

    def _make_room_adopted(self, nbytes: int) -> None:
        """Spill the oldest behind a push of `nbytes`, so that the tensors on the device fit a ring of chunks."""
        held, unit = self._bytes, max(nbytes, self.config.chunk_bytes)
        if self._level is Pressure.NONE:
            return
        room = (self.config.ring_slots - 2) * unit
        while self._adopted - held[State.SPILLING] > room and self._spill_oldest("full"):
            pass
        # Their memory returns to the allocator late, so that the wait for the copy is short or none.
        for entry in list(islice(self._states[State.SPILLING], _LOOKED_AT)):
            if held[State.SPILLING] - entry.nbytes < unit:
                return
            self._retire(entry)

    def _spill_oldest(self, reason: str) -> bool:
        """Spill the oldest entry that may be; return whether there was one, and room for it."""
        for entry in list(islice(self._states[State.RESIDENT], _LOOKED_AT)):
            assert entry.slot is not None
            if entry.slot.source is None or self.device.holders(entry.slot.buffer) == 1:
                return self._may_spill(entry, reason)
            # A copy would free nothing while somebody else refers to it: perhaps later.
            self.counters.pinned_by_alias += 1
            self._states[State.RESIDENT].move_to_end(entry)
        # A kept graph leaves entries behind that were read and will be read again.
        for entry in self._states[State.READY]:
            if not entry.is_copied() and self._is_idle(entry):
                return self._may_spill(entry, reason)
        return False

    def _may_spill(self, entry: Entry, reason: str) -> bool:
        """Spill an entry, if the host has room; return whether it had."""
        # A copy that could not be put on its stream has left its host slot with the entry.
        if entry.host is None:
            entry.host = self._take_host(entry.nbytes)
            if entry.host is None:
                return False
        self._spill(entry, reason)
        return True

    def _prefetch(self, entry: Entry | None) -> None:
        """Fetch what is expected to be read next: `entry`, then the older ones, into slots that are free."""
        if entry is None or not self._away():
            return
        if self.disk is not None:
            self._read_ahead()
        depth = policy.prefetch_depth(self.config.prefetch, self.recorder.speeds)
        for candidate in self._expected(entry, depth):
            if depth is not None and len(self._states[State.LOADING]) >= depth:
                return
            if candidate.state in (State.HOST, State.WRITING):
                slot = self.ring.take(candidate.nbytes)
                if slot is None and self.ring.may_grow(candidate.nbytes):
                    slot = self._grow(candidate.nbytes)
                if slot is None:
                    return
                self._load(candidate, slot, "prefetched")

    def _expected(self, entry: Entry, depth: int | None) -> Iterator[Entry]:
        """Yield `depth` entries in the order in which they will be read, or all those on the host."""
        if depth is not None:
            yield from islice(from_newest(entry), depth)
            return
        while waiting := self._states[State.HOST] or self._states[State.WRITING]:
            newest = next(reversed(waiting))
            if newest.sequence > entry.sequence:
                return
            yield newest

    # Device memory.

    def _acquire(self, nbytes: int) -> Slot:
        """Return a slot: a free one, a new one, or that of the entry that is needed last."""
        ring = self.ring
        slot = ring.take(nbytes, 2 * nbytes)
        if slot is None and (
            self._level is Pressure.NONE
            or (self._level is Pressure.PACED and self._bytes[State.SPILLING] < 2 * nbytes)
            or ring.may_grow(nbytes)
        ):
            slot = self._grow(nbytes)
        full = self.counters.host_full
        while slot is None:
            slot = ring.take(nbytes)
            if slot is None:
                # Those that are free are too small.
                ring.shrink(max(0, ring.bound - nbytes))
                if ring.may_grow(nbytes):
                    slot = self._grow(nbytes)
                elif not self._give_way():
                    break
        if slot is not None:
            return slot
        if self.counters.host_full > full and self.config.on_host_full == "raise":
            raise OffloadHostFull(
                f"no room for a buffer of {nbytes} bytes: the ring holds {ring.held} bytes in use and the host "
                f"{self.host.used} of at most {self.host.limit}. Raise `{self._limit_name()}` or `ring_slots`, or set "
                '`on_host_full="keep"` to let buffers stay on the device.'
            )
        self.counters.ring_grown += 1
        slot = self._grow(nbytes)
        if slot is None:
            ring.shrink()
            try:
                slot = ring.grow(nbytes)
            except torch.OutOfMemoryError as error:
                error.add_note(f"fusedrnn.offload held {ring.held} bytes of device buffers: {self.counters}")
                raise
        return slot

    def _limit_name(self) -> str:
        return "disk_limit" if self.direct else "host_limit"

    def _grow(self, nbytes: int) -> Slot | None:
        """Return a new slot, or None where the device has no room; the ring then keeps to what it holds."""
        try:
            return self.ring.grow(nbytes)
        except torch.OutOfMemoryError:
            self.counters.device_failures += 1
            self.ring.refuse()
            self._level = Pressure.FULL
            return None

    def _give_way(self) -> bool:
        """Bring one slot closer to being free; return whether there was one."""
        for entry in self._states[State.SPILLING]:
            self.counters.ring_waits += 1
            self._retire(entry)
            return True
        for entry in self._states[State.READY]:
            if entry.is_copied() and self._is_idle(entry):
                self._retire(entry)
                return True
        if self._states[State.LOADING]:
            farthest = min(self._states[State.LOADING], key=lambda entry: entry.sequence)
            self.counters.unprefetched += 1
            self._retire(farthest)
            self._states[farthest.state].move_to_end(farthest, last=farthest.state is State.DISK)
            return True
        if self._spill_oldest("no slot"):
            return True
        # Rather the disk is waited for than the ring grown without bound.
        return bool(self._states[State.RESIDENT]) and self._await_write()

    def _is_idle(self, entry: Entry) -> bool:
        """Return whether nobody refers to a buffer that was read, so that nothing more will be done with it."""
        return not entry.written and entry.slot is not None and self.device.holders(entry.slot.buffer) == 0

    def _has_enough(self, nbytes: int) -> bool:
        """Return whether the ring, above its bound, has enough free slots for what is still to be fetched."""
        if self.ring.held <= self.ring.bound:
            return False
        depth = policy.prefetch_depth(self.config.prefetch, self.recorder.speeds)
        return not self._away() or (depth is not None and self.ring.free > depth * nbytes)

    def _end_cycle(self) -> None:
        """After the last entry, keep no more than the ring's bound, and know how much there was."""
        if self._newest is None:
            if self._most:
                self._most_before, self._most = self._most, 0
            self._told = self._announced > 0
            self.ring.reset()
