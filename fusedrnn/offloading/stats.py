"""What a scheduler counts, measures, and says of its decisions."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusedrnn._checks import size
from fusedrnn.offloading.device import Device
from fusedrnn.offloading.policy import Speeds

_WEIGHT = 0.25
_SAMPLED = 8
_DECISIONS = 256
_SPANS = 1 << 16


@dataclass
class Counters:
    """What happened since the scheduler was made.

    pushes = eligible + skipped, and pushes = released + dropped + those that live. Every spill is of a buffer that is
    loaded, forwarded (read while still on the device) or ended unread.

    Args:
        pushes: Buffers that were pushed or adopted.
        eligible: Those of them that may go to the host.
        skipped: Tensors that may not, by reason.
        spills: Copies to the host.
        spilled_bytes: Their bytes.
        forwarded: Buffers that were read while still on the device although they had been spilled.
        loads: Copies back.
        loaded_bytes: Their bytes.
        prefetch_hits: Reads of buffers that had been fetched ahead.
        demand_loads: Reads that had to ask for the copy back.
        unprefetched: Buffers fetched ahead that had to make way for others.
        released: Buffers given back after their last read.
        dropped: Buffers given back because nobody refers to them any more.
        ring_waits: Slots that were taken over from a copy still under way.
        ring_grown: Slots beyond the ring's bound, since nothing could make way.
        host_full: Spills for which the host had no room.
        device_failures: Allocations that the device refused.
        pinned_by_alias: Times that a tensor was passed over, since a copy would free nothing while it is referred to.
        shared: Saved tensors whose storage had been saved before.
        gathered: Small tensors gathered into larger copies.
        gatherings: Those copies.
        changed_in_place: Saved tensors found changed when they were read.
        occupancy_asked: How often the source of the occupancy was asked.
        occupancy_peak: The highest that it said.
        stall_seconds: Time that readers waited for their buffers on the device, measured on a sample of them.
        device_peak: Most bytes of device memory in the ring.
        host_peak: Most bytes of pinned memory in use.
        disk_writes: Buffers written to files; on the CPU the same as `spills`.
        disk_written_bytes: Their bytes.
        disk_reads: Buffers read from there; on the CPU the same as `loads`.
        disk_read_bytes: Their bytes.
        disk_peak: Most bytes of files in use.
        disk_full: Buffers for which the files had no room.
        disk_failures: Buffers that could not be written, and stayed in memory, or could not be read.
        disk_waits: Times that the host waited for a write or a read, where buffers go there by way of the host.
        disk_wait_seconds: How long.
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
    device_peak: int = 0
    host_peak: int = 0
    disk_writes: int = 0
    disk_written_bytes: int = 0
    disk_reads: int = 0
    disk_read_bytes: int = 0
    disk_peak: int = 0
    disk_full: int = 0
    disk_failures: int = 0
    disk_waits: int = 0
    disk_wait_seconds: float = 0.0

    def skip(self, reason: str) -> None:
        """Count a buffer that cannot be offloaded."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def add_up(parts: Iterable[Counters]) -> Counters:
    """Return the counters of several devices as one: sums, but for the highest occupancy."""
    total = Counters()
    for part in parts:
        for name, value in vars(part).items():
            if name == "skipped":
                for reason, count in value.items():
                    total.skipped[reason] = total.skipped.get(reason, 0) + count
            elif name == "occupancy_peak":
                total.occupancy_peak = max(total.occupancy_peak, value)
            else:
                setattr(total, name, getattr(total, name) + value)
    return total


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

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the seconds between two events that have been reached."""
        seconds = self._device.elapsed(start, end)
        assert seconds is not None
        return seconds

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


_KINDS = {
    "compute": ("compute", "forward"),
    "consume": ("compute", "backward"),
    "stall": ("compute", "waits for"),
    "spill": ("to the host", "spill"),
    "fetch": ("from the host", "fetch"),
}
"""For each kind of interval its row of the trace and its name."""
_DISK_KINDS = {"write": ("to the disk", "write"), "read": ("from the disk", "read")}
_DIRECT_KINDS = {"spill": _DISK_KINDS["write"], "fetch": _DISK_KINDS["read"]}


