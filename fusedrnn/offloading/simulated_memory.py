"""What a simulated device is made of: memory with its history, streams and events with their clocks."""

from collections import deque
from typing import Any, NamedTuple

STREAMS = 8
"""Most streams of a device."""


class Access(NamedTuple):
    """A read or write of bytes `start` to `stop`, at `epoch` on a stream."""

    start: int
    stop: int
    stream: int
    epoch: int
    write: bool
    what: str


class Memory:
    """Physical memory: its history outlives every allocation in it."""

    __slots__ = ("accesses", "kind", "live", "values")

    def __init__(self, kind: str):
        self.kind, self.live = kind, True
        self.accesses: list[Access] = []
        self.values: list[tuple[int, int, Any]] = []

    def write(self, start: int, stop: int, value: Any) -> None:
        """Let bytes hold a value."""
        # What is overwritten in part is lost as a whole: nobody may read it any more.
        self.values = [found for found in self.values if found[1] <= start or found[0] >= stop]
        self.values.append((start, stop, value))

    def read(self, start: int, stop: int) -> Any:
        """Return the value that bytes hold, None if that is undefined."""
        for first, last, value in self.values:
            if first == start and stop <= last:
                return value
        return None


class Allocation:
    """Memory in use until nothing refers to this object or to a view of it."""

    def __init__(self, device: Any, memory: Memory, nbytes: int, home: "Stream"):
        self.device, self.memory, self.nbytes, self.home = device, memory, nbytes, home
        self.views = 0

    def __getitem__(self, part: slice) -> "View":
        return View(self, *part.indices(self.nbytes)[:2])

    def __del__(self) -> None:
        self.device._free(self)


class View:
    """Bytes `start` to `stop` of an allocation, which it keeps in use."""

    def __init__(self, allocation: Allocation, start: int, stop: int):
        self.allocation, self.start, self.stop = allocation, start, stop
        allocation.views += 1

    def __del__(self) -> None:
        self.allocation.views -= 1


class Stream:
    """A queue of operations with its clock."""

    __slots__ = ("clock", "disk", "error", "index", "name", "queue", "time")

    def __init__(self, name: str, index: int):
        self.name, self.index = name, index
        self.clock = [0] * STREAMS
        self.time = 0.0
        self.queue: deque[Any] = deque()
        self.disk = False
        """Whether it is a thread that reads or writes files."""
        self.error: OSError | None = None
        """What went wrong with its latest copy, until an event tells it."""


class Event:
    """A point of a stream."""

    __slots__ = ("clock", "disk", "done", "error", "time")

    def __init__(self, clock: list[int], time: float, disk: bool, error: OSError | None):
        self.clock, self.time, self.done, self.disk, self.error = clock, time, False, disk, error
