"""Offloading as a layer sees it: an offloader, one stack per call, slots and handles."""

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedrnn.offloading.accelerators import is_capturing, is_integrated, missing
from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.device import Device, ThreadDevice, device_for
from fusedrnn.offloading.entry import Entry
from fusedrnn.offloading.forks import reset_after_fork
from fusedrnn.offloading.resident import ResidentStack
from fusedrnn.offloading.ring import Slot
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.stats import Counters, add_up, describe, skips


class ReservedSlot:
    """A device buffer to be filled; it goes back by itself if it is never pushed."""

    def __init__(self, scheduler: Scheduler, nbytes: int):
        self.slot: Slot | None = None
        """Set by the scheduler."""
        self._scheduler, self.nbytes = scheduler, nbytes
        scheduler.reserve(nbytes, self)
        assert self.slot is not None
        self.buffer: Any = self.slot.buffer[:nbytes]
        """uint8 [nbytes]; the current stream may write it, until it is pushed."""

    def push(self) -> "OffloadHandle":
        """Take the content as final on the current stream, and return its handle."""
        if self.slot is None:
            raise RuntimeError("the slot was pushed before: `reserve` another")
        self.buffer = None
        handle = OffloadHandle(self._scheduler)
        self._scheduler.push(self, self.nbytes, handle)
        return handle

    def __del__(self) -> None:
        if self.slot is not None:
            # The view would count as somebody else's.
            self.buffer = None
            self._scheduler.abandon(self.slot)


def adopt(scheduler: Scheduler, source: Tensor, buffer: Tensor) -> "OffloadHandle":
    """Return the handle of a tensor that somebody else made; see `Scheduler.adopt`."""
    handle = OffloadHandle(scheduler)
    scheduler.adopt(source, buffer, handle)
    return handle


class OffloadHandle:
    """A pushed buffer. It is given back by `release`, or when the last reference to its handle goes.

    It is made before there is anything to hold, so that no interrupt comes between a push and its handle.
    """

    __slots__ = ("__weakref__", "_scheduler", "entry")

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.entry: Entry = None  # type: ignore[assignment]
        """Set by the scheduler."""

    def get(self, writable: bool = False) -> Any:
        """Return the buffer with the content that was pushed, uint8 [nbytes], safe to be read on the current stream.

        It may be called again, on any stream, while the handle is not released. The memory stays in place while a
        tensor refers to it. Where a graph is kept, let go of the tensor after use: only then can the
        buffer make way for others.

        Args:
            writable: Whether the buffer will be overwritten, as the last thing before `release`. The current stream
                then also waits for a copy to the host that still reads the buffer (one that was on its way when it was
                asked for again). What a later `get` would return is undefined.

        Raises:
            RuntimeError: If the handle was released.
        """
        return self._scheduler.get(self.entry, writable)

    def release(self) -> None:
        """Give the buffer back once everything put on the current stream so far has run; more than once does no harm.

        Tensors that `get` returned must not be used any more.
        """
        self._scheduler.release(self.entry)

    def keep(self) -> None:
        """Leave the buffer on the device, if it is there still."""
        self._scheduler.keep(self.entry)

    def is_changed(self) -> bool:
        """Return whether it was adopted, and the user changed it in place since."""
        return self.entry.is_changed()

    def is_adopted(self) -> bool:
        """Return whether it still is in the memory from which it was adopted."""
        slot = self.entry.slot
        return slot is not None and slot.source is not None

    def __del__(self) -> None:
        # A compiler that traces through makes objects without `__init__`.
        entry = getattr(self, "entry", None)
        if entry is not None:
            self._scheduler.abandon(entry)


class ActivationStack:
    """The buffers of one forward call. Pushed first to last, they are expected to be read last to first.

    Args:
        scheduler: Who looks after them.
        expected: Bytes that will be pushed in all, if known: the sooner the scheduler knows that they will not fit,
            the more of the copying is hidden.
    """

    def __init__(self, scheduler: Scheduler, expected: int = 0):
        self._scheduler, self.expected = scheduler, expected
        if expected:
            scheduler.announce(self)

    def reserve(self, nbytes: int) -> ReservedSlot:
        """Return a slot whose `buffer` [nbytes] the current stream may write from now on.

        Raises:
            OffloadHostFull: If neither ring nor host has room and the configuration says "raise".
            torch.OutOfMemoryError: If the device has no room even for the ring.
        """
        return ReservedSlot(self._scheduler, nbytes)

    def push(self, slot: ReservedSlot) -> OffloadHandle:
        """Take a slot whose content is final, and return its handle; the oldest buffers may go to the host now.

        `slot.buffer` must not be used any more: read it through the handle.
        """
        self.expected -= min(self.expected, slot.nbytes)
        return slot.push()

    def take(self) -> list[Tensor]:
        """End the forward pass. Nothing is left for autograd to keep: the handles keep it."""
        self.expected = 0
        return []

    def give(self, buffers: list[Tensor]) -> None:
        """Begin the backward pass."""


