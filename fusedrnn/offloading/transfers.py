"""What happens to an entry, and the edges between streams that make it safe.

    RESIDENT --spill--> SPILLING --retire--> HOST --load--> LOADING --get--> READY
        |                  |                  ^               |               |
        +------- get ------+---> READY        +---- retire ---+---------------+

These edges, and nothing else, keep a byte from being overwritten before it was read or read before it was written:

    E1  spill stream waits for the producer          E5  fetch stream waits for the slot's last users
    E2  spill stream waits for the host slot's       E6  reader waits for the fetch
        last users                                   E7  a slot is free after its last use, and after the spill
    E3  writer waits for the slot's last users           that still reads it
    E4  fetch stream waits for the entry's spill     E8  a host slot is free after the last copy from or to it

The memory of an adopted tensor is not ours: it returns to the stream on which it was allocated, whichever that is. So
its allocator is told of the stream that copies it (torch's `record_stream`).

The host waits for nothing. Where buffers go from the device straight to a file (on the CPU), that takes the host's
place in all of this, but a copy may fail: an entry that could not be written stays where it is, as `retire` finds out.

With a file below the host (`spill_dir` on a GPU), an entry goes on:

    HOST --write--> WRITING --leave--> DISK --read--> READING --arrive--> HOST
      |                |
      +---- load ------+---> LOADING

A stream of the device cannot wait for a file, so `leave` and `arrive` happen when the host finds that the operation is
over, and has succeeded:

    E9   write stream waits for the entry's spill     E12  an entry leaves the host after its write
    E10  write stream waits for the range's last      E13  a host slot is free after the write that reads it, and
         users in the file                                 after the read that writes it
    E11  read stream waits for the host slot's        E14  an entry arrives, to be fetched, after its read
         last users                                   E15  a range of the file is free after its last copy
"""

import time
from functools import partial
from typing import Any

from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.device import Device, Span
from fusedrnn.offloading.disk import BLOCK
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.host import HostPool, HostSlot
from fusedrnn.offloading.ring import Ring, Slot
from fusedrnn.offloading.stats import Counters, Recorder
from fusedrnn.offloading.table import EntryTable

_MOST_EXTENT = 16 << 30
"""Bytes of the largest file, so that a few serve for a whole disk."""