def trace_events(
    recorder: Recorder, process: int, name: str, disk: bool = False, direct: bool = False
) -> list[dict[str, Any]]:
    """Return the intervals that are over as events of the trace-event format, one row per stream.

    The format is that of Chrome's and Perfetto's trace viewers ("Trace Event Format", times in microseconds).

    Args:
        recorder: Who measured them.
        process: Number of the process in the trace.
        name: Its name.
        disk: Whether buffers go from the host to files.
        direct: Whether they go from the device to files.
    """
    kinds = _KINDS | (_DIRECT_KINDS if direct else _DISK_KINDS if disk else {})
    rows = list(dict.fromkeys(row for row, _ in kinds.values()))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
        *(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": word}}
            for row, word in enumerate(rows)
        ),
    ]
    spans = list(recorder.spans)
    starts = [recorder.elapsed(spans[0].start, span.start) for span in spans]
    for span, start in zip(spans, starts, strict=True):
        events.append(
            {
                "ph": "X",
                "name": f"{kinds[span.kind][1]} {span.sequence}",
                "cat": span.kind,
                "pid": process,
                "tid": rows.index(kinds[span.kind][0]),
                "ts": (start - min(starts)) * 1e6,
                "dur": recorder.elapsed(span.start, span.end) * 1e6,
                "args": {"bytes": span.nbytes},
            }
        )
    return events


HELD = (
    "a copy of what somebody still refers to would free nothing. A module compiled as one graph holds all that it "
    "saves until it returns, and a loop all outputs that it collects: compile blocks one by one, keep no list of what "
    "is saved, or keep less (`save`, checkpointing)"
)


def skips(counters: Counters) -> str:
    """Return in words what was not moved, and why."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counters.skipped.items()))


def describe(counters: Counters, decisions: Iterable[tuple[int, str, int, str]] = ()) -> str:
    """Return in words what the counters say, and the latest decisions."""
    c = counters
    lines = [
        f"{c.eligible} of {c.pushes} buffers may go to the host; {c.spills} did ({size(c.spilled_bytes)}), of which "
        f"{c.forwarded} were read before they had left the device",
        f"{c.loads} came back ({size(c.loaded_bytes)}): {c.prefetch_hits} had been fetched ahead, "
        f"{c.demand_loads} had to be asked for",
        f"occupancy was asked {c.occupancy_asked} times and reached {c.occupancy_peak:.2f}; at most "
        f"{size(c.device_peak)} in the ring and {size(c.host_peak)} on the host",
    ]
    if c.disk_writes or c.disk_full or c.disk_failures:
        lines.append(
            f"{c.disk_writes} were written to files ({size(c.disk_written_bytes)}, at most {size(c.disk_peak)} at a "
            f"time) and {c.disk_reads} read from there ({size(c.disk_read_bytes)})"
        )
    if c.disk_waits:
        lines.append(f"the host waited {c.disk_waits} times for the disk, {c.disk_wait_seconds:.3g} s")
    if c.skipped:
        lines.append(f"not moved: {skips(c)}")
    for word, count in (
        ("spills found the host full", c.host_full),
        ("buffers found no room in files", c.disk_full),
        ("buffers could not be written to files or read from there", c.disk_failures),
        ("allocations were refused by the device", c.device_failures),
        ("slots had to be added to the ring", c.ring_grown),
    ):
        if count:
            lines.append(f"{count} {word}")
    if c.pinned_by_alias:
        lines.append(f"{c.pinned_by_alias} times a tensor was passed over, since somebody else refers to it: {HELD}")
    if c.stall_seconds:
        lines.append(f"readers waited {c.stall_seconds:.3g} s for their buffers")
    lines += [f"  {action} {sequence} ({size(nbytes)}): {why}" for sequence, action, nbytes, why in decisions]
    return "\n".join(lines)
