"""Which entries make way, and where slots come from: on the device, on the host and in files."""

from itertools import islice

import torch

from fusedrnn.offloading import policy
from fusedrnn.offloading.config import OffloadHostFull
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.host import HostSlot
from fusedrnn.offloading.policy import Pressure
from fusedrnn.offloading.ring import Slot
from fusedrnn.offloading.transfers import Transfers

_LOOKED_AT = 16
"""Entries looked at in search of one to spill or to write: where none of them can go, the others are left alone."""


class Spiller:
    """Makes room on one device and below it. It is not thread-safe.

    Args:
        transfers: What moves the entries.
    """

    def __init__(self, transfers: Transfers):
        self._transfers, self._table, self._ring = transfers, transfers.table, transfers.ring
        self._device, self._config, self._counters = transfers.device, transfers.config, transfers.counters
        self._states, self._bytes = self._table.states, self._table.bytes
        self.level = Pressure.NONE
        self._above = False
        self._credit = 0.0
        self._room: int | None = None
        self.announced = 0
        """Bytes that are known to be pushed soon."""
        self.told = False
        """Whether anything has been announced since the table was empty."""
        self._most = self._most_before = 0

    def sample(self, occupancy: float | None) -> None:
        """Take in how full the device is; without `occupancy`, as its allocator says."""
        counters, config, ring = self._counters, self._config, self._ring
        total, allocated = None, 0
        if occupancy is None:
            total, allocated = self._device.memory(), self._device.allocated()
            occupancy = (allocated - ring.free) / total if total else 0.0
        if ring.budget is not None:
            occupancy = max(occupancy, (ring.held - ring.free + self._table.adopted) / ring.budget)
        counters.occupancy_asked += 1
        counters.occupancy_peak = max(counters.occupancy_peak, occupancy)
        speeds = self._transfers.recorder.speeds
        self.level = policy.pressure(occupancy, config.occupancy_limit, config.low_watermark, self.level, speeds)
        self._above = occupancy > config.occupancy_limit
        if total is not None:
            self._room = policy.capacity(ring.held, allocated, total, config.occupancy_limit, ring.bound)
        else:
            self._room = None if self.level is Pressure.NONE else ring.bound
        if ring.budget is not None:
            most = policy.capacity(ring.held, ring.held, ring.budget, config.occupancy_limit, 0)
            self._room = most if self._room is None else min(self._room, most)

    def pushed(self) -> None:
        """Note that an entry was linked."""
        self._most = max(self._most, self._table.live)

    def end_cycle(self) -> None:
        """After the last entry, keep no more than the ring's bound, and know how much there was."""
        if self._most:
            self._most_before, self._most = self._most, 0
        self.told = self.announced > 0
        self._ring.reset()

    # The device.

    def make_room(self, nbytes: int) -> None:
        """Spill the oldest behind a push of `nbytes`, and let the ring shrink while the device is too full."""
        ring, held = self._ring, self._bytes
        full = self.level is Pressure.FULL
        excess = max(0, ring.held - ring.bound) if full and self._above else 0
        if excess and held[State.SPILLING] >= 2 * nbytes:
            self._transfers.retire(next(iter(self._states[State.SPILLING])))
            ring.shrink(ring.held - nbytes)
        missing = None
        if self._room is not None and (self.told or self._most_before):
            missing = max(self._table.live + self.announced, self._most_before) - self._room
        if self.level is Pressure.PACED and (missing is None or missing > held[State.SPILLING] + self._table.away()):
            self._credit = min(2.0, self._credit + policy.hidden_fraction(self._transfers.recorder.speeds))
            if self._credit >= 1 and self._spill_oldest("paced"):
                self._credit -= 1
            return
        for _ in range(3 if full else 1):
            away = held[State.SPILLING] + self._table.away()
            behind = ring.free + held[State.SPILLING] + max(0, ring.bound - ring.held)
            left = None if missing is None else missing - away
            if policy.spill_target(full, nbytes, left, behind, excess) <= 0:
                return
            if not self._spill_oldest("full" if full else "will be full"):
                return

    def make_room_adopted(self, nbytes: int) -> None:
        """Spill the oldest behind a push of `nbytes`, so that the tensors on the device fit a ring of chunks."""
        held, unit = self._bytes, max(nbytes, self._config.chunk_bytes)
        if self.level is Pressure.NONE:
            return
        room = (self._config.ring_slots - 2) * unit
        while self._table.adopted - held[State.SPILLING] > room and self._spill_oldest("full"):
            pass
        # Their memory returns to the allocator late, so that the wait for the copy is short or none.
        for entry in list(islice(self._states[State.SPILLING], _LOOKED_AT)):
            if held[State.SPILLING] - entry.nbytes < unit:
                return
            self._transfers.retire(entry)

    def _spill_oldest(self, reason: str) -> bool:
        """Spill the oldest entry that may be; return whether there was one, and room for it."""
        for entry in list(islice(self._states[State.RESIDENT], _LOOKED_AT)):
            assert entry.slot is not None
            if entry.slot.source is None or self._device.holders(entry.slot.buffer) == 1:
                return self._may_spill(entry, reason)
            # A copy would free nothing while somebody else refers to it: perhaps later.
            self._counters.pinned_by_alias += 1
            self._states[State.RESIDENT].move_to_end(entry)
        # A kept graph leaves entries behind that were read and will be read again.
        for entry in self._states[State.READY]:
            if not entry.is_copied() and self._transfers.is_idle(entry):
                return self._may_spill(entry, reason)
        return False

    def _may_spill(self, entry: Entry, reason: str) -> bool:
        """Spill an entry, if the host has room; return whether it had."""
        # A copy that could not be put on its stream has left its host slot with the entry.
        if entry.host is None:
            entry.host = self.take_host(entry.nbytes)
            if entry.host is None:
                return False
        self._transfers.spill(entry, reason)
        return True

    def acquire(self, nbytes: int) -> Slot:
        """Return a slot: a free one, a new one, or that of the entry that is needed last.

        Raises:
            OffloadHostFull: If there is none, the host is full, and the configuration says "raise".
            torch.OutOfMemoryError: If the device has no room even for the ring.
        """
        ring = self._ring
        slot = ring.take(nbytes, 2 * nbytes)
        if slot is None and (
            self.level is Pressure.NONE
            or (self.level is Pressure.PACED and self._bytes[State.SPILLING] < 2 * nbytes)
            or ring.may_grow(nbytes)
        ):
            slot = self.grow(nbytes)
        full = self._counters.host_full
        while slot is None:
            slot = ring.take(nbytes)
            if slot is None:
                # Those that are free are too small.
                ring.shrink(max(0, ring.bound - nbytes))
                if ring.may_grow(nbytes):
                    slot = self.grow(nbytes)
                elif not self._give_way():
                    break
        if slot is not None:
            return slot
        if self._counters.host_full > full and self._config.on_host_full == "raise":
            host, name = self._transfers.host, "disk_limit" if self._transfers.direct else "host_limit"
            raise OffloadHostFull(
                f"no room for a buffer of {nbytes} bytes: the ring holds {ring.held} bytes in use and the host "
                f"{host.used} of at most {host.limit}. Raise `{name}` or `ring_slots`, or set "
                '`on_host_full="keep"` to let buffers stay on the device.'
            )
        self._counters.ring_grown += 1
        slot = self.grow(nbytes)
        if slot is None:
            ring.shrink()
            try:
                slot = ring.grow(nbytes)
            except torch.OutOfMemoryError as error:
                error.add_note(f"fusedrnn.offload held {ring.held} bytes of device buffers: {self._counters}")
                raise
        return slot

    def grow(self, nbytes: int) -> Slot | None:
        """Return a new slot, or None where the device has no room; the ring then keeps to what it holds."""
        try:
            return self._ring.grow(nbytes)
        except torch.OutOfMemoryError:
            self._counters.device_failures += 1
            self._ring.refuse()
            self.level = Pressure.FULL
            return None

    def _give_way(self) -> bool:
        """Bring one slot closer to being free; return whether there was one."""
        states, transfers = self._states, self._transfers
        for entry in states[State.SPILLING]:
            self._counters.ring_waits += 1
            transfers.retire(entry)
            return True
        for entry in states[State.READY]:
            if entry.is_copied() and transfers.is_idle(entry):
                transfers.retire(entry)
                return True
        if states[State.LOADING]:
            farthest = min(states[State.LOADING], key=lambda entry: entry.sequence)
            self._counters.unprefetched += 1
            transfers.retire(farthest)
            states[farthest.state].move_to_end(farthest, last=farthest.state is State.DISK)
            return True
        if self._spill_oldest("no slot"):
            return True
        # Rather the disk is waited for than the ring grown without bound.
        return bool(states[State.RESIDENT]) and self._await_write()

    # The host and the file below it.

    def take_host(self, nbytes: int, demanded: bool = False) -> HostSlot | None:
        """Return a slot of the host, for which others may have to go on to the file; None where there is none yet.

        Args:
            nbytes: Its size.
            demanded: Whether there must be one, so that the host waits for it.
        """
        host = self._transfers.host
        slot = host.take(nbytes)
        while slot is None and self._transfers.disk is not None and self._host_gives_way(demanded):
            slot = host.take(nbytes)
        if slot is None and not self._states[State.WRITING]:
            self._counters.host_full += 1
        return slot

    def _host_gives_way(self, demanded: bool) -> bool:
        """Bring a slot of the host closer to being free; return whether that was possible."""
        states, transfers = self._states, self._transfers
        oldest = next(iter(states[State.WRITING]), None)
        if oldest is None and self._write_oldest():
            return True
        if oldest is not None and (demanded or oldest.saved or self._device.query(oldest.io)):
            transfers.leave(oldest)
            return True
        if not demanded:
            return False
        for state in (State.READY, State.LOADING, State.SPILLING):
            for entry in states[state]:
                if entry.host is not None:
                    transfers.forget_copies(entry)
                    return True
        for entry in states[State.READING]:
            transfers.arrive(entry)
            return True
        for entry in states[State.HOST]:
            # The file has no room for it either.
            self._counters.ring_grown += 1
            transfers.load(entry, self._ring.grow(entry.nbytes), "makes way")
            transfers.forget_copies(entry)
            return True
        return False

    def _write_oldest(self) -> bool:
        """Let the oldest entry on the host go on to the file; return whether there was one, and room for it."""
        if self._transfers.disk is not None:
            for entry in islice(self._states[State.HOST], _LOOKED_AT):
                if not entry.stays:
                    return self._transfers.write(entry)
        return False

    def write_ahead(self, nbytes: int) -> None:
        """Let entries go on to the file while the host has not enough room behind a push of `nbytes`."""
        host = self._transfers.host
        while (
            self._transfers.disk is not None
            and policy.write_target(host.capacity, host.used, self._bytes[State.WRITING], nbytes) > 0
            and self._write_oldest()
        ):
            pass

    def _await_write(self) -> bool:
        """Wait until the oldest write has made room on the host; return whether there was one to wait for."""
        for entry in self._states[State.WRITING]:
            self._transfers.leave(entry)
            return True
        return False
