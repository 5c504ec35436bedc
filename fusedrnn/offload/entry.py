"""A pushed buffer, and where its bytes are."""

from enum import Enum
from typing import Any

from fusedrnn.offload.host import HostSlot
from fusedrnn.offload.ring import Slot


class State(Enum):
    """Where an entry's bytes are."""

    KEPT = "kept"
    """On the device for good: too small, or used again and again."""
    RESIDENT = "resident"
    """On the device only, as pushed."""
    SPILLING = "spilling"
    """On the device, and on the host or on the way there."""
    HOST = "host"
    """On the host only."""
    LOADING = "loading"
    """On the host, and on the device or on the way there."""
    READY = "ready"
    """On the device, read at least once since it came there."""
    FREED = "freed"
    """Nowhere."""

    # Identity serves, and is quicker than the hash of the name.
    __hash__ = object.__hash__


class Entry:
    """A pushed buffer.

    Args:
        nbytes: Its size.
        slot: Its device memory.
        stream: The stream that wrote it.
        ready: The event after which it is written.
        sequence: Its place in the order of the pushes.
        state: RESIDENT, or KEPT where it may not go to the host.
        timed: Whether its times are taken.
    """

    __slots__ = (
        "changed",
        "d2h",
        "h2d",
        "host",
        "nbytes",
        "newer",
        "older",
        "readers",
        "ready",
        "sequence",
        "slot",
        "start",
        "state",
        "stream",
        "timed",
        "written",
    )

    def __init__(self, nbytes: int, slot: Slot, stream: Any, ready: Any, sequence: int, state: State, timed: bool):
        self.nbytes, self.stream, self.ready, self.sequence, self.state = nbytes, stream, ready, sequence, state
        self.slot: Slot | None = slot
        self.host: HostSlot | None = None
        self.d2h: Any = None
        """Event after its spill; the host copy is good from there on."""
        self.h2d: Any = None
        """Event after its latest fetch, while the device copy comes from one."""
        self.timed = timed
        self.start: Any = None
        """Timed event at which its reader began."""
        self.readers: list[Any] = []
        """Streams with reads after which no event has been recorded."""
        self.changed = False
        """Whether an adopted tensor was changed in place while it was on the device."""
        self.written = False
        """Whether a reader may have overwritten it, so that it is of no further use."""
        self.older: Entry | None = None
        self.newer: Entry | None = None

    def is_changed(self) -> bool:
        """Return whether the content is not what was saved, since the user changed it in place."""
        return self.changed or (self.slot is not None and self.slot.changed())

    def end(self) -> None:
        """Forget everything but that it is FREED."""
        self.state = State.FREED
        self.slot = self.host = self.ready = self.d2h = self.h2d = self.start = self.older = self.newer = None
