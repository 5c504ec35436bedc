"""A pushed buffer, and where its bytes are."""

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from fusedrnn.offloading.host import HostSlot
from fusedrnn.offloading.ring import Slot


class State(Enum):
    """Where an entry's bytes are."""

    KEPT = "kept"
    """On the device for good: too small, or used again and again."""
    RESIDENT = "resident"
    """On the device only, as pushed."""
    SPILLING = "spilling"
    """On the device, and on the host or on the way there."""
    HOST = "host"
    """Below the device only: on the host, or in a file where that takes the host's place."""
    WRITING = "writing"
    """On the host, and in the file or on the way there."""
    DISK = "disk"
    """In the file only."""
    READING = "reading"
    """In the file, and on the host or on the way there."""
    LOADING = "loading"
    """On the host or in the file, and on the device or on the way there."""
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
        generation: Of the scheduler's state to which it belongs.
    """

    __slots__ = (
        "changed",
        "d2h",
        "disk",
        "generation",
        "h2d",
        "host",
        "io",
        "nbytes",
        "newer",
        "older",
        "owner",
        "readers",
        "ready",
        "saved",
        "sequence",
        "slot",
        "start",
        "state",
        "stays",
        "stream",
        "timed",
        "written",
    )

    def __init__(
        self,
        nbytes: int,
        slot: Slot,
        stream: Any,
        ready: Any,
        sequence: int,
        state: State,
        timed: bool,
        generation: int,
    ):
        self.generation = generation
        self.owner: Owner | None = None
        self.nbytes, self.stream, self.ready, self.sequence, self.state = nbytes, stream, ready, sequence, state
        self.slot: Slot | None = slot
        self.host: HostSlot | None = None
        self.disk: HostSlot | None = None
        """Its range of the file, where it goes there by way of the host."""
        self.d2h: Any = None
        """Event after its spill; the host copy is good from there on. None where it came from the file."""
        self.h2d: Any = None
        """Event after its latest fetch, while the device copy comes from one."""
        self.io: Any = None
        """Event after its write to the file or its latest read."""
        self.saved = False
        """Whether its write is known to have succeeded."""
        self.stays = False
        """Whether it never goes to the file, since that failed once."""
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

    def is_copied(self) -> bool:
        """Return whether there is a copy of it below the device, so that the device's may go."""
        return self.host is not None or self.saved

    def end(self) -> None:
        """Forget everything but that it is FREED."""
        self.state = State.FREED
        self.slot = self.host = self.disk = self.ready = self.d2h = self.h2d = self.io = None
        self.start = self.older = self.newer = self.owner = None
        self.readers = []


class Owner(weakref.ref[Any]):
    """Refers to whoever a slot or an entry was given to, and is queued when that is gone.

    `queue` is a function written in C (`deque.append`), so that no interrupt can come between the end of the owner and
    the note of it, and so that a finalizer that runs in the midst of anything does nothing else.

    Args:
        owner: Who has it.
        queue: Called with this object when the owner is gone.
        item: What it has.
    """

    __slots__ = ("item",)
    item: Entry | Slot

    def __new__(cls, owner: Any, queue: Callable[["Owner"], None], item: Entry | Slot) -> "Owner":
        """Return the reference."""
        self = super().__new__(cls, owner, queue)
        self.item = item
        return self

    def __init__(self, owner: Any, queue: Callable[["Owner"], None], item: Entry | Slot):
        """Do nothing more."""