class Transfers:
    """The memory of one device's entries, and every copy between its tiers. It decides nothing; it is not thread-safe.

    Args:
        device: Where the buffers live.
        config: What the user wants.
        counters: Where copies are counted.
        recorder: Where their times are kept.
    """

    def __init__(self, device: Device, config: OffloadConfig, counters: Counters, recorder: Recorder):
        self.device, self.config, self.counters, self.recorder = device, config, counters, recorder
        self.table = EntryTable()
        self.ring = Ring(device, config.ring_slots, config.budget_bytes())
        self.disk: HostPool | None = None
        """Where the host's buffers go when it is full."""
        self.direct = device.direct and config.spill_dir is not None
        """Whether a file takes the place of the host."""
        new_stream = device.new_disk_stream if self.direct else device.new_stream
        self.spill_stream, self.fetch_stream = new_stream("spill"), new_stream("fetch")
        self.streams = [self.spill_stream, self.fetch_stream]
        if config.spill_dir is not None:
            extents, limit = partial(device.allocate_disk, config.spill_dir), config.disk_bytes()
            account = device.account(config.spill_dir)
            files = HostPool(device, extents, limit, account, alignment=BLOCK, most=_MOST_EXTENT)
            if not self.direct:
                self.disk = files
                self._write_stream, self._read_stream = device.new_disk_stream("write"), device.new_disk_stream("read")
                self.streams += [self._write_stream, self._read_stream]
        if self.direct:
            self.host = files
        else:
            self.host = HostPool(device, device.allocate_host, config.host_bytes(), device.account())
        self.error: Exception | None = None
        """Why a file could not be written, the last time."""
        self._lent: list[tuple[Slot, list[Any], tuple[Any, ...]]] = []

    # Between the device and the host.

    def spill(self, entry: Entry, reason: str) -> None:
        """RESIDENT -> SPILLING, into the entry's slot of the host."""
        assert entry.slot is not None and entry.host is not None
        stream, host, slot = self.spill_stream, entry.host, entry.slot
        # What came from the host before, and has no copy there any more, is good after its fetch.
        self._wait("E1", stream, (entry.ready if entry.h2d is None else entry.h2d,))
        self._wait("E2", stream, host.events)
        host.events = ()
        start = self._copy(stream, entry, host.span, Span(slot.buffer, 0, entry.nbytes))
        if slot.source is not None:
            self.device.record_stream(slot.buffer, stream)
        entry.d2h, entry.h2d = self._copied("spill", stream, entry, start, reason), None
        self.counters.spills += 1
        self.counters.spilled_bytes += entry.nbytes
        self.table.move(entry, State.SPILLING)

    def retire(self, entry: Entry) -> None:
        """SPILLING, LOADING or READY -> HOST: only the copy on the host remains, or that in the file (DISK).

        -> KEPT, if it could not be written to a file that takes the host's place.
        """
        assert entry.slot is not None and entry.is_copied()
        if self.direct and not entry.saved:
            self._retire_checked(entry)
            if entry.state is State.KEPT:
                return
        # Changed in the midst of the copy, perhaps; later changes do no harm.
        changed, adopted = entry.is_changed(), entry.slot.nbytes if entry.slot.source is not None else 0
        self.ring.give(entry.slot, self._last_uses(entry))
        self.table.adopted -= adopted
        entry.changed, entry.slot, entry.readers = changed, None, []
        self.table.move(entry, State.DISK if entry.host is None else State.HOST)

    def _retire_checked(self, entry: Entry) -> None:
        """Wait until an entry is written; leave it where it is, if that failed."""
        self.device.synchronize(entry.d2h)
        error = self.device.failure(entry.d2h)
        if error is None:
            entry.saved = True
            return
        assert entry.host is not None
        self._failed(error)
        self.host.give(entry.host, self._host_uses(entry))
        entry.host = None
        self.table.move(entry, State.KEPT)

    def load(self, entry: Entry, slot: Slot, reason: str) -> None:
        """HOST or WRITING -> LOADING."""
        assert entry.host is not None
        stream = self.fetch_stream
        try:
            if entry.d2h is not None:
                self._wait("E4", stream, (entry.d2h,))
            self._wait("E5", stream, slot.free)
            start = self._copy(stream, entry, Span(slot.buffer, 0, entry.nbytes), entry.host.span)
        except BaseException:
            self.ring.give(slot, slot.free)
            raise
        entry.h2d = self._copied("fetch", stream, entry, start, reason)
        slot.free = ()
        entry.slot = slot
        self.counters.loads += 1
        self.counters.loaded_bytes += entry.nbytes
        if entry.disk is not None and entry.saved:
            # It can come from the file again, and the host has better use for the room.
            self.host.give(entry.host, self._host_uses(entry))
            entry.host = None
        self.table.move(entry, State.LOADING)

    def await_content(self, entry: Entry, stream: Any) -> None:
        """Let `stream` read the entry's device copy from now on.

        Raises:
            RuntimeError: If it could not be read from its file.
        """
        if entry.h2d is not None:
            self._wait("E6", stream, (entry.h2d,))
            if self.direct and (error := self.device.failure(entry.h2d)):
                self.retire(entry)
                self.unreadable(entry, error)
        elif stream != entry.stream:
            self._wait("E6", stream, (entry.ready,))

    def await_readers(self, entry: Entry, stream: Any) -> None:
        """Let `stream` write the entry's device copy from now on, whoever still reads it."""
        # Forwarded, and still being read by its spill.
        if entry.d2h is not None and entry.h2d is None:
            self._wait("E7", stream, (entry.d2h,))
        for reader in entry.readers:
            if reader != stream:
                self._wait("E7", stream, (self.device.record(reader),))
        entry.written = True

    def await_slot(self, slot: Slot, stream: Any) -> None:
        """Let `stream` write a slot from now on."""
        self._wait("E3", stream, slot.free)

    # Between the host and a file.

    def write(self, entry: Entry) -> bool:
        """HOST -> WRITING; return whether the file had room. What it has already is not written again."""
        assert self.disk is not None and entry.host is not None
        if entry.disk is None:
            entry.disk = self.disk.take(entry.nbytes)
            if entry.disk is None:
                self.counters.disk_full += 1
                return False
        if entry.io is None:
            stream, disk = self._write_stream, entry.disk
            self._wait("E9", stream, (entry.d2h,))
            self._wait("E10", stream, disk.events)
            disk.events = ()
            start = self._copy(stream, entry, disk.span, entry.host.span)
            entry.io = self._copied("write", stream, entry, start, "the host is nearly full")
            self.counters.disk_writes += 1
            self.counters.disk_written_bytes += entry.nbytes
        self.table.move(entry, State.WRITING)
        return True

    def leave(self, entry: Entry) -> None:
        """WRITING -> DISK, where the host must wait for the write if it is not over; -> HOST, if it failed."""
        assert self.disk is not None and entry.host is not None and entry.disk is not None
        if not entry.saved:
            self._over("E12", entry.io)
            error = self.device.failure(entry.io)
            if error is not None:
                self._failed(error)
                self.disk.give(entry.disk, (entry.io,))
                entry.disk = entry.io = None
                entry.stays = True
                self._to_host(entry)
                return
            entry.saved = True
        self.host.give(entry.host, self._host_uses(entry))
        entry.host = None
        self.table.move(entry, State.DISK)

    def read(self, entry: Entry, host: HostSlot, reason: str) -> None:
        """DISK -> READING, into a slot of the host."""
        assert entry.disk is not None
        entry.host, stream = host, self._read_stream
        try:
            self._wait("E11", stream, host.events)
            start = self._copy(stream, entry, host.span, entry.disk.span)
        except BaseException:
            self.host.give(host, host.events)
            entry.host = None
            raise
        host.events = ()
        entry.io = self._copied("read", stream, entry, start, reason)
        entry.d2h = entry.h2d = None
        self.counters.disk_reads += 1
        self.counters.disk_read_bytes += entry.nbytes
        self.table.move(entry, State.READING)

    def arrive(self, entry: Entry) -> Exception | None:
        """READING -> HOST, where the host must wait for the read if it is not over; -> DISK, if it failed."""
        assert entry.host is not None
        self._over("E14", entry.io)
        error = self.device.failure(entry.io)
        if error is None:
            self._to_host(entry)
        else:
            self.host.give(entry.host, (entry.io,))
            entry.host = None
            self.table.move(entry, State.DISK)
        return error

    def _to_host(self, entry: Entry) -> None:
        """-> HOST, as the oldest there."""
        self.table.move(entry, State.HOST)
        self.table.states[State.HOST].move_to_end(entry, last=False)

    def _over(self, edge: str, event: Any) -> None:
        """Wait until a copy from or to the file is over; `edge` says why."""
        if not self.device.query(event):
            start = time.perf_counter()
            self.device.synchronize(event)
            self.counters.disk_waits += 1
            self.counters.disk_wait_seconds += time.perf_counter() - start

    def _failed(self, error: Exception) -> None:
        """Count that the file could not be written, to be said when it can be."""
        self.counters.disk_failures += 1
        self.error = error

    def unreadable(self, entry: Entry, error: Exception) -> None:
        """Raise that the entry cannot be had."""
        self.counters.disk_failures += 1
        raise RuntimeError(
            f"a buffer of {entry.nbytes} bytes that was offloaded to a file in {self.config.spill_dir} (`spill_dir`) "
            f"cannot be read back: {error}. Run the step again; if the disk fails again, name a folder on another one "
            "or leave `spill_dir` out"
        ) from error

    # The end of copies and of entries.

    def forget_copies(self, entry: Entry) -> None:
        """SPILLING or LOADING -> RESIDENT: only the copy on the device remains, as it does of one that is READY."""
        assert entry.host is not None
        self.host.give(entry.host, self._host_uses(entry))
        if self.disk is not None and entry.disk is not None:
            self.disk.give(entry.disk, self._disk_uses(entry))
        entry.host = entry.disk = entry.io = None
        entry.saved = False
        if entry.state is not State.READY:
            self.table.move(entry, State.RESIDENT)

    def free(self, entry: Entry, aliased: bool = False, enough: bool = False) -> None:
        """Any state -> FREED.

        Args:
            entry: Whose memory is given back.
            aliased: Whether somebody may still refer to the buffer; if so it is theirs.
            enough: Whether the ring has slots enough without this one.
        """
        slot, host = entry.slot, entry.host
        if slot is not None:
            # A spill under way would have to be waited for before the allocator could have the memory.
            enough = enough and (entry.d2h is None or entry.h2d is not None)
            adopted = slot.nbytes if slot.source is not None else 0
            readers = entry.readers
            events = self._last_uses(entry)
            if entry.start is not None:
                self.recorder.add("consume", entry.sequence, entry.nbytes, entry.start, events[0])
            aliased = aliased and self.device.holders(slot.buffer) > 0
            if aliased and any(stream != slot.home for stream in readers):
                # Read on a stream to which its memory does not belong: it must not simply be freed when they let go.
                self.ring.lend(slot)
                self._lent.append((slot, readers, events))
            elif aliased or enough:
                self.ring.drop(slot, events)
            else:
                self.ring.give(slot, events)
            self.table.adopted -= adopted
        if host is not None:
            self.host.give(host, self._host_uses(entry))
        if self.disk is not None and entry.disk is not None:
            self.disk.give(entry.disk, self._disk_uses(entry))
        self.table.unlink(entry)

    def free_slot(self, slot: Slot) -> None:
        """Take back a slot that was reserved, perhaps written, and never pushed."""
        back = self.ring.drop if self.device.holders(slot.buffer) > 0 else self.ring.give
        back(slot, (self.device.record(slot.writer),))

    def collect(self) -> None:
        """Take back what was lent to somebody who has let go of it by now."""
        for lent in list(self._lent):
            slot, readers, events = lent
            if self.device.holders(slot.buffer) == 0:
                self.ring.take_back(slot, (*events, *(self.device.record(stream) for stream in readers)))
                self._lent.remove(lent)

    def give_up(self) -> None:
        """End all entries and hold nothing any more, in whatever condition this is, once all streams have run."""
        self.table.end_all()
        for pool in (self.host, self.disk):
            if pool is not None:
                pool.give_up()

    def synchronize(self) -> None:
        """Block the host until all copies are done."""
        for event in [self.device.record(stream) for stream in self.streams]:
            self.device.synchronize(event)

    def is_idle(self, entry: Entry) -> bool:
        """Return whether nobody refers to a buffer that was read, so that nothing more will be done with it."""
        return not entry.written and entry.slot is not None and self.device.holders(entry.slot.buffer) == 0

    def _last_uses(self, entry: Entry) -> tuple[Any, ...]:
        """Return the events after which nobody reads or writes the entry's device copy (E7)."""
        uses = tuple(self.device.record(stream, entry.timed) for stream in entry.readers)
        if entry.h2d is not None:
            return uses or (entry.h2d,)
        return (*uses, entry.d2h) if entry.d2h is not None else uses or (entry.ready,)

    def _host_uses(self, entry: Entry) -> tuple[Any, ...]:
        """Return the events after which nobody reads or writes the entry's copy on the host (E8, E13)."""
        assert entry.host is not None
        # Those before it are still to be awaited if the copy could not be put on its stream.
        before, last = entry.host.events, entry.d2h if entry.h2d is None else entry.h2d
        uses = before if last is None else (*before, last)
        over = entry.io is None or (entry.saved and entry.state is not State.READING)
        return uses if over else (*uses, entry.io)

    def _disk_uses(self, entry: Entry) -> tuple[Any, ...]:
        """Return the events after which nobody reads or writes the entry's range of the file (E15)."""
        assert entry.disk is not None
        return entry.disk.events if entry.io is None else (*entry.disk.events, entry.io)

    def _wait(self, edge: str, stream: Any, events: tuple[Any, ...]) -> None:
        """Let `stream` wait: `edge` says why, in the words of the lists above."""
        for event in events:
            self.device.wait(stream, event)

    def _copy(self, stream: Any, entry: Entry, target: Span, source: Span) -> Any:
        """Put a copy of an entry on a stream; return the event at which it starts, where times are taken."""
        start = self.device.record(stream, True) if entry.timed else None
        self.device.copy(stream, target, source)
        return start

    def _copied(self, kind: str, stream: Any, entry: Entry, start: Any, reason: str) -> Any:
        """Note a copy that is under way, and return the event after it."""
        try:
            event = self.device.record(stream, entry.timed)
        except RuntimeError:
            # Without one, its memory could never be used again.
            event = self.device.record(stream, entry.timed)
        if start is not None:
            self.recorder.add(kind, entry.sequence, entry.nbytes, start, event)
        self.recorder.decisions.append((entry.sequence, kind, entry.nbytes, reason))
        return event

    def audit(self) -> None:
        """Check that every byte is accounted for: in use + free = held, on the device, on the host and in files."""
        entries = self.table.audit()
        used = sum(entry.slot.nbytes for entry in entries if entry.slot is not None and entry.slot.source is None)
        assert used + self.ring.free == self.ring.held, (used, self.ring.free, self.ring.held)
        self.host.audit([entry.host for entry in entries if entry.host is not None])
        if self.disk is not None:
            self.disk.audit([entry.disk for entry in entries if entry.disk is not None])
