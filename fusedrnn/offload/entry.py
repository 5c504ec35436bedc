"""A pushed buffer, and where its bytes are."""

from enum import Enum
from typing import Any

from fusedrnn.offload.host import HostSlot
from fusedrnn.offload.ring import Slot


class State(Enum):
    """Where an entry's bytes are."""

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
        eligible: Whether it may go to the host.
    """

    __slots__ = (
        "d2h",
        "eligible",
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
        "written",
    )

    def __init__(self, nbytes: int, slot: Slot, stream: Any, ready: Any, sequence: int, eligible: bool):
        self.nbytes, self.stream, self.ready, self.sequence, self.eligible = nbytes, stream, ready, sequence, eligible
        self.slot: Slot | None = slot
        self.host: HostSlot | None = None
        self.d2h: Any = None
        """Event after its spill; the host copy is good from there on."""
        self.h2d: Any = None
        """Event after its latest fetch, while the device copy comes from one."""
        self.start: Any = None
        """Timed event at which its reader began, where times are taken."""
        self.readers: list[Any] = []
        """Streams with reads after which no event has been recorded."""
        self.written = False
        """Whether a reader may have overwritten it, so that it is of no further use."""
        self.state = State.RESIDENT
        self.older: Entry | None = None
        self.newer: Entry | None = None
