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

The host waits for nothing. Where buffers go from the device straight to a file (on the CPU), that takes the host's
place in all of this, but a copy may fail: an entry that could not be written stays where it is, as `retire` finds out.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.device import Device, Span
from fusedrnn.offloading.disk import BLOCK
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.host import HostPool
from fusedrnn.offloading.ring import Ring, Slot
from fusedrnn.offloading.stats import Counters, Recorder

_AWAY = (State.HOST, State.WRITING, State.DISK, State.READING)
_MOST_EXTENT = 16 << 30
"""Bytes of the largest file, so that a few serve for a whole disk."""


class Transitions:
    """The entries of one device with the memory they use. No method here decides anything, and none is thread-safe.

    Args:
        device: Where the buffers live.
        config: What the user wants.
    """

    def __init__(self, device: Device, config: OffloadConfig):
        self.device, self.config = device, config
        self.counters = Counters()
        self.recorder = Recorder(device, config.trace)
        self.ring = Ring(device, config.ring_slots, config.budget_bytes())
        self.host = HostPool(device, device.allocate_host, config.host_bytes())
        self.disk: HostPool | None = None
        """Where the host's buffers go when it is full."""
        self.direct = device.direct and config.spill_dir is not None
        """Whether a file takes the place of the host."""
        new_stream = device.new_disk_stream if self.direct else device.new_stream
        self._spill_stream, self._fetch_stream = new_stream("spill"), new_stream("fetch")
        if config.spill_dir is not None:
            extents = partial(device.allocate_disk, config.spill_dir)
            files = HostPool(device, extents, config.disk_bytes(), alignment=BLOCK, most=_MOST_EXTENT)
            if self.direct:
                self.host = files
            else:
                self.disk = files
                self._write_stream, self._read_stream = device.new_disk_stream("write"), device.new_disk_stream("read")
        self._error: OSError | None = None
        self._states: dict[State, OrderedDict[Entry, None]] = {state: OrderedDict() for state in State}
        self._bytes = dict.fromkeys(State, 0)
        self._newest: Entry | None = None
        self._live = 0
        self._adopted = 0
        self._lent: list[tuple[Slot, list[Any], tuple[Any, ...]]] = []

    def _spill(self, entry: Entry, reason: str) -> None:
        """RESIDENT -> SPILLING, into the entry's slot of the host."""
        assert entry.slot is not None and entry.host is not None
        stream, host = self._spill_stream, entry.host
        # What came from the host before, and has no copy there any more, is good after its fetch.
        self._wait("E1", stream, (entry.ready if entry.h2d is None else entry.h2d,))
        self._wait("E2", stream, host.events)
        host.events = ()
        start = self._copy(stream, entry, host.span, Span(entry.slot.buffer, 0, entry.nbytes))
        entry.d2h, entry.h2d = self._copied("spill", stream, entry, start, reason), None
        self.counters.spills += 1
        self.counters.spilled_bytes += entry.nbytes
        self._move(entry, State.SPILLING)

    def _retire(self, entry: Entry) -> None:
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
        self._adopted -= adopted
        entry.changed, entry.slot, entry.readers = changed, None, []
        self._move(entry, State.DISK if entry.host is None else State.HOST)

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
        self._move(entry, State.KEPT)

    def _failed(self, error: OSError) -> None:
        """Count that the file could not be written, to be said when it can be."""
        self.counters.disk_failures += 1
        self._error = error

    def _unreadable(self, entry: Entry, error: OSError) -> None:
        """Raise that the entry cannot be had."""
        self.counters.disk_failures += 1
        raise RuntimeError(
            f"a buffer of {entry.nbytes} bytes that was offloaded to a file in {self.config.spill_dir} (`spill_dir`) "
            f"cannot be read back: {error}. Run the step again; if the disk fails again, name a folder on another one "
            "or leave `spill_dir` out"
        ) from error

    def _load(self, entry: Entry, slot: Slot, reason: str) -> None:
        """HOST or WRITING -> LOADING."""
        assert entry.host is not None
        stream = self._fetch_stream
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
        self._move(entry, State.LOADING)

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

    def _free(self, entry: Entry, aliased: bool = False, enough: bool = False) -> None:
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
            self._adopted -= adopted
        if host is not None:
            self.host.give(host, self._host_uses(entry))
        if self.disk is not None and entry.disk is not None:
            self.disk.give(entry.disk, self._disk_uses(entry))
        self._unlink(entry)

    def _collect(self) -> None:
        """Take back what was lent to somebody who has let go of it by now."""
        for lent in list(self._lent):
            slot, readers, events = lent
            if self.device.holders(slot.buffer) == 0:
                self.ring.take_back(slot, (*events, *(self.device.record(stream) for stream in readers)))
                self._lent.remove(lent)

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
        """Let `stream` wait: `edge` says why, in the words of the list above."""
        for event in events:
            self.device.wait(stream, event)

    def _move(self, entry: Entry, state: State) -> None:
        nbytes = entry.nbytes
        del self._states[entry.state][entry]
        self._bytes[entry.state] -= nbytes
        self._states[state][entry] = None
        self._bytes[state] += nbytes
        entry.state = state

    def _link(self, entry: Entry) -> None:
        entry.older, self._newest = self._newest, entry
        if entry.older is not None:
            entry.older.newer = entry
        self._states[entry.state][entry] = None
        self._bytes[entry.state] += entry.nbytes
        self._live += entry.nbytes

    def _unlink(self, entry: Entry) -> None:
        if entry.newer is None:
            self._newest = entry.older
        else:
            entry.newer.older = entry.older
        if entry.older is not None:
            entry.older.newer = entry.newer
        del self._states[entry.state][entry]
        self._bytes[entry.state] -= entry.nbytes
        self._live -= entry.nbytes
        entry.end()

    def audit(self) -> None:
        """Check that every byte is accounted for: in use + free = held, on the device, on the host and in files."""
        entries = list(from_newest(self._newest))
        assert sum(map(len, self._states.values())) == len(entries)
        assert self._live == sum(entry.nbytes for entry in entries) == sum(self._bytes.values())
        for entry in entries:
            assert entry in self._states[entry.state] and (entry.slot is None) == (entry.state in _AWAY)
        used = sum(entry.slot.nbytes for entry in entries if entry.slot is not None and entry.slot.source is None)
        assert used + self.ring.free == self.ring.held, (used, self.ring.free, self.ring.held)
        self.host.audit([entry.host for entry in entries if entry.host is not None])
        if self.disk is not None:
            self.disk.audit([entry.disk for entry in entries if entry.disk is not None])

    def _away(self) -> int:
        """Return the bytes that are not on the device."""
        return sum(self._bytes[state] for state in _AWAY)


def from_newest(entry: Entry | None) -> Iterator[Entry]:
    """Yield an entry and all older ones."""
    while entry is not None:
        yield entry
        entry = entry.older
