"""The way from the host to a file and back, for what the host has no room for.

    HOST --write--> WRITING --leave--> DISK --read--> READING --arrive--> HOST
      |                |
      +---- load ------+---> LOADING

A stream of the device cannot wait for a file, so `leave` and `arrive` happen when the host finds that the operation is
over, and has succeeded. To those of `transitions` these edges are added:

    E9   write stream waits for the entry's spill     E12  an entry leaves the host after its write
    E10  write stream waits for the range's last      E13  a host slot is free after the write that reads it, and
         users in the file                                 after the read that writes it
    E11  read stream waits for the host slot's        E14  an entry arrives, to be fetched, after its read
         last users                                   E15  a range of the file is free after its last copy

The host waits where nothing else is left: for the oldest write where neither device nor host have room, and for a read
that is demanded.
"""

import time
from itertools import islice
from typing import Any

from fusedrnn.offloading import policy
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.host import HostSlot
from fusedrnn.offloading.transitions import Transitions

_LOOKED_AT = 16
"""Entries looked at in search of one to write: where all of them could not be written, the disk is left alone."""


class DiskTier(Transitions):
    """What happens below the host. No method here is thread-safe."""

    def _write(self, entry: Entry) -> bool:
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
        self._move(entry, State.WRITING)
        return True

    def _leave(self, entry: Entry) -> None:
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
                self._move(entry, State.HOST)
                self._states[State.HOST].move_to_end(entry, last=False)
                return
            entry.saved = True
        self.host.give(entry.host, self._host_uses(entry))
        entry.host = None
        self._move(entry, State.DISK)

    def _read(self, entry: Entry, host: HostSlot, reason: str) -> None:
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
        self._move(entry, State.READING)

    def _arrive(self, entry: Entry) -> OSError | None:
        """READING -> HOST, where the host must wait for the read if it is not over; -> DISK, if it failed."""
        assert entry.host is not None
        self._over("E14", entry.io)
        error = self.device.failure(entry.io)
        if error is None:
            self._move(entry, State.HOST)
            self._states[State.HOST].move_to_end(entry, last=False)
        else:
            self.host.give(entry.host, (entry.io,))
            entry.host = None
            self._move(entry, State.DISK)
        return error

    def _over(self, edge: str, event: Any) -> None:
        """Wait until a copy from or to the file is over; `edge` says why."""
        if not self.device.query(event):
            start = time.perf_counter()
            self.device.synchronize(event)
            self.counters.disk_waits += 1
            self.counters.disk_wait_seconds += time.perf_counter() - start

    # What happens when.

    def _take_host(self, nbytes: int, demanded: bool = False) -> HostSlot | None:
        """Return a slot of the host, for which others may have to go on to the file; None where there is none yet.

        Args:
            nbytes: Its size.
            demanded: Whether there must be one, so that the host waits for it.
        """
        slot = self.host.take(nbytes)
        while slot is None and self.disk is not None and self._host_gives_way(demanded):
            slot = self.host.take(nbytes)
        if slot is None and not self._states[State.WRITING]:
            self.counters.host_full += 1
        return slot

    def _host_gives_way(self, demanded: bool) -> bool:
        """Bring a slot of the host closer to being free; return whether that was possible."""
        oldest = next(iter(self._states[State.WRITING]), None)
        if oldest is None and self._write_oldest():
            return True
        if oldest is not None and (demanded or oldest.saved or self.device.query(oldest.io)):
            self._leave(oldest)
            return True
        if not demanded:
            return False
        for state in (State.READY, State.LOADING, State.SPILLING):
            for entry in self._states[state]:
                if entry.host is not None:
                    self._forget_copies(entry)
                    return True
        for entry in self._states[State.READING]:
            self._arrive(entry)
            return True
        for entry in self._states[State.HOST]:
            # The file has no room for it either.
            self.counters.ring_grown += 1
            self._load(entry, self.ring.grow(entry.nbytes), "makes way")
            self._forget_copies(entry)
            return True
        return False

    def _forget_copies(self, entry: Entry) -> None:
        """SPILLING or LOADING -> RESIDENT: only the copy on the device remains, as it does of one that is READY."""
        assert entry.host is not None
        self.host.give(entry.host, self._host_uses(entry))
        if self.disk is not None and entry.disk is not None:
            self.disk.give(entry.disk, self._disk_uses(entry))
        entry.host = entry.disk = entry.io = None
        entry.saved = False
        if entry.state is not State.READY:
            self._move(entry, State.RESIDENT)

    def _write_oldest(self) -> bool:
        """Let the oldest entry on the host go on to the file; return whether there was one, and room for it."""
        if self.disk is not None:
            for entry in islice(self._states[State.HOST], _LOOKED_AT):
                if not entry.stays:
                    return self._write(entry)
        return False

    def _write_ahead(self, nbytes: int) -> None:
        """Let entries go on to the file while the host has not enough room behind a push of `nbytes`."""
        host = self.host
        while (
            self.disk is not None
            and policy.write_target(host.capacity, host.used, self._bytes[State.WRITING], nbytes) > 0
            and self._write_oldest()
        ):
            pass

    def _await_write(self) -> bool:
        """Wait until the oldest write has made room on the host; return whether there was one to wait for."""
        for entry in self._states[State.WRITING]:
            self._leave(entry)
            return True
        return False

    def _read_ahead(self) -> None:
        """Take in what has been read, and read what will be fetched next, newest first, where the host has room."""
        states = self._states
        while states[State.READING]:
            oldest = next(iter(states[State.READING]))
            if not self.device.query(oldest.io):
                break
            if self._arrive(oldest) is not None:
                # Who asks for it will know.
                return
        depth = policy.read_depth(self.config.prefetch, self.recorder.speeds)
        while states[State.DISK]:
            ahead = len(states[State.HOST]) + len(states[State.WRITING]) + len(states[State.READING])
            if depth is not None and ahead >= depth:
                return
            entry = next(reversed(states[State.DISK]))
            host = self.host.take(entry.nbytes)
            if host is None:
                return
            self._read(entry, host, "ahead")

    def _bring(self, entry: Entry) -> None:
        """DISK or READING -> HOST at once.

        Raises:
            RuntimeError: If that is impossible.
        """
        if entry.state is State.DISK:
            host = self._take_host(entry.nbytes, demanded=True)
            if host is None:
                raise RuntimeError(
                    f"{entry.nbytes} bytes in a file need as much pinned memory to come back, of which there is none: "
                    f"{self.host.used} bytes of at most {self.host.limit} are in use. Raise `host_limit`"
                )
            self._read(entry, host, "demanded")
        error = self._arrive(entry)
        if error is not None:
            self._unreadable(entry, error)
