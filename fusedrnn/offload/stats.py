"""What a scheduler counts, measures, and says of its decisions."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusedrnn.offload.device import Device
from fusedrnn.offload.policy import Speeds

_WEIGHT = 0.25
_SAMPLED = 8
_DECISIONS = 256
_SPANS = 1 << 16


@dataclass
class Counters:
    """What happened since the scheduler was made.

    pushes = eligible + skipped, and pushes = released + dropped + those that live. Every spill is of a buffer that is
    loaded, forwarded (read while still on the device) or ended unread.
    """

    pushes: int = 0
    eligible: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    spills: int = 0
    spilled_bytes: int = 0
    forwarded: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    prefetch_hits: int = 0
    demand_loads: int = 0
    unprefetched: int = 0
    released: int = 0
    dropped: int = 0
    ring_waits: int = 0
    ring_grown: int = 0
    host_full: int = 0
    device_failures: int = 0
    pinned_by_alias: int = 0
    shared: int = 0
    gathered: int = 0
    gatherings: int = 0
    changed_in_place: int = 0
    occupancy_asked: int = 0
    occupancy_peak: float = 0.0
    stall_seconds: float = 0.0

    def skip(self, reason: str) -> None:
        """Count a buffer that cannot be offloaded."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


class Interval(NamedTuple):
    """Work of a stream between two timed events."""

    kind: str
    sequence: int
    nbytes: int
    start: Any
    end: Any


class Recorder:
    """Take times from events that have been reached, without waiting for any.

    Args:
        device: Whose events they are.
        trace: Whether every interval is timed and kept; otherwise one in eight serves to know the speeds.
    """

    def __init__(self, device: Device, trace: bool):
        self._device, self.trace = device, trace
        self._pending: deque[Interval] = deque(maxlen=_SPANS)
        self._per_byte: dict[str, float] = {}
        self.spans: deque[Interval] = deque(maxlen=_SPANS)
        self.decisions: deque[tuple[int, str, int, str]] = deque(maxlen=_DECISIONS)
        """(sequence, action, bytes, reason) of the latest."""
        self.stall_seconds = 0.0
        self.speeds = Speeds()

    def samples(self, sequence: int) -> bool:
        """Return whether the times of this entry are taken."""
        return self.trace or sequence % _SAMPLED == 1

    def add(self, kind: str, sequence: int, nbytes: int, start: Any, end: Any) -> None:
        """Keep an interval until its events have been reached."""
        self._pending.append(Interval(kind, sequence, nbytes, start, end))

    def settle(self) -> None:
        """Turn the intervals that are over into speeds."""
        # A stream's own intervals end in order; those of another may be over sooner, but will be no less so later.
        while self._pending:
            interval = self._pending[0]
            seconds = self._device.elapsed(interval.start, interval.end)
            if seconds is None:
                return
            self._pending.popleft()
            if self.trace:
                self.spans.append(interval)
            if interval.kind == "stall":
                self.stall_seconds += seconds * (1 if self.trace else _SAMPLED)
                continue
            before = self._per_byte.get(interval.kind)
            now = seconds / interval.nbytes
            self._per_byte[interval.kind] = now if before is None else before + _WEIGHT * (now - before)
            self.speeds = Speeds(**self._per_byte)
