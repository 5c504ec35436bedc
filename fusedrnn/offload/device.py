"""The protocol between the scheduler and a device, and the two devices on which real bytes move."""

import contextlib
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Span(NamedTuple):
    """Bytes `start` to `stop` of a buffer."""

    buffer: Any
    start: int
    stop: int


class Device(Protocol):
    """Streams, events, buffers and copies of one device.

    Work on a stream runs in the order in which it was put there. An event marks a point of a stream; another stream
    that waits for it runs nothing further until that point is reached, and the host does not wait. Buffers are
    uint8 and one-dimensional; one that is no longer referenced may be handed out again at once to the stream on
    which it was allocated, whatever other streams still do with it.
    """

    def current_stream(self) -> Any:
        """Return the stream on which the calling thread computes."""

    def new_stream(self, name: str) -> Any:
        """Return a stream for copies."""

    def record(self, stream: Any, timed: bool = False) -> Any:
        """Return an event at the present end of `stream`; only a timed one has a time."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is put on `stream` from now on run after `event`."""

    def query(self, event: Any) -> bool:
        """Return whether `event` has been reached."""

    def synchronize(self, event: Any) -> None:
        """Block the host until `event` has been reached."""

    def elapsed(self, start: Any, end: Any) -> float | None:
        """Return the seconds from one timed event to another, or None while that is not known."""

    def allocate(self, nbytes: int) -> Any:
        """Return a device buffer that belongs to the current stream.

        Raises:
            torch.OutOfMemoryError: If the device has no room.
        """

    def allocate_host(self, nbytes: int) -> Any | None:
        """Return a pinned host buffer, or None where none can be had."""

    def copy(self, stream: Any, target: Span, source: Span) -> None:
        """Copy bytes on `stream`."""

    def holders(self, buffer: Any) -> int:
        """Return how many tensors besides `buffer` itself share its memory."""

    def memory(self) -> int | None:
        """Return the bytes of device memory that this process may use, None where that has no meaning."""

    def allocated(self) -> int:
        """Return the bytes of device memory in use."""

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph, so that nothing may be asked of it or allocated."""


def _empty(nbytes: int, device: torch.device, pin: bool = False) -> Tensor:
    # A tensor made under inference_mode could never be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def storage_holders(buffer: Tensor) -> int:
    """Return how many tensors besides `buffer` share its storage."""
    storage = buffer.untyped_storage()
    # One count is the tensor's, one the storage object's that was made to ask.
    return torch._C._storage_Use_Count(storage._cdata) - 2


class CudaDevice:
    """A CUDA device: streams, events and pinned memory of torch."""

    def __init__(self, device: torch.device):
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._total = torch.cuda.get_device_properties(self.device).total_memory

    def current_stream(self) -> torch.cuda.Stream:
        """See `Device.current_stream`."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self, name: str) -> torch.cuda.Stream:
        """See `Device.new_stream`."""
        return torch.cuda.Stream(self.device)

    def record(self, stream: torch.cuda.Stream, timed: bool = False) -> torch.cuda.Event:
        """See `Device.record`."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `Device.wait`."""
        stream.wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        """See `Device.query`."""
        return event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See `Device.synchronize`."""
        event.synchronize()

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """See `Device.elapsed`."""
        return start.elapsed_time(end) / 1e3 if start.query() and end.query() else None

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`."""
        return _empty(nbytes, self.device)

    def allocate_host(self, nbytes: int) -> Tensor | None:
        """See `Device.allocate_host`."""
        try:
            return _empty(nbytes, torch.device("cpu"), pin=True)
        except RuntimeError:
            # The failure stays with the CUDA runtime and would be reported by whatever is launched next.
            with contextlib.suppress(RuntimeError):
                _empty(1, self.device).zero_()
            return None

    def copy(self, stream: torch.cuda.Stream, target: Span, source: Span) -> None:
        """See `Device.copy`."""
        with torch.cuda.stream(stream):
            target.buffer[target.start : target.stop].copy_(
                source.buffer[source.start : source.stop], non_blocking=True
            )

    def holders(self, buffer: Tensor) -> int:
        """See `Device.holders`."""
        return storage_holders(buffer)

    def memory(self) -> int:
        """See `Device.memory`."""
        return int(self._total * torch.cuda.get_per_process_memory_fraction(self.device))

    def allocated(self) -> int:
        """See `Device.allocated`."""
        # memory_allocated() flattens a hundred counters first, which takes several times as long.
        counters = torch.cuda.memory_stats_as_nested_dict(self.device)
        return counters["allocated_bytes"]["all"]["current"] if counters else 0

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()


