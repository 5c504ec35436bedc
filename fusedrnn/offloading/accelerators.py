"""What torch's accelerators have in common, and what only some of them have."""

from functools import cache

import torch
from torch import Tensor

_STREAMS: dict[tuple[torch.device, str], torch.Stream] = {}
_MOST_STREAMS = 32
"""Streams of torch's pool, which hands them out in turn."""


def copy_stream(device: torch.device, name: str) -> torch.Stream:
    """Return the process's one stream of that name on a device; those of other names are other streams.

    All that copies under one name shares it, so that any number of offloaders and streamed sequences leave the rest of
    torch's pool alone. A stream is a queue: sharing it orders more than is needed, and never less.
    """
    found = _STREAMS.get((device, name))
    if found is None:
        taken = [stream for (where, _), stream in list(_STREAMS.items()) if where == device]
        new = torch.Stream(device)
        for _ in range(_MOST_STREAMS):
            if new not in taken:
                break
            new = torch.Stream(device)
        found = _STREAMS.setdefault((device, name), new)
    return found


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is one of the kind that this torch knows beside the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def is_capturing(device: torch.device) -> bool:
    """Return whether the calling thread's stream on a device records a graph, so that nothing may be asked of it."""
    if not is_accelerator(device):
        return False
    # What torch asks of the current device is all that there is before streams can be asked themselves.
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if ask is not None and ask():
        return True
    ask = getattr(torch.accelerator.current_stream(device), "is_capturing", None)
    return ask is not None and bool(ask())


def is_integrated(device: torch.device) -> bool:
    """Return whether a device's memory is the host's, so that copies between the two free nothing."""
    if device.type in ("cpu", "mps"):
        return True
    if not is_accelerator(device):
        return False
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return ask is not None and bool(getattr(ask(device), "is_integrated", False))


@cache
def missing(device: torch.device) -> str | None:
    """Return what a device lacks for copies beside its computation, None where it has all of it."""
    if not is_accelerator(device):
        return "this torch knows no accelerator of that kind"
    tried = "streams of its own"
    try:
        if copy_stream(device, "spill") == torch.accelerator.current_stream(device):
            return "it has no streams beside the one that computes"
        tried = "events with times"
        torch.Event(device, enable_timing=True)
        tried = "pinned host memory"
        return None if empty_bytes(1, torch.device("cpu"), pin=True).is_pinned() else f"it has no {tried}"
    except (RuntimeError, NotImplementedError) as error:
        return f"it has no {tried} ({str(error).splitlines()[0]})"


def empty_bytes(nbytes: int, device: torch.device, pin: bool = False) -> Tensor:
    """Return a new buffer, uint8 [nbytes]."""
    # A tensor made under inference_mode could never be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)
