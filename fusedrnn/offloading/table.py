"""The entries of one device by state and by age, and how many bytes each state has."""

from collections import OrderedDict
from collections.abc import Iterator

from fusedrnn.offloading.entry import Entry, State

_AWAY = (State.HOST, State.WRITING, State.DISK, State.READING)


class EntryTable:
    """The entries that live. Nothing here decides or moves anything, and nothing is thread-safe."""

    def __init__(self) -> None:
        self.states: dict[State, OrderedDict[Entry, None]] = {state: OrderedDict() for state in State}
        """For each state its entries, in the order in which they came to it."""
        self.bytes = dict.fromkeys(State, 0)
        self.newest: Entry | None = None
        self.live = 0
        """Bytes of all entries."""
        self.adopted = 0
        """Bytes of the device's memory in tensors that were adopted."""

    def link(self, entry: Entry) -> None:
        """Add the newest entry."""
        entry.older, self.newest = self.newest, entry
        if entry.older is not None:
            entry.older.newer = entry
        self.states[entry.state][entry] = None
        self.bytes[entry.state] += entry.nbytes
        self.live += entry.nbytes

    def unlink(self, entry: Entry) -> None:
        """Remove an entry."""
        if entry.newer is None:
            self.newest = entry.older
        else:
            entry.newer.older = entry.older
        if entry.older is not None:
            entry.older.newer = entry.newer
        del self.states[entry.state][entry]
        self.bytes[entry.state] -= entry.nbytes
        self.live -= entry.nbytes
        entry.end()

    def move(self, entry: Entry, state: State) -> None:
        """Let an entry change its state."""
        nbytes = entry.nbytes
        del self.states[entry.state][entry]
        self.bytes[entry.state] -= nbytes
        self.states[state][entry] = None
        self.bytes[state] += nbytes
        entry.state = state

    def away(self) -> int:
        """Return the bytes that are not on the device."""
        return sum(self.bytes[state] for state in _AWAY)

    def audit(self) -> list[Entry]:
        """Check that every entry and every byte is counted once; return the entries, newest first."""
        entries = list(from_newest(self.newest))
        assert sum(map(len, self.states.values())) == len(entries)
        assert self.live == sum(entry.nbytes for entry in entries) == sum(self.bytes.values())
        for entry in entries:
            assert entry in self.states[entry.state] and (entry.slot is None) == (entry.state in _AWAY)
        return entries

    def end_all(self) -> None:
        """End all entries, in whatever condition the table is."""
        for entry in [entry for entries in self.states.values() for entry in entries]:
            entry.end()


def from_newest(entry: Entry | None) -> Iterator[Entry]:
    """Yield an entry and all older ones."""
    while entry is not None:
        yield entry
        entry = entry.older
