"""The protocol between the scheduler and a device, and the two devices on which real bytes move."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedrnn.offloading.accelerators import copy_stream, empty_bytes, is_accelerator, is_capturing, missing
from fusedrnn.offloading.accounts import Account, process_account
from fusedrnn.offloading.config import process_memory
from fusedrnn.offloading.disk import Extent, new_extent
from fusedrnn.offloading.threads import Span, ThreadEvent, ThreadStream

__all__ = ["AcceleratorDevice", "Device", "Span", "ThreadDevice", "device_for", "is_capturing", "storage_holders"]


class Device(Protocol):
    """Streams, events, buffers and copies of one device.

    Work on a stream runs in the order in which it was put there. An event marks a point of a stream; another stream
    that waits for it runs nothing further until that point is reached, and the host does not wait. Buffers are
    uint8 and one-dimensional; one that is no longer referenced may be handed out again at once to the stream on
    which it was allocated, whatever other streams still do with it.

    Files are read and written by streams of their own, which are threads. They wait for any event; where another stream
    is to wait for one of theirs and cannot, the host does.
    """

    direct: bool
    """Whether its memory is the host's, so that buffers go from the device straight to a file."""

    def current_stream(self) -> Any:
        """Return the stream on which the calling thread computes."""

    def new_stream(self, name: str) -> Any:
        """Return a stream for copies."""

    def new_disk_stream(self, name: str) -> Any:
        """Return a stream for copies from and to files."""

    def record(self, stream: Any, timed: bool = False) -> Any:
        """Return an event at the present end of `stream`; only a timed one has a time."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is put on `stream` from now on run after `event`."""

    def query(self, event: Any) -> bool:
        """Return whether `event` has been reached."""

    def synchronize(self, event: Any) -> None:
        """Block the host until `event` has been reached."""

    def failure(self, event: Any) -> Exception | None:
        """Return what went wrong with the copy from or to a file that came before `event`, which was reached."""

    def elapsed(self, start: Any, end: Any) -> float | None:
        """Return the seconds from one timed event to another, or None while that is not known."""

    def allocate(self, nbytes: int) -> Any:
        """Return a device buffer that belongs to the current stream.

        Raises:
            torch.OutOfMemoryError: If the device has no room.
        """

    def allocate_host(self, nbytes: int) -> Any | None:
        """Return a pinned host buffer, or None where none can be had."""

    def allocate_disk(self, folder: str | os.PathLike[str], nbytes: int) -> Any | None:
        """Return a buffer in a file of the folder's file system, or None where it has no room."""

    def copy(self, stream: Any, target: Span, source: Span) -> None:
        """Copy bytes on `stream`."""

    def record_stream(self, buffer: Any, stream: Any) -> None:
        """Let a buffer that others allocated return to its allocator after what is on `stream` now."""

    def finish(self) -> None:
        """Block the host until all that was put on any stream of the device has run."""

    def account(self, folder: str | os.PathLike[str] | None = None) -> Account:
        """Return what counts the pinned memory of all offloaders together, or the files where `folder` is."""

    def holders(self, buffer: Any) -> int:
        """Return how many tensors besides `buffer` itself share its memory."""

    def memory(self) -> int | None:
        """Return the bytes of device memory that this process may use, None where there is no limit."""

    def allocated(self) -> int:
        """Return the bytes of device memory in use."""

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph, so that nothing may be asked of it or allocated."""


def storage_holders(buffer: Tensor) -> int:
    """Return how many tensors besides `buffer` share its storage."""
    storage = buffer.untyped_storage()
    # One count is the tensor's, one the storage object's that was made to ask.
    return torch._C._storage_Use_Count(storage._cdata) - 2


def _failure(event: Any) -> Exception | None:
    return getattr(event, "error", None)


_FRESH = 0.05
"""Seconds for which what others take of a device is believed."""


def device_for(device: torch.device) -> "AcceleratorDevice | None":
    """Return who copies to and from a device; None for the CPU, and for what has no streams, events or pinned memory.

    Not while its stream records a graph: the first call for a device tries them.
    """
    if not is_accelerator(device):
        return None
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return None if missing(device) else AcceleratorDevice(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation on the host failed for want of memory, and not since the device is broken."""
    words = str(error).partition("\n")[0].lower()
    return any(
        word in words for word in ("out of memory", "allocate", "out of host memory", "enough memory", "os call")
    )


