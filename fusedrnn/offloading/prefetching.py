"""What is brought back to the device, and when: ahead of its use, or because it is asked for."""

from collections.abc import Iterator
from itertools import islice

from fusedrnn.offloading import policy
from fusedrnn.offloading.entry import Entry, State
from fusedrnn.offloading.spilling import Spiller
from fusedrnn.offloading.table import from_newest
from fusedrnn.offloading.transfers import Transfers


class Prefetcher:
    """Brings entries back to one device. It is not thread-safe.

    Args:
        transfers: What moves the entries.
        spiller: Where slots come from.
    """

    def __init__(self, transfers: Transfers, spiller: Spiller):
        self._transfers, self._spiller = transfers, spiller
        self._states = transfers.table.states

    def prefetch(self, entry: Entry | None) -> None:
        """Fetch what is expected to be read next: `entry`, then the older ones, into slots that are free."""
        if entry is None or not self._transfers.table.away():
            return
        if self._transfers.disk is not None:
            self._read_ahead()
        depth, ring = self._depth(), self._transfers.ring
        for candidate in self._expected(entry, depth):
            if depth is not None and len(self._states[State.LOADING]) >= depth:
                return
            if candidate.state in (State.HOST, State.WRITING):
                slot = ring.take(candidate.nbytes)
                if slot is None and ring.may_grow(candidate.nbytes):
                    slot = self._spiller.grow(candidate.nbytes)
                if slot is None:
                    return
                self._transfers.load(candidate, slot, "prefetched")

    def demand(self, entry: Entry) -> None:
        """Fetch an entry that is not on the device.

        Raises:
            RuntimeError: If it cannot be read from its file, or the host has no room for it on its way.
        """
        slot = self._spiller.acquire(entry.nbytes)
        try:
            if entry.state in (State.DISK, State.READING):
                self._bring(entry)
        except BaseException:
            self._transfers.ring.give(slot, slot.free)
            raise
        self._transfers.load(entry, slot, "demanded")

    def has_enough(self, nbytes: int) -> bool:
        """Return whether the ring, above its bound, has enough free slots for what is still to be fetched."""
        ring = self._transfers.ring
        if ring.held <= ring.bound:
            return False
        depth = self._depth()
        return not self._transfers.table.away() or (depth is not None and ring.free > depth * nbytes)

    def _depth(self) -> int | None:
        return policy.prefetch_depth(self._transfers.config.prefetch, self._transfers.recorder.speeds)

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

    def _read_ahead(self) -> None:
        """Take in what has been read, and read what will be fetched next, newest first, where the host has room."""
        states, transfers = self._states, self._transfers
        while states[State.READING]:
            oldest = next(iter(states[State.READING]))
            if not transfers.device.query(oldest.io):
                break
            if transfers.arrive(oldest) is not None:
                # `get` raises the error, if it is asked for.
                return
        depth = policy.read_depth(transfers.config.prefetch, transfers.recorder.speeds)
        while states[State.DISK]:
            ahead = len(states[State.HOST]) + len(states[State.WRITING]) + len(states[State.READING])
            if depth is not None and ahead >= depth:
                return
            entry = next(reversed(states[State.DISK]))
            host = transfers.host.take(entry.nbytes)
            if host is None:
                return
            transfers.read(entry, host, "ahead")

    def _bring(self, entry: Entry) -> None:
        """DISK or READING -> HOST at once."""
        transfers = self._transfers
        if entry.state is State.DISK:
            host = self._spiller.take_host(entry.nbytes, demanded=True)
            if host is None:
                raise RuntimeError(
                    f"{entry.nbytes} bytes in a file need as much pinned memory to come back, of which there is none: "
                    f"{transfers.host.used} bytes of at most {transfers.host.limit} are in use. Raise `host_limit`"
                )
            transfers.read(entry, host, "demanded")
        error = transfers.arrive(entry)
        if error is not None:
            transfers.unreadable(entry, error)