class _ThreadEvent:
    """A point of a stream: set by its thread, with the time and the error that came before it."""

    __slots__ = ("_reached", "error", "time")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.time = 0.0
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None = None) -> None:
        self.time, self.error = time.perf_counter(), error
        self._reached.set()

    def reached(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait()
        if self.error is not None:
            raise self.error


class _ThreadStream:
    """A queue whose operations a thread of its own runs in order, each after `delay()` seconds."""

    def __init__(self, name: str, delay: Callable[[], float] | None):
        self.queue: queue.SimpleQueue[Callable[[], None] | _ThreadEvent | None] = queue.SimpleQueue()
        # The thread must not hold the stream, or it would never end.
        thread = threading.Thread(target=_work, args=(self.queue, delay), name=f"fusedrnn-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, self.queue.put, None).atexit = False


def _work(operations: "queue.SimpleQueue[Any]", delay: Callable[[], float] | None) -> None:
    error: BaseException | None = None
    while (operation := operations.get()) is not None:
        if isinstance(operation, _ThreadEvent):
            operation.reach(error)
            continue
        if delay is not None:
            time.sleep(delay())
        try:
            operation()
        except BaseException as raised:
            # Not lost: whoever waits for a later event of this stream gets it.
            error = raised


class ThreadDevice:
    """A device made of threads, for machines without another: every copy stream is a thread that really copies.

    The calling thread is the compute stream: what it does is done when it returns, and where it waits for an event it
    stops. Everything else behaves as on a GPU.

    Args:
        delay: Seconds by which each copy is delayed, asked before each; for tests.
    """

    _CALLER = "caller"

    def __init__(self, delay: Callable[[], float] | None = None):
        self._delay = delay

    def current_stream(self) -> str:
        """See `Device.current_stream`."""
        return self._CALLER

    def new_stream(self, name: str) -> _ThreadStream:
        """See `Device.new_stream`."""
        return _ThreadStream(name, self._delay)

    def record(self, stream: Any, timed: bool = False) -> _ThreadEvent:
        """See `Device.record`."""
        event = _ThreadEvent()
        if stream is self._CALLER:
            event.reach()
        else:
            stream.queue.put(event)
        return event

    def wait(self, stream: Any, event: _ThreadEvent) -> None:
        """See `Device.wait`."""
        if stream is self._CALLER:
            event.wait()
        elif not event.reached() or event.error is not None:
            stream.queue.put(event.wait)

    def query(self, event: _ThreadEvent) -> bool:
        """See `Device.query`."""
        return event.reached()

    def synchronize(self, event: _ThreadEvent) -> None:
        """See `Device.synchronize`."""
        event.wait()

    def elapsed(self, start: _ThreadEvent, end: _ThreadEvent) -> float | None:
        """See `Device.elapsed`."""
        return end.time - start.time if start.reached() and end.reached() else None

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`."""
        return _empty(nbytes, torch.device("cpu"))

    def allocate_host(self, nbytes: int) -> Tensor | None:
        """See `Device.allocate_host`."""
        try:
            return _empty(nbytes, torch.device("cpu"))
        except RuntimeError:
            return None

    def copy(self, stream: _ThreadStream, target: Span, source: Span) -> None:
        """See `Device.copy`."""

        def move(target: Span = target, source: Span = source) -> None:
            # Unlike Tensor.copy_ this makes no view, which `holders` would count, and holds no interpreter lock.
            to, from_ = target.buffer.data_ptr() + target.start, source.buffer.data_ptr() + source.start
            ctypes.memmove(to, from_, source.stop - source.start)

        stream.queue.put(move)

    def holders(self, buffer: Tensor) -> int:
        """See `Device.holders`."""
        return storage_holders(buffer)

    def memory(self) -> None:
        """See `Device.memory`."""
        return None

    def allocated(self) -> int:
        """See `Device.allocated`."""
        return 0

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return False
