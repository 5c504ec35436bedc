"""Streams that are threads: they copy where no device does it, between host memory and files."""

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fusedrnn.offloading.disk import Extent

_THREAD = threading.local()


def is_copy_thread() -> bool:
    """Return whether the calling thread is one of these streams."""
    return hasattr(_THREAD, "copies")


class Span(NamedTuple):
    """Bytes `start` to `stop` of a buffer."""

    buffer: Any
    start: int
    stop: int


class ThreadEvent:
    """A point of a stream: set by its thread, with the time and what went wrong with the copy before it."""

    __slots__ = ("_ahead", "_reached", "error", "time")

    def __init__(self) -> None:
        # Held until it is reached. There may be many of these, and a threading.Event takes a kilobyte.
        self._ahead = threading.Lock()
        self._ahead.acquire()
        self._reached = False
        self.time = 0.0
        self.error: Exception | None = None

    def reach(self, error: Exception | None = None) -> None:
        """Let those who wait go on."""
        self.time, self.error = time.perf_counter(), error
        self._reached = True
        self._ahead.release()

    def query(self) -> bool:
        """Return whether it has been reached."""
        return self._reached

    def synchronize(self) -> None:
        """Wait for it. What went wrong before it is for those to see who ask for `error`: waiting only orders work."""
        if not self._reached:
            with self._ahead:
                pass


class ThreadStream:
    """A queue whose operations a thread of its own runs in order, each after `delay()` seconds."""

    def __init__(self, name: str, delay: Callable[[], float] | None = None):
        self._queue: queue.SimpleQueue[Callable[[], None] | ThreadEvent | None] = queue.SimpleQueue()
        # The thread must not hold the stream, or it would never end.
        thread = threading.Thread(target=_work, args=(self._queue, delay), name=f"fusedrnn-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def record(self) -> ThreadEvent:
        """Return an event at the present end of the queue."""
        event = ThreadEvent()
        self._queue.put(event)
        return event

    def wait(self, event: Any) -> None:
        """Let the thread wait for an event of this or of another kind."""
        self._queue.put(event.synchronize)

    def copy(self, target: Span, source: Span) -> None:
        """Copy bytes between host memory and files."""
        self._queue.put(lambda: _copy(target, source))


def _work(operations: "queue.SimpleQueue[Any]", delay: Callable[[], float] | None) -> None:
    _THREAD.copies = True
    error: Exception | None = None
    while (operation := operations.get()) is not None:
        if isinstance(operation, ThreadEvent):
            # The first event after a copy is its own.
            operation.reach(error)
            error = None
            continue
        if delay is not None:
            time.sleep(delay())
        try:
            operation()
        except Exception as raised:
            error = error or raised


def _copy(target: Span, source: Span) -> None:
    nbytes = source.stop - source.start
    if isinstance(target.buffer, Extent):
        target.buffer.write(target.start, _address(source), nbytes)
    elif isinstance(source.buffer, Extent):
        source.buffer.read(source.start, _address(target), nbytes)
    else:
        ctypes.memmove(_address(target), _address(source), nbytes)


def _address(span: Span) -> int:
    # Unlike Tensor.copy_ this makes no view, which `holders` would count, and holds no interpreter lock.
    buffer: Tensor = span.buffer
    return buffer.data_ptr() + span.start
