"""The methods that stacks, finalizers and users call, from any thread and at any moment."""

from dataclasses import replace
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

from torch import Tensor

from fusedrnn.offloading import policy
from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.device import Device
from fusedrnn.offloading.entry import Entry, Owner, State
from fusedrnn.offloading.exclusive import ORDERLY, Exclusive
from fusedrnn.offloading.forks import reset_after_fork
from fusedrnn.offloading.notices import Notices
from fusedrnn.offloading.policy import Pressure
from fusedrnn.offloading.prefetching import Prefetcher
from fusedrnn.offloading.ring import Slot
from fusedrnn.offloading.spilling import Spiller
from fusedrnn.offloading.stats import Counters, Recorder, trace_events
from fusedrnn.offloading.table import from_newest
from fusedrnn.offloading.transfers import Transfers

_INTERRUPTED = (
    "the buffer was lost: an interrupt or an error ended what offloading was doing with it, and everything that was "
    "offloaded then was given up. Run the forward pass again"
)
_FORKED = (
    "the buffer belongs to the process that this one was forked from, and cannot be used here. Run the forward pass "
    "in this process"
)
_INHERITED: list[Any] = []
"""State of the parent process, which a forked one must not even free."""


class Scheduler:
    """Keep pushed buffers on one device as long as there is room, and bring them back before they are read.

    Args:
        device: Where the buffers live.
        config: What the user wants.
        transfers: What moves entries; replaced in tests.
        spiller: What makes room.
        prefetcher: What brings entries back.
    """

    def __init__(
        self,
        device: Device,
        config: OffloadConfig,
        transfers: type[Transfers] = Transfers,
        spiller: type[Spiller] = Spiller,
        prefetcher: type[Prefetcher] = Prefetcher,
    ):
        self.device, self.config = device, config
        self._kinds = transfers, spiller, prefetcher
        self.counters, self.recorder = Counters(), Recorder(device, config.trace)
        self._exclusive = Exclusive(self)
        self._stacks: list[ReferenceType[Any]] = []
        self._generation = self._sequence = 0
        self._lost, self._forked = _INTERRUPTED, False
        self._notices = Notices()
        self._start()
        reset_after_fork(self)

    def _start(self) -> None:
        """Make an empty state."""
        transfers, spiller, prefetcher = self._kinds
        self._transfers = made = transfers(self.device, self.config, self.counters, self.recorder)
        self._spiller = spiller(made)
        self._prefetcher = prefetcher(made, self._spiller)
        self._table, self.ring, self.host, self.disk = made.table, made.ring, made.host, made.disk
        self.direct = made.direct
        made.host.account.join(made.host, WeakMethod(self.give_back_idle))
        if made.disk is not None:
            made.disk.account.join(made.disk, WeakMethod(self.give_back_idle))

    # What a stack calls.

    def reserve(self, nbytes: int, owner: Any) -> None:
        """Let `owner.slot` be a slot of at least `nbytes` that the current stream may write.

        Raises:
            OffloadHostFull: If neither ring nor host has room and the configuration says "raise".
            torch.OutOfMemoryError: If the device has no room even for the ring.
        """
        self._exclusive.run(self._reserve, nbytes, owner, self._occupancy(nbytes))

    def _reserve(self, nbytes: int, owner: Any, occupancy: float | None) -> None:
        self._notices.warn(self._transfers)
        stream = self.device.current_stream()
        if policy.eligible(nbytes, self.config.min_bytes):
            self._spiller.sample(occupancy)
        slot = self._spiller.acquire(nbytes)
        try:
            self._transfers.await_slot(slot, stream)
            start = self.device.record(stream, True) if self.recorder.samples(self._sequence) else None
        except BaseException:
            self.ring.give(slot, slot.free)
            raise
        slot.free, slot.writer, slot.start, slot.generation = (), stream, start, self._generation
        slot.owner = Owner(owner, self._exclusive.ownerless.append, slot)
        owner.slot = slot

    def push(self, reserved: Any, nbytes: int, owner: Any) -> None:
        """Take a slot whose content is final on the current stream, and spill the oldest entries if need be.

        If that fails, the slot is taken all the same, and given back.

        Args:
            reserved: The owner of a slot from `reserve`, which has none afterwards.
            nbytes: Bytes of it that matter.
            owner: Its attribute `entry` becomes the entry.
        """
        self._exclusive.run(self._push, reserved, nbytes, owner)

    def _push(self, reserved: Any, nbytes: int, owner: Any) -> None:
        slot = reserved.slot
        self._require_current(slot.generation)
        reserved.slot = None
        entry = None
        try:
            entry = self._link(slot, nbytes, self.device.current_stream(), owner)
            if entry.state is State.RESIDENT:
                self._spiller.announced = self._announced()
                self._spiller.make_room(nbytes)
                self._spiller.write_ahead(nbytes)
        except ORDERLY:
            self._give_up(slot if entry is None else entry)
            raise
        self.recorder.settle()

    def adopt(self, source: Tensor, buffer: Tensor, owner: Any) -> None:
        """Push a tensor that somebody else made, without copying it; spill the oldest such tensors if need be.

        Args:
            source: The tensor, safe to be read on the current stream.
            buffer: All its storage, uint8 [nbytes], sharing nothing else with it.
            owner: Its attribute `entry` becomes the entry.
        """
        self._exclusive.run(self._adopt, source, buffer, owner, self._occupancy(buffer.numel()))

    def _adopt(self, source: Tensor, buffer: Tensor, owner: Any, occupancy: float | None) -> None:
        self._notices.warn(self._transfers)
        stream, nbytes = self.device.current_stream(), buffer.numel()
        if policy.eligible(nbytes, self.config.min_bytes):
            self._spiller.sample(occupancy)
        entry = self._link(Slot(buffer, nbytes, stream, source), nbytes, stream, owner)
        self._table.adopted += nbytes
        try:
            if entry.state is State.RESIDENT:
                self._spiller.make_room_adopted(nbytes)
                self._spiller.write_ahead(nbytes)
        except ORDERLY:
            self._give_up(entry)
            raise
        self.recorder.settle()

    def _give_up(self, item: Entry | Slot) -> None:
        """End what was being pushed when the device failed, as soon as it does its work again."""
        if item.owner is not None:
            self._exclusive.ownerless.append(item.owner)

    def _link(self, slot: Slot, nbytes: int, stream: Any, owner: Any) -> Entry:
        ready = self.device.record(stream, slot.start is not None)
        state = State.RESIDENT if policy.eligible(nbytes, self.config.min_bytes) else State.KEPT
        # What somebody else made has no beginning that we know, but its copies have.
        timed = slot.start is not None or (slot.source is not None and self.recorder.trace)
        entry = Entry(nbytes, slot, stream, ready, self._sequence, state, timed, self._generation)
        entry.owner = Owner(owner, self._exclusive.ownerless.append, entry)
        if slot.start is not None:
            self.recorder.add("compute", entry.sequence, nbytes, slot.start, ready)
        self._sequence += 1
        slot.owner = None
        self._table.link(entry)
        owner.entry = entry
        self._spiller.pushed()
        self.counters.pushes += 1
        if state is State.RESIDENT:
            self.counters.eligible += 1
        else:
            self.counters.skip("small")
        return entry

    def keep(self, entry: Entry) -> None:
        """Leave an entry on the device, unless it has been spilled."""
        self._exclusive.run(self._keep, entry)

    def _keep(self, entry: Entry) -> None:
        if entry.state is State.RESIDENT:
            self.counters.skip("recurs")
            self.counters.eligible -= 1
            self._table.move(entry, State.KEPT)

    def is_pressed(self) -> bool:
        """Ask how full the device is; return whether buffers should go to the host."""
        return self._exclusive.run(self._is_pressed, self._occupancy())

    def _is_pressed(self, occupancy: float | None) -> bool:
        self._notices.warn(self._transfers)
        self._spiller.sample(occupancy)
        return self._spiller.level is not Pressure.NONE

    def make_room(self) -> None:
        """Spill what may go now that nobody else refers to it, as behind the push of a tensor, without one."""
        if self.is_usable():
            self._exclusive.run(self._make_room)

    def _make_room(self) -> None:
        self._spiller.make_room_adopted(0)

    def get(self, entry: Entry, writable: bool = False) -> Any:
        """Return the entry's buffer, safe to be read on the current stream, and to be overwritten if `writable`."""
        return self._exclusive.run(self._get, entry, writable)

    def _get(self, entry: Entry, writable: bool) -> Any:
        self._notices.warn(self._transfers)
        self._require_current(entry.generation)
        if entry.state is State.FREED:
            raise RuntimeError("the buffer was released: call `get` before `release`")
        stream, transfers = self.device.current_stream(), self._transfers
        if entry.slot is None:
            self.counters.demand_loads += 1
            self._prefetcher.demand(entry)
        elif entry.state is State.LOADING:
            self.counters.prefetch_hits += 1
        elif entry.state is State.SPILLING:
            self.counters.forwarded += 1
            self.recorder.decisions.append((entry.sequence, "forward", entry.nbytes, "still on the device"))
        assert entry.slot is not None
        arrived = self.device.record(stream, True) if entry.timed else None
        transfers.await_content(entry, stream)
        if writable:
            transfers.await_readers(entry, stream)
        if arrived is not None:
            entry.start = self.device.record(stream, True)
            self.recorder.add("stall", entry.sequence, entry.nbytes, arrived, entry.start)
        if stream not in entry.readers:
            entry.readers.append(stream)
        if entry.state not in (State.READY, State.KEPT):
            self._table.move(entry, State.READY)
        if not self._table.states[State.LOADING]:
            self._prefetcher.prefetch(entry.older)
        return entry.slot.buffer[: entry.nbytes]

    def release(self, entry: Entry) -> None:
        """End an entry whose last read has been put on the current stream; do nothing if it has ended."""
        self._exclusive.run(self._release, entry)

    def _release(self, entry: Entry) -> None:
        if entry.state is State.FREED or entry.generation != self._generation:
            return
        stream = self.device.current_stream()
        if entry.readers and stream not in entry.readers:
            entry.readers.append(stream)
        older = entry.older
        self._transfers.free(entry, enough=self._prefetcher.has_enough(entry.nbytes))
        self.counters.released += 1
        self._prefetcher.prefetch(older)
        self._end_cycle()
        self.recorder.settle()

    def announce(self, stack: Any) -> None:
        """Expect `stack.expected` bytes more to be pushed, as long as the stack lives."""
        self._exclusive.run(self._announce, stack)

    def _announce(self, stack: Any) -> None:
        self._stacks.append(ref(stack))
        self._spiller.told = True

    def _announced(self) -> int:
        stacks = [stack for reference in self._stacks if (stack := reference()) is not None and stack.expected]
        if len(stacks) < len(self._stacks):
            self._stacks = [ref(stack) for stack in stacks]
        return sum(stack.expected for stack in stacks)

    def _occupancy(self, nbytes: int | None = None) -> float | None:
        """Ask the user's source how full the device is; None where there is none, or nothing depends on it."""
        # Not under the lock: it may look at this scheduler's own statistics.
        if self.config.occupancy is None or not (nbytes is None or policy.eligible(nbytes, self.config.min_bytes)):
            return None
        return self.config.occupancy()

    # How all of this is run.

    def require_usable(self) -> None:
        """See `Guarded`."""
        if not self.is_usable():
            raise RuntimeError(
                "offloaded buffers cannot be used while a CUDA graph is captured: capture forward and backward "
                "together, so that the capture owns its buffers, or switch offloading off"
            )

    def is_usable(self) -> bool:
        """See `Guarded`."""
        return not self.device.is_capturing()

    def start_anew(self) -> None:
        """See `Guarded`: wait for all copies, and begin with an empty table, ring and pools."""
        if not self._forked:
            self._transfers.synchronize()
            self.device.finish()
            self._lost, self._generation = _INTERRUPTED, self._generation + 1
            self._transfers.give_up()
        self._start()
        self._forked = False

    def _after_fork(self) -> None:
        """Start anew in a forked process, where neither threads nor copies nor the device's buffers exist."""
        _INHERITED.append((self._transfers, self._spiller, self._prefetcher, self._exclusive.ownerless, self.recorder))
        self.recorder = Recorder(self.device, self.config.trace)
        self._exclusive.after_fork()
        self._lost, self._generation, self._forked = _FORKED, self._generation + 1, True

    def _require_current(self, generation: int) -> None:
        if generation != self._generation:
            raise RuntimeError(self._lost)

    def end(self, owner: Owner) -> None:
        """See `Guarded`."""
        item = owner.item
        if item.owner is not owner or item.generation != self._generation:
            return
        if isinstance(item, Slot):
            self._transfers.free_slot(item)
        else:
            self._transfers.free(item, aliased=True, enough=self._prefetcher.has_enough(item.nbytes))
            self.counters.dropped += 1
        self._end_cycle()

    def tidy(self) -> None:
        """See `Guarded`."""
        self._transfers.collect()

    def _end_cycle(self) -> None:
        if self._table.newest is None:
            self._spiller.announced = self._announced()
            self._spiller.end_cycle()

    # What finalizers call, from any thread and at any moment, also in the midst of the methods above.

    def abandon(self, item: Entry | Slot | None) -> None:
        """End an entry whose handle is gone, or a slot that was never pushed."""
        owner = None if item is None else item.owner
        if owner is not None:
            self._exclusive.ownerless.append(owner)
            self._exclusive.collect()

    def give_back_idle(self) -> None:
        """Give back pinned memory and files of which nothing is in use, if nobody is at work here."""
        self._exclusive.try_to(self._give_back_idle)

    def _give_back_idle(self) -> None:
        for pool in (self.host, self.disk):
            if pool is not None:
                pool.trim(wait=False)

    # What a user calls.

    def flush(self) -> None:
        """Give back the device memory of every buffer that has a copy on the host or is on its way there."""
        self._exclusive.run(self._flush)

    def _flush(self) -> None:
        for entry in list(self._table.states[State.SPILLING]):
            self._transfers.retire(entry)
        self.ring.shrink()

    def trim_host(self) -> int:
        """Give back pinned memory and files of which nothing is in use and return their bytes; copies are awaited."""
        return self._exclusive.run(lambda: self.host.trim() + (0 if self.disk is None else self.disk.trim()))

    def synchronize(self) -> None:
        """Block the host until all copies are done."""
        self._exclusive.run(self._synchronize)

    def _synchronize(self) -> None:
        self._transfers.synchronize()
        self.recorder.settle()

    def stats(self) -> Counters:
        """Return what has been counted so far."""
        return self._exclusive.peek(self._stats)

    def _stats(self) -> Counters:
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
        disk, direct = self.disk is not None, self.direct
        return self._exclusive.peek(lambda: trace_events(self.recorder, process, name, disk, direct))

    def entries(self) -> list[Entry]:
        """Return the entries that live, newest first."""
        return self._exclusive.run(lambda: list(from_newest(self._table.newest)))

    def audit(self) -> None:
        """Check that every byte is accounted for."""
        self._exclusive.run(self._transfers.audit)
