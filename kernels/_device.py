"""What a choice of blocks depends on. Loads no Triton, so that a choice can be explained where there is none."""

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """Figures of a CUDA device.

    Args:
        capability: Compute capability without the dot, such as 90.
        multiprocessors: Number of multiprocessors.
        shared_bytes: Shared memory that one program may use.
        memory: Bytes of memory.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int
    memory: int


A100 = DeviceInfo(80, 108, 163 << 10, 80 << 30)
H100 = DeviceInfo(90, 132, 227 << 10, 80 << 30)
B200 = DeviceInfo(100, 148, 227 << 10, 180 << 30)
"""Devices of the three architectures, for tests and tables (NVIDIA's data sheets and CUDA C++ Programming Guide)."""


def device_info(device: torch.device) -> DeviceInfo | None:
    """Return the figures of a device, or None where it is not a CUDA device."""
    if device.type != "cuda":
        return None
    return _properties(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _properties(index: int) -> DeviceInfo:
    found = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        found.major * 10 + found.minor,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stubs lack it
        found.total_memory,
    )
