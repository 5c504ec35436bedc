"""The methods that stacks, finalizers and users call, from any thread and at any moment."""

import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fusedrnn.offloading import policy
from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.decisions import Decisions
from fusedrnn.offloading.device import Device
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.policy import Pressure
from fusedrnn.offloading.ring import Slot
from fusedrnn.offloading.stats import Counters, trace_events
from fusedrnn.offloading.transitions import from_newest


class Scheduler(Decisions):
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
        self._said = self._said_failed = False

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
                start = self.device.record(stream, True) if self.recorder.samples(self._sequence) else None
            except BaseException:
                self.ring.give(slot, slot.free)
                raise
            slot.free, slot.writer, slot.start = (), stream, start
            return slot

    def push(self, slot: Slot, nbytes: int, announced: int = 0) -> Entry:
        """Take a slot whose content is final on the current stream, and spill the oldest entries if need be.

        If that fails, the slot is taken all the same, and given back.

        Args:
            slot: What `reserve` returned.
            nbytes: Bytes of it that matter.
            announced: Bytes by which this push makes good on what was announced.
        """
        with self._lock:
            entry = None
            try:
                self._enter()
                entry = self._push(slot, nbytes, self.device.current_stream())
                self._announced -= announced
                if entry.state is State.RESIDENT:
                    self._make_room(nbytes)
                    self._write_ahead(nbytes)
            except BaseException:
                self._give_up(entry, slot)
                raise
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
            try:
                if entry.state is State.RESIDENT:
                    self._make_room_adopted(nbytes)
                    self._write_ahead(nbytes)
            except BaseException:
                self._give_up(entry)
                raise
            self.recorder.settle()
            return entry

    def _give_up(self, entry: Entry | None, slot: Slot | None = None) -> None:
        """End what was being pushed when something failed, as soon as the device does its work again."""
        if entry is not None:
            self._later.append(lambda: self._abandon(entry))
        elif slot is not None:
            self._later.append(lambda: self._abandon_slot(slot))

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
        # What somebody else made has no beginning that we know, but its copies have.
        timed = slot.start is not None or (slot.source is not None and self.recorder.trace)
        entry = Entry(nbytes, slot, stream, ready, self._sequence, state, timed)
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
            if entry.slot is None:
                self.counters.demand_loads += 1
                self._demand(entry)
            elif entry.state is State.LOADING:
                self.counters.prefetch_hits += 1
            elif entry.state is State.SPILLING:
                self.counters.forwarded += 1
                self.recorder.decisions.append((entry.sequence, "forward", entry.nbytes, "still on the device"))
            assert entry.slot is not None
            arrived = self.device.record(stream, True) if entry.timed else None
            if entry.h2d is not None:
                self._wait("E6", stream, (entry.h2d,))
                if self.direct and (error := self.device.failure(entry.h2d)):
                    self._retire(entry)
                    self._unreadable(entry, error)
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

    def _demand(self, entry: Entry) -> None:
        """Fetch an entry that is not on the device."""
        slot = self._acquire(entry.nbytes)
        try:
            if entry.state in (State.DISK, State.READING):
                self._bring(entry)
        except BaseException:
            self.ring.give(slot, slot.free)
            raise
        self._load(entry, slot, "demanded")

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
        # Here, where a warning that is an error leaves everything as it is.
        if self.counters.host_full and not self._said:
            self._said = True
            warnings.warn(self._host_full(), RuntimeWarning, stacklevel=4)
        if self._error is not None and not self._said_failed:
            self._said_failed = True
            warnings.warn(
                f"offloading could not write to {self.config.spill_dir} (`spill_dir`): {self._error}. What could not "
                "be written stays in memory. Make room there, or name a folder on another disk",
                RuntimeWarning,
                stacklevel=4,
            )

    def _host_full(self) -> str:
        pool, name = self.host, self._limit_name()
        if self.direct:
            what, calls = f"room left in {self.config.spill_dir} (`spill_dir`)", "requests for a file"
        else:
            what, calls = "pinned host memory left", "allocations of pinned memory"
        reason = f"{pool.used} bytes of at most {pool.limit} (`{name}`) are in use"
        if pool.failures:
            reason += f", and {pool.failures} {calls} failed"
        if self.disk is not None and self.counters.disk_full:
            reason += f"; so are {self.disk.used} of at most {self.disk.limit} (`disk_limit`) in files"
        return (
            f"offloading has no {what}: {reason}. What does not fit stays on the device. Raise "
            f"`{name}`, free {'disk space' if self.direct else 'host memory'}, or use a save mode that keeps less"
        )

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
        """Give back pinned memory and files of which nothing is in use and return their bytes; copies are awaited."""
        with self._lock:
            self._enter()
            return self.host.trim() + (0 if self.disk is None else self.disk.trim())

    def synchronize(self) -> None:
        """Block the host until all copies are done."""
        with self._lock:
            self._enter()
            streams = [self._spill_stream, self._fetch_stream]
            if self.disk is not None:
                streams += [self._write_stream, self._read_stream]
            for event in [self.device.record(stream) for stream in streams]:
                self.device.synchronize(event)
            self.recorder.settle()

    def stats(self) -> Counters:
        """Return what has been counted so far."""
        with self._lock:
            self.recorder.settle()
            found = replace(
                self.counters,
                skipped=dict(self.counters.skipped),
                stall_seconds=self.recorder.stall_seconds,
                device_peak=self.ring.peak,
                host_peak=self.host.peak,
                disk_peak=0 if self.disk is None else self.disk.peak,
            )
            if self.direct:
                found.disk_writes, found.disk_written_bytes = found.spills, found.spilled_bytes
                found.disk_reads, found.disk_read_bytes = found.loads, found.loaded_bytes
                found.disk_peak, found.host_peak = found.host_peak, 0
            return found

    def trace(self, process: int, name: str) -> list[dict[str, Any]]:
        """Return what the streams did so far as trace events of one process."""
        self.synchronize()
        with self._lock:
            return trace_events(self.recorder, process, name, self.disk is not None, self.direct)

    def entries(self) -> list[Entry]:
        """Return the entries that live, newest first."""
        with self._lock:
            self._enter()
            return list(from_newest(self._newest))
