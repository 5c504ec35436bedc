"""When what happens: the decisions, and the methods that stacks, finalizers and users call."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fusedrnn.offload import policy
from fusedrnn.offload.config import OffloadConfig, OffloadHostFull
from fusedrnn.offload.device import Device
from fusedrnn.offload.entry import Entry, State
from fusedrnn.offload.policy import Pressure
from fusedrnn.offload.ring import Slot
from fusedrnn.offload.transitions import Transitions, from_newest

_LOOKED_AT = 16
"""Tensors looked at in search of one to spill."""


class Scheduler(Transitions):
    """Keep pushed buffers on one device as long as there is room, and bring them back before they are read.

    Every method may be called from any thread.

    Args:
        device: Where the buffers live.
        config: What the user wants.
    """

    def __init__(self, device: Device, config: OffloadConfig):
        super().__init__(device, config)
        self._lock = threading.Lock()
        self._later: deque[Callable[[], None]] = deque()
        self._sequence = 0
        self._level = Pressure.NONE
        self._above = False
        self._credit = 0.0
        self._room: int | None = None
        self._announced = self._most = self._most_before = 0
        self._told = False

    # What a stack calls.

    def reserve(self, nbytes: int) -> Slot:
        """Return a slot of at least `nbytes` that the current stream may write.

        Raises:
            OffloadHostFull: If neither ring nor host has room and the configuration says "raise".
            torch.OutOfMemoryError: If the device has no room even for the ring.
        """
        with self._lock:
            self._enter()
            stream = self.device.current_stream()
            if policy.eligible(nbytes, self.config.min_bytes):
                self._sample()
            slot = self._acquire(nbytes)
            try:
                self._wait("E3", stream, slot.free)
            except BaseException:
                self.ring.give(slot, slot.free)
                raise
            slot.free = ()
            slot.writer = stream
            slot.start = self.device.record(stream, True) if self.recorder.samples(self._sequence) else None
            return slot

    def push(self, slot: Slot, nbytes: int, announced: int = 0) -> Entry:
        """Take a slot whose content is final on the current stream, and spill the oldest entries if need be.

        Args:
            slot: What `reserve` returned.
            nbytes: Bytes of it that matter.
            announced: Bytes by which this push makes good on what was announced.
        """
        with self._lock:
            self._enter()
            entry = self._push(slot, nbytes, self.device.current_stream())
            self._announced -= announced
            if entry.state is State.RESIDENT:
                self._make_room(nbytes)
            self.recorder.settle()
            return entry

    def adopt(self, source: Tensor, buffer: Tensor) -> Entry:
        """Push a tensor that somebody else made, without copying it; spill the oldest such tensors if need be.

        Args:
            source: The tensor, safe to be read on the current stream.
            buffer: All its storage, uint8 [nbytes], sharing nothing else with it.
        """
        with self._lock:
            self._enter()
            stream, nbytes = self.device.current_stream(), buffer.numel()
            if policy.eligible(nbytes, self.config.min_bytes):
                self._sample()
            entry = self._push(Slot(buffer, nbytes, stream, source), nbytes, stream)
            self._adopted += nbytes
            if entry.state is State.RESIDENT:
                self._make_room_adopted(nbytes)
            self.recorder.settle()
            return entry

    def keep(self, entry: Entry) -> None:
        """Leave an entry on the device, unless it has been spilled."""
        with self._lock:
            self._enter()
            if entry.state is State.RESIDENT:
                self.counters.skip("recurs")
                self.counters.eligible -= 1
                self._move(entry, State.KEPT)

    def is_pressed(self) -> bool:
        """Ask how full the device is; return whether buffers should go to the host."""
        with self._lock:
            self._enter()
            self._sample()
            return self._level is not Pressure.NONE

    def _push(self, slot: Slot, nbytes: int, stream: Any) -> Entry:
        ready = self.device.record(stream, slot.start is not None)
        state = State.RESIDENT if policy.eligible(nbytes, self.config.min_bytes) else State.KEPT
        entry = Entry(nbytes, slot, stream, ready, self._sequence, state)
        if slot.start is not None:
            self.recorder.add("compute", entry.sequence, nbytes, slot.start, ready)
        self._sequence += 1
        self._link(entry)
        self._most = max(self._most, self._live)
        self.counters.pushes += 1
        if state is State.RESIDENT:
            self.counters.eligible += 1
        else:
            self.counters.skip("small")
        return entry

    def get(self, entry: Entry, writable: bool = False) -> Any:
        """Return the entry's buffer, safe to be read on the current stream, and to be overwritten if `writable`."""
        with self._lock:
            self._enter()
            if entry.state is State.FREED:
                raise RuntimeError("the buffer was released: call `get` before `release`")
            stream = self.device.current_stream()
            if entry.state is State.HOST:
                self.counters.demand_loads += 1
                self._load(entry, self._acquire(entry.nbytes), "demanded")
            elif entry.state is State.LOADING:
                self.counters.prefetch_hits += 1
            elif entry.state is State.SPILLING:
                self.counters.forwarded += 1
                self.recorder.decisions.append((entry.sequence, "forward", entry.nbytes, "still on the device"))
            assert entry.slot is not None
            arrived = self.device.record(stream, True) if entry.timed else None
            if entry.h2d is not None:
                self._wait("E6", stream, (entry.h2d,))
            elif stream != entry.stream:
                self._wait("E6", stream, (entry.ready,))
            if writable:
                self._before_write(entry, stream)
            if arrived is not None:
                entry.start = self.device.record(stream, True)
                self.recorder.add("stall", entry.sequence, entry.nbytes, arrived, entry.start)
            if stream not in entry.readers:
                entry.readers.append(stream)
            if entry.state not in (State.READY, State.KEPT):
                self._move(entry, State.READY)
            if not self._states[State.LOADING]:
                self._prefetch(entry.older)
            return entry.slot.buffer[: entry.nbytes]

    def _before_write(self, entry: Entry, stream: Any) -> None:
        """Let `stream` wait for all that still reads the entry's device copy."""
        # Forwarded, and still being read by its spill.
        if entry.d2h is not None and entry.h2d is None:
            self._wait("E7", stream, (entry.d2h,))
        for reader in entry.readers:
            if reader != stream:
                self._wait("E7", stream, (self.device.record(reader),))
        entry.written = True

    def release(self, entry: Entry) -> None:
        """End an entry whose last read has been put on the current stream; do nothing if it has ended."""
        with self._lock:
            self._enter()
            if entry.state is State.FREED:
                return
            stream = self.device.current_stream()
            if entry.readers and stream not in entry.readers:
                entry.readers.append(stream)
            older = entry.older
            self._free(entry, enough=self._has_enough(entry.nbytes))
            self.counters.released += 1
            self._prefetch(older)
            self._end_cycle()
            self.recorder.settle()

    # What finalizers call, from any thread and at any moment, also in the midst of the methods above.

    def abandon(self, entry: Entry) -> None:
        """End an entry whose handle is gone."""
        self._when_unlocked(lambda: self._abandon(entry))

    def abandon_slot(self, slot: Slot) -> None:
        """Take back a slot that was reserved, perhaps written, and never pushed."""
        self._when_unlocked(lambda: self._abandon_slot(slot))

    def announce(self, nbytes: int) -> None:
        """Expect `nbytes` more to be pushed; fewer, if negative."""
        self._when_unlocked(lambda: self._expect(nbytes))

    def _when_unlocked(self, action: Callable[[], None]) -> None:
        # The lock may be held by this very thread, which runs the action when it next enters.
        self._later.append(action)
        if self._lock.acquire(blocking=False):
            try:
                if not self.device.is_capturing():
                    self._catch_up()
            finally:
                self._lock.release()

    def _enter(self) -> None:
        if self.device.is_capturing():
            raise RuntimeError(
                "offloaded buffers cannot be used while a CUDA graph is captured: capture forward and backward "
                "together, so that the capture owns its buffers, or switch offloading off"
            )
        self._catch_up()

    def _catch_up(self) -> None:
        while self._later:
            # Only removed when it is done, so that nothing is lost if a device operation fails.
            self._later[0]()
            self._later.popleft()
        if self._lent:
            self._collect()

    def _abandon(self, entry: Entry) -> None:
        if entry.state is not State.FREED:
            self._free(entry, aliased=True, enough=self._has_enough(entry.nbytes))
            self.counters.dropped += 1
            self._end_cycle()

    def _abandon_slot(self, slot: Slot) -> None:
        back = self.ring.drop if self.device.holders(slot.buffer) > 0 else self.ring.give
        back(slot, (self.device.record(slot.writer),))
        self._end_cycle()

    def _expect(self, nbytes: int) -> None:
        self._announced += nbytes
        self._told = True

    # What a user calls.

    def flush(self) -> None:
        """Give back the device memory of every buffer that has a copy on the host or is on its way there."""
        with self._lock:
            self._enter()
            for entry in list(self._states[State.SPILLING]):
                self._retire(entry)
            self.ring.shrink()

    def trim_host(self) -> int:
        """Give back pinned memory of which nothing is in use and return its bytes; the host waits for its copies."""
        with self._lock:
            self._enter()
            return self.host.trim()

    def synchronize(self) -> None:
        """Block the host until all copies are done."""
        with self._lock:
            self._enter()
            for event in [self.device.record(stream) for stream in (self._spill_stream, self._fetch_stream)]:
                self.device.synchronize(event)
            self.recorder.settle()

    def entries(self) -> list[Entry]:
        """Return the entries that live, newest first."""
        with self._lock:
            self._enter()
            return list(from_newest(self._newest))

    # Decisions.

    def _sample(self) -> None:
        """Ask how full the device is."""
        counters, config, ring = self.counters, self.config, self.ring
        total, allocated = self.device.memory(), self.device.allocated()
        if config.occupancy is not None:
            occupancy, total = config.occupancy(), None
        else:
            occupancy = (allocated - ring.free) / total if total else 0.0
        counters.occupancy_asked += 1
        counters.occupancy_peak = max(counters.occupancy_peak, occupancy)
        speeds = self.recorder.speeds
        self._level = policy.pressure(occupancy, config.occupancy_limit, config.low_watermark, self._level, speeds)
        self._above = occupancy > config.occupancy_limit
        if total is not None:
            self._room = policy.capacity(ring.held, allocated, total, config.occupancy_limit, ring.bound)
        else:
            self._room = None if self._level is Pressure.NONE else ring.bound

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
        if self._level is Pressure.PACED and (missing is None or missing > held[State.SPILLING] + held[State.HOST]):
            self._credit = min(2.0, self._credit + policy.hidden_fraction(self.recorder.speeds))
            if self._credit >= 1 and self._spill_oldest("paced"):
                self._credit -= 1
            return
        for _ in range(3 if full else 1):
            away = held[State.SPILLING] + held[State.HOST]
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
                return self._spill(entry, reason)
            # A copy would free nothing while somebody else refers to it: perhaps later.
            self.counters.pinned_by_alias += 1
            self._states[State.RESIDENT].move_to_end(entry)
        # A kept graph leaves entries behind that were read and will be read again.
        for entry in self._states[State.READY]:
            if entry.host is None and self._is_idle(entry):
                return self._spill(entry, reason)
        return False

    def _prefetch(self, entry: Entry | None) -> None:
        """Fetch what is expected to be read next: `entry`, then the older ones, into slots that are free."""
        if not self._states[State.HOST] or entry is None:
            return
        depth = policy.prefetch_depth(self.config.prefetch, self.recorder.speeds)
        for candidate in self._expected(entry, depth):
            if depth is not None and len(self._states[State.LOADING]) >= depth:
                return
            if candidate.state is State.HOST:
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
        while self._states[State.HOST]:
            newest = next(reversed(self._states[State.HOST]))
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
                f"{self.host.used} of at most {self.config.host_bytes()}. Raise `host_limit` or `ring_slots`, or set "
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
            if entry.host is not None and self._is_idle(entry):
                self._retire(entry)
                return True
        if self._states[State.LOADING]:
            farthest = min(self._states[State.LOADING], key=lambda entry: entry.sequence)
            self.counters.unprefetched += 1
            self._retire(farthest)
            self._states[State.HOST].move_to_end(farthest, last=False)
            return True
        return self._spill_oldest("no slot")

    def _is_idle(self, entry: Entry) -> bool:
        """Return whether nobody refers to a buffer that was read, so that nothing more will be done with it."""
        return not entry.written and entry.slot is not None and self.device.holders(entry.slot.buffer) == 0

    def _has_enough(self, nbytes: int) -> bool:
        """Return whether the ring, above its bound, has enough free slots for what is still to be fetched."""
        if self.ring.held <= self.ring.bound:
            return False
        depth = policy.prefetch_depth(self.config.prefetch, self.recorder.speeds)
        return not self._states[State.HOST] or (depth is not None and self.ring.free > depth * nbytes)

    def _end_cycle(self) -> None:
        """After the last entry, keep no more than the ring's bound, and know how much there was."""
        if self._newest is None:
            if self._most:
                self._most_before, self._most = self._most, 0
            self._told = self._announced > 0
            self.ring.reset()
