"""A device that only pretends: it proves the order of operations, and tells the time that they would take.

Order. Every operation gets a vector clock when it is put on its stream, from the order of the host's calls and from the
events that the stream waited for. Two accesses to the same bytes, one of them a write, must be ordered by these clocks
(Lamport's happens-before; the epochs are those of Flanagan and Freund, "FastTrack", PLDI 2009). One run so proves every
interleaving of its streams. As an allocator does, the device hands freed memory out again at once.

Values. With a seed, the operations also run, in an order of the streams that is drawn at random: what is read must be
what was written. This finds faults of bookkeeping that are no races.

Time. An operation starts when the one before it on its stream has ended and all awaited events were reached.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from fusedrnn.offloading.accounts import Account
from fusedrnn.offloading.device import Span
from fusedrnn.offloading.simulated_memory import STREAMS, Access, Allocation, Event, Memory, Stream, View


class Deadlock(AssertionError):
    """Every stream waits for another."""


class Work(NamedTuple):
    """What a stream did from `start` to `end`, in seconds."""

    stream: str
    what: str
    start: float
    end: float


class SimulatedDevice:
    """See the top of this file.

    Args:
        seed: Draws the order in which operations run; None runs none and only keeps the time.
        memory: Bytes of device memory, None for as much as is asked for.
        bytes_per_second: Speed of the link in each direction.
        latency: Seconds that each copy takes in addition.
        disk_bytes_per_second: Speed of the disk in each direction.
        direct: Whether buffers go straight to a file, where there is one.
        trace: Whether `work` keeps what every stream did when.
        fail: Asked before every operation with its kind ("record", "wait", "copy", "allocate", "allocate_host",
            "allocate_disk", "write", "read"); where it returns True the operation fails.
    """

    def __init__(
        self,
        seed: int | None = None,
        memory: int | None = None,
        bytes_per_second: float = 50e9,
        latency: float = 0.0,
        disk_bytes_per_second: float = 3e9,
        direct: bool = False,
        trace: bool = False,
        fail: Callable[[str], bool] | None = None,
    ):
        self._random = None if seed is None else random.Random(seed)
        self._memory, self._speed, self._latency, self._fail = memory, bytes_per_second, latency, fail
        self._disk_speed, self.direct = disk_bytes_per_second, direct
        self._streams: list[Stream] = []
        self._host_time = 0.0
        self._host = [0] * STREAMS
        self._pools: dict[tuple[int, int], list[Memory]] = {}
        self.work: list[Work] | None = [] if trace else None
        self.current = self.new_stream("compute")
        self._accounts: dict[Any, Account] = {}
        self.capturing = False
        self.races: list[str] = []
        self.wrong: list[str] = []
        self.host_waits = self.disk_waits = self.operations = self.allocations = self.host_allocations = 0
        self.in_use = self.peak = self.host_in_use = self.host_peak = self.disk_in_use = 0

    # The protocol.

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return self.current

    def new_stream(self, name: str) -> Stream:
        """See `Device.new_stream`."""
        stream = Stream(name, len(self._streams))
        self._streams.append(stream)
        return stream

    def new_disk_stream(self, name: str) -> Stream:
        """See `Device.new_disk_stream`."""
        stream = self.new_stream(name)
        stream.disk = True
        return stream

    def record(self, stream: Stream, timed: bool = False) -> Event:
        """See `Device.record`."""
        self._may_fail("record")
        event = Event(self._tick(stream), stream.time, stream.disk, stream.error)
        stream.error = None
        self._put(stream, event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Device.wait`."""
        self._may_fail("wait")
        if event.disk and not stream.disk:
            self.synchronize(event)
            return
        stream.clock = list(map(max, stream.clock, event.clock))
        stream.time = max(stream.time, event.time)
        self._put(stream, (event,))

    def query(self, event: Event) -> bool:
        """See `Device.query`."""
        if self._random is None:
            return event.time <= self._host_time
        self.progress(self._random.randrange(3))
        if event.done:
            self._learn(event)
        return event.done

    def synchronize(self, event: Event) -> None:
        """See `Device.synchronize`."""
        if event.disk:
            self.disk_waits += 1
        else:
            self.host_waits += 1
        self._host_time = max(self._host_time, event.time)
        self._learn(event)
        while self._random is not None and not event.done:
            if not self._step():
                raise Deadlock("the host waits for an event that is never reached")

    def failure(self, event: Event) -> Exception | None:
        """See `Device.failure`."""
        return event.error

    def elapsed(self, start: Event, end: Event) -> float | None:
        """See `Device.elapsed`. Known at once, and never where operations run: there, time has no meaning."""
        return end.time - start.time if self._random is None else None

    def allocate(self, nbytes: int) -> Allocation:
        """See `Device.allocate`."""
        full = self._memory is not None and self.in_use + nbytes > self._memory
        if full or (self._fail is not None and self._fail("allocate")):
            raise torch.OutOfMemoryError("simulated")
        self.allocations += 1
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        pool = self._pools.get((self.current.index, nbytes))
        memory = pool.pop() if pool else Memory("device")
        memory.live = True
        return Allocation(self, memory, nbytes, self.current)

    def allocate_host(self, nbytes: int) -> Allocation | None:
        """See `Device.allocate_host`."""
        if self._fail is not None and self._fail("allocate_host"):
            return None
        self.host_allocations += 1
        self.host_in_use += nbytes
        self.host_peak = max(self.host_peak, self.host_in_use)
        return Allocation(self, Memory("host"), nbytes, self.current)

    def allocate_disk(self, folder: Any, nbytes: int) -> Allocation | None:
        """See `Device.allocate_disk`."""
        if self._fail is not None and self._fail("allocate_disk"):
            return None
        self.disk_in_use += nbytes
        return Allocation(self, Memory("disk"), nbytes, self.current)

    def copy(self, stream: Stream, target: Span, source: Span) -> None:
        """See `Device.copy`."""
        self._may_fail("copy")
        to, from_ = target.buffer.memory, source.buffer.memory
        what = "read" if from_.kind == "disk" else {"host": "spill", "disk": "write"}.get(to.kind, "fetch")
        if stream.disk and self._fail is not None and self._fail(what):
            stream.error = OSError(5, f"simulated failure of {what}")
            return
        size = source.stop - source.start

        def move() -> None:
            to.write(target.start, target.stop, from_.read(source.start, source.stop))

        # The closure must keep no allocation in use: a device does not either.
        target, source = target._replace(buffer=None), source._replace(buffer=None)
        reads, writes = [(from_, source.start, source.stop)], [(to, target.start, target.stop)]
        speed = self._disk_speed if stream.disk else self._speed
        self._run(stream, what, size / speed + self._latency, reads, writes, move)

    def record_stream(self, buffer: Allocation, stream: Stream) -> None:
        """See `Device.record_stream`; here, nobody adopts what others allocated."""

    def finish(self) -> None:
        """See `Device.finish`."""
        for stream in self._streams:
            self.synchronize(self.record(stream))

    def account(self, folder: Any = None) -> Account:
        """See `Device.account`: its own, since each device is a machine of its own."""
        return self._accounts.setdefault(folder, Account())

    def holders(self, buffer: Allocation) -> int:
        """See `Device.holders`."""
        return buffer.views

    def memory(self) -> int | None:
        """See `Device.memory`."""
        return self._memory

    def allocated(self) -> int:
        """See `Device.allocated`."""
        return self.in_use

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return self.capturing

    # What stands for the user's computation.

    def write(self, view: View, value: Any, seconds: float = 0.0) -> None:
        """Compute `value` into a buffer on the current stream."""
        memory, start, stop = view.allocation.memory, view.start, view.stop
        self._run(
            self.current, "compute", seconds, (), [(memory, start, stop)], lambda: memory.write(start, stop, value)
        )

    def read(self, view: View, value: Any, seconds: float = 0.0) -> None:
        """Compute from a buffer, which should hold `value`, on the current stream."""
        memory, start, stop = view.allocation.memory, view.start, view.stop

        def check() -> None:
            found = memory.read(start, stop)
            if found != value:
                self.wrong.append(f"read {found} where {value} was pushed")

        self._run(self.current, "consume", seconds, [(memory, start, stop)], (), check)

    def join(self, stream: Stream) -> None:
        """Compute on `stream` from now on, after all that the present one does."""
        self.wait(stream, self.record(self.current))
        self.current = stream

    # How operations run.

    def progress(self, steps: int) -> None:
        """Let some operations run."""
        for _ in range(steps):
            if not self._step():
                return

    def drain(self) -> None:
        """Let all operations run.

        Raises:
            Deadlock: If some cannot.
        """
        while self._random is not None and self._step():
            pass
        if any(stream.queue for stream in self._streams):
            raise Deadlock("streams wait for each other: " + ", ".join(s.name for s in self._streams if s.queue))

    def _may_fail(self, kind: str) -> None:
        if self._fail is not None and self._fail(kind):
            raise RuntimeError(f"simulated failure of {kind}")

    def _tick(self, stream: Stream) -> list[int]:
        clock = stream.clock = list(map(max, stream.clock, self._host))
        clock[stream.index] += 1
        self.operations += 1
        return clock.copy()

    def _learn(self, event: Event) -> None:
        self._host = list(map(max, self._host, event.clock))

    def _put(self, stream: Stream, operation: Any) -> None:
        if self._random is not None:
            stream.queue.append(operation)

    def _run(
        self,
        stream: Stream,
        what: str,
        seconds: float,
        reads: Iterable[tuple[Memory, int, int]],
        writes: Iterable[tuple[Memory, int, int]],
        run: Callable[[], None],
    ) -> None:
        clock = self._tick(stream)
        for memory, start, stop in reads:
            self._check(memory, Access(start, stop, stream.index, clock[stream.index], False, what), clock)
        for memory, start, stop in writes:
            self._check(memory, Access(start, stop, stream.index, clock[stream.index], True, what), clock)
        stream.time = max(stream.time, self._host_time)
        if self.work is not None:
            self.work.append(Work(stream.name, what, stream.time, stream.time + seconds))
        stream.time += seconds
        self._put(stream, run)

    def _check(self, memory: Memory, access: Access, clock: list[int]) -> None:
        if not memory.live:
            self.races.append(f"{access.what} of freed {memory.kind} memory")
        kept = []
        for before in memory.accesses:
            apart = before.stop <= access.start or before.start >= access.stop
            ordered = clock[before.stream] >= before.epoch
            if not apart and not ordered and (before.write or access.write):
                self.races.append(f"{before.what} and {access.what} of the same {memory.kind} memory are not ordered")
            # What comes after a write that comes after `before` comes after `before`.
            covered = access.start <= before.start and before.stop <= access.stop
            superseded = access.write or (not before.write and before.stream == access.stream)
            if not (covered and ordered and superseded):
                kept.append(before)
        kept.append(access)
        memory.accesses = kept

    def _free(self, allocation: Allocation) -> None:
        memory = allocation.memory
        if memory.kind != "device":
            # It goes back to the system: all that used it must be known to be over.
            clock = self._host
            if memory.kind == "host":
                self.host_in_use -= allocation.nbytes
            else:
                self.disk_in_use -= allocation.nbytes
        else:
            # The allocator may hand it to its stream from here on.
            clock = allocation.home.clock
            self.in_use -= allocation.nbytes
            self._pools.setdefault((allocation.home.index, allocation.nbytes), []).append(memory)
        memory.live = False
        for access in memory.accesses:
            if access.epoch > max(clock[access.stream], self._host[access.stream]):
                self.races.append(f"{memory.kind} memory freed while a {access.what} may use it")

    def _step(self) -> bool:
        """Run one operation of a stream that can; return whether there was one."""
        assert self._random is not None
        able = [s for s in self._streams if s.queue and not (isinstance(s.queue[0], tuple) and not s.queue[0][0].done)]
        if not able:
            return False
        operation = self._random.choice(able).queue.popleft()
        if isinstance(operation, Event):
            operation.done = True
        elif not isinstance(operation, tuple):
            operation()
        return True