class AcceleratorDevice:
    """A device of torch with streams, events and pinned memory: CUDA, ROCm, XPU and their like.

    What not every kind has is asked in `is_capturing`, `is_integrated`, and in `memory` and `allocated`.
    """

    direct = False

    def __init__(self, device: torch.device):
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._module = torch.get_device_module(self.device)
        self._free_and_total = getattr(self._module, "mem_get_info", torch.accelerator.get_memory_info)
        self._total = int(self._free_and_total(self.device)[1])
        self._others = (float("-inf"), 0)
        """When what others take was asked, and how many bytes."""
        self._anchor: tuple[torch.Event, float] | None = None
        """An event, and the threads' time when it was reached, where there are threads."""

    def current_stream(self) -> torch.Stream:
        """See `Device.current_stream`."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self, name: str) -> torch.Stream:
        """See `Device.new_stream`; those of one name are one stream."""
        return copy_stream(self.device, name)

    def new_disk_stream(self, name: str) -> ThreadStream:
        """See `Device.new_disk_stream`."""
        if self._anchor is None:
            event = torch.Event(self.device, enable_timing=True)
            event.record(self.current_stream())
            event.synchronize()
            self._anchor = event, time.perf_counter()
        return ThreadStream(name)

    def record(self, stream: torch.Stream | ThreadStream, timed: bool = False) -> torch.Event | ThreadEvent:
        """See `Device.record`."""
        if isinstance(stream, ThreadStream):
            return stream.record()
        # Threads wait for it without turning round and round.
        event = torch.Event(self.device, enable_timing=timed, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream | ThreadStream, event: torch.Event | ThreadEvent) -> None:
        """See `Device.wait`."""
        if isinstance(stream, ThreadStream):
            stream.wait(event)
        elif isinstance(event, ThreadEvent):
            event.synchronize()
        else:
            stream.wait_event(event)

    def query(self, event: torch.Event | ThreadEvent) -> bool:
        """See `Device.query`."""
        return event.query()

    def synchronize(self, event: torch.Event | ThreadEvent) -> None:
        """See `Device.synchronize`."""
        event.synchronize()

    def failure(self, event: torch.Event | ThreadEvent) -> Exception | None:
        """See `Device.failure`."""
        return _failure(event)

    def elapsed(self, start: torch.Event | ThreadEvent, end: torch.Event | ThreadEvent) -> float | None:
        """See `Device.elapsed`."""
        if not (start.query() and end.query()):
            return None
        if isinstance(start, torch.Event) and isinstance(end, torch.Event):
            return start.elapsed_time(end) / 1e3
        return self._time(end) - self._time(start)

    def _time(self, event: torch.Event | ThreadEvent) -> float:
        """Return when an event was reached, on the clock of the threads."""
        if isinstance(event, ThreadEvent):
            return event.time
        assert self._anchor is not None
        anchor, seconds = self._anchor
        return seconds + anchor.elapsed_time(event) / 1e3

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`."""
        return empty_bytes(nbytes, self.device)

    def allocate_host(self, nbytes: int) -> Tensor | None:
        """See `Device.allocate_host`.

        Raises:
            RuntimeError: If it failed for another reason than want of memory.
        """
        try:
            return empty_bytes(nbytes, torch.device("cpu"), pin=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The failure stays with the device's runtime and would be reported by whatever is launched next.
            with contextlib.suppress(RuntimeError):
                empty_bytes(1, self.device).zero_()
            return None

    def allocate_disk(self, folder: str | os.PathLike[str], nbytes: int) -> Extent | None:
        """See `Device.allocate_disk`."""
        return new_extent(folder, nbytes)

    def copy(self, stream: torch.Stream | ThreadStream, target: Span, source: Span) -> None:
        """See `Device.copy`."""
        if isinstance(stream, ThreadStream):
            stream.copy(target, source)
            return
        with stream:
            target.buffer[target.start : target.stop].copy_(
                source.buffer[source.start : source.stop], non_blocking=True
            )

    def record_stream(self, buffer: Tensor, stream: torch.Stream) -> None:
        """See `Device.record_stream`."""
        buffer.record_stream(stream)

    def finish(self) -> None:
        """See `Device.finish`."""
        torch.accelerator.synchronize(self.device)

    def account(self, folder: str | os.PathLike[str] | None = None) -> Account:
        """See `Device.account`."""
        return process_account(folder)

    def holders(self, buffer: Tensor) -> int:
        """See `Device.holders`."""
        return storage_holders(buffer)

    def memory(self) -> int:
        """See `Device.memory`: all of it, or the fraction that torch lets this process have."""
        try:
            return int(self._total * self._module.get_per_process_memory_fraction(self.device))
        except (AttributeError, RuntimeError):
            # Devices and allocators that know no such fraction.
            return self._total

    def allocated(self) -> int:
        """See `Device.allocated`: all that is not free, for whomever it is, without what torch only holds in reserve.

        Of what others have, as much counts as leaves this process less than its fraction.
        """
        try:
            # memory_allocated() flattens a hundred counters first, which takes several times as long.
            counters = self._module.memory_stats_as_nested_dict(self.device)
            ours, reserved = (counters[name]["all"]["current"] for name in ("allocated_bytes", "reserved_bytes"))
        except (AttributeError, KeyError, RuntimeError):
            # Other allocators keep no such counters.
            free, total = self._free_and_total(self.device)
            return int(total - free)
        now = time.monotonic()
        if now - self._others[0] >= _FRESH:
            free, total = self._free_and_total(self.device)
            self._others = now, int(total - free - reserved)
        return int(ours + max(0, self._others[1] - (self._total - self.memory())))

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return is_capturing(self.device)


class ThreadDevice:
    """A device made of threads, for machines without another: every copy stream is a thread that really copies.

    The calling thread is the compute stream: what it does is done when it returns, and where it waits for an event it
    stops. Everything else behaves as on a GPU.

    Args:
        delay: Seconds by which each copy is delayed, asked before each; for tests.
        direct: Whether buffers go straight to a file, where there is one; for tests.
    """

    _CALLER = "caller"

    def __init__(self, delay: Callable[[], float] | None = None, direct: bool = True):
        self._delay, self.direct = delay, direct
        self._total = process_memory()

    def current_stream(self) -> str:
        """See `Device.current_stream`."""
        return self._CALLER

    def new_stream(self, name: str) -> ThreadStream:
        """See `Device.new_stream`."""
        return ThreadStream(name, self._delay)

    def new_disk_stream(self, name: str) -> ThreadStream:
        """See `Device.new_disk_stream`."""
        return ThreadStream(name, self._delay)

    def record(self, stream: Any, timed: bool = False) -> ThreadEvent:
        """See `Device.record`."""
        if stream is not self._CALLER:
            return stream.record()
        event = ThreadEvent()
        event.reach()
        return event

    def wait(self, stream: Any, event: ThreadEvent) -> None:
        """See `Device.wait`."""
        if stream is self._CALLER:
            event.synchronize()
        elif not event.query():
            stream.wait(event)

    def query(self, event: ThreadEvent) -> bool:
        """See `Device.query`."""
        return event.query()

    def synchronize(self, event: ThreadEvent) -> None:
        """See `Device.synchronize`."""
        event.synchronize()

    def failure(self, event: ThreadEvent) -> Exception | None:
        """See `Device.failure`."""
        return _failure(event)

    def elapsed(self, start: ThreadEvent, end: ThreadEvent) -> float | None:
        """See `Device.elapsed`."""
        return end.time - start.time if start.query() and end.query() else None

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device.allocate`."""
        return empty_bytes(nbytes, torch.device("cpu"))

    def allocate_host(self, nbytes: int) -> Tensor | None:
        """See `Device.allocate_host`."""
        try:
            return empty_bytes(nbytes, torch.device("cpu"))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def allocate_disk(self, folder: str | os.PathLike[str], nbytes: int) -> Extent | None:
        """See `Device.allocate_disk`."""
        return new_extent(folder, nbytes)

    def copy(self, stream: ThreadStream, target: Span, source: Span) -> None:
        """See `Device.copy`."""
        stream.copy(target, source)

    def record_stream(self, buffer: Tensor, stream: Any) -> None:
        """See `Device.record_stream`: the host waits before it lets go of memory."""

    def finish(self) -> None:
        """See `Device.finish`: what the caller did is done."""

    def account(self, folder: str | os.PathLike[str] | None = None) -> Account:
        """See `Device.account`."""
        return process_account(folder)

    def holders(self, buffer: Tensor) -> int:
        """See `Device.holders`."""
        return storage_holders(buffer)

    def memory(self) -> int:
        """See `Device.memory`."""
        return self._total

    def allocated(self) -> int:
        """See `Device.allocated`."""
        # Without the pages of mapped files, which the system can drop.
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return False