class Offloader:
    """Stacks for one module on any number of devices. A copy of it has the same configuration and nothing else.

    Args:
        config: What the user wants; None for the defaults.
    """

    def __init__(self, config: OffloadConfig | None = None):
        self.config = config or OffloadConfig()
        self._schedulers: dict[torch.device, Scheduler | None] = {}
        self._lock = threading.Lock()
        self._own = Counters()
        """What belongs to no device's scheduler."""
        reset_after_fork(self)

    def __repr__(self) -> str:
        """Return the configuration, as far as it is not the default."""
        default = OffloadConfig()
        changed = [f"{name}={value!r}" for name, value in vars(self.config).items() if value != getattr(default, name)]
        return f"OffloadConfig({', '.join(changed)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offloader":
        return type(self)(self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    def stack(self, device: torch.device, expected: int = 0) -> ActivationStack | ResidentStack:
        """Return the stack for one forward call on `device`.

        Where offloading cannot help, its buffers stay where they are and autograd keeps them: on the CPU, unless
        there is a `spill_dir` or occupancy is injected; while a CUDA graph is captured, which owns its buffers; and
        under saved-tensor hooks, which then see the buffers (checkpointing drops them and computes them again).

        Args:
            device: Where the buffers live.
            expected: Bytes that will be pushed in all, if known.
        """
        scheduler = self.scheduler(device)
        if scheduler is None or not self.is_active(device):
            return ResidentStack(device)
        return ActivationStack(scheduler, expected)

    def is_active(self, device: torch.device) -> bool:
        """Return whether what is saved on `device` now would go through the scheduler; see `stack`."""
        scheduler = self.scheduler(device)
        if scheduler is None or scheduler.device.is_capturing():
            return False
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is None or getattr(hooks[0], "__self__", None) is self

    def scheduler(self, device: torch.device) -> Scheduler | None:
        """Return the scheduler of `device`, or None where offloading is inactive, which is said once.

        While a graph is captured none is made, since that asks things of the device.
        """
        if device.index is None and device.type != "cpu" and missing(device) is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        if device not in self._schedulers:
            if is_capturing(device):
                return None
            with self._lock:
                if device not in self._schedulers:
                    found = self._find(device)
                    self._schedulers[device] = None if found is None else Scheduler(found, self.config)
        return self._schedulers[device]

    def stats(self) -> Counters:
        """Return what was counted so far, of all devices together."""
        return add_up([self._own, *(scheduler.stats() for scheduler in self._active().values())])

    def explain(self, decisions: int = 8) -> str:
        """Say in words what moved and why.

        Args:
            decisions: How many of the latest decisions to show.
        """
        files = "" if self.config.spill_dir is None else f" with files in {self.config.spill_dir}"
        found = [
            f"offloading on {device}{files}: " + describe(scheduler.stats(), _last(scheduler, decisions))
            for device, scheduler in self._active().items()
        ]
        if not found:
            found.append(
                "offloading: nothing was saved on a device on which it is active. Saved-tensor hooks are a thread's "
                "own: a thread that starts within `with offload() as off` needs a `with off.hooks()` of its own"
            )
        if self._own.skipped:
            found.append("not looked at: " + skips(self._own))
        return "\n".join(found)

    def export_trace(self, path: str | Path) -> None:
        """Write what the streams did to a file that trace viewers open (chrome://tracing, ui.perfetto.dev).

        One row per stream; one box for each chunk that was computed, spilled, fetched, read and waited for.

        Args:
            path: The file, JSON.

        Raises:
            RuntimeError: If the configuration does not say `trace=True`.
        """
        if not self.config.trace:
            raise RuntimeError("`export_trace` needs times of every buffer: set `OffloadConfig(trace=True)`")
        events = [
            event
            for number, (device, scheduler) in enumerate(self._active().items())
            for event in scheduler.trace(number, str(device))
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _active(self) -> dict[torch.device, Scheduler]:
        return {device: found for device, found in list(self._schedulers.items()) if found is not None}

    def _after_fork(self) -> None:
        """In a forked child: forget who held what."""
        self._lock = threading.Lock()

    def _find(self, device: torch.device) -> Device | None:
        if device.type == "cpu":
            if not (self.config.occupancy is None and self.config.spill_dir is None):
                return ThreadDevice()
            reason = "the CPU's memory is the host's; name a folder on a disk as `spill_dir`, or inject `occupancy`"
        elif is_integrated(device):
            reason = "its memory is the host's"
        else:
            found = device_for(device)
            if found is not None:
                return found
            reason = f"copies need streams, events and pinned memory, and {missing(device)}"
        warnings.warn(f"offloading is inactive on {device}: {reason}", RuntimeWarning, stacklevel=5)
        return None


def _last(scheduler: Scheduler, number: int) -> list[tuple[int, str, int, str]]:
    decisions = [*scheduler.recorder.decisions]
    return decisions[max(0, len(decisions) - number) :]
