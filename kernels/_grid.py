"""What lets the programs of one launch work together: a barrier over global memory, and proof that all of them run.

A program that waits for another one must be sure that the other one runs. A launcher therefore starts at most as many
programs as the device has multiprocessors, each of which fits on one by itself.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class DeviceInfo:
    """What a choice of blocks depends on.

    Args:
        capability: Compute capability without the dot, such as 90.
        multiprocessors: Number of multiprocessors.
        shared_bytes: Shared memory that one program may use.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int


A100 = DeviceInfo(80, 108, 163 << 10)
H100 = DeviceInfo(90, 132, 227 << 10)
B200 = DeviceInfo(100, 148, 227 << 10)
"""Devices of the three architectures, for tests and tables (NVIDIA's data sheets and CUDA C++ Programming Guide)."""


@lru_cache(maxsize=64)
def device_info(index: int) -> DeviceInfo:
    """Return the figures of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stubs lack it
    )


@triton.jit
def arrive_and_wait(barrier_ptr, count):
    """Let the programs that share a counter meet: return when `count` arrivals have been made in all.

    The first barrier orders every thread's stores before the one release; the last one orders the acquire before every
    thread's loads. What another program stored must be loaded past the L1 cache (`cache_modifier=".cg"`).
    """
    tl.debug_barrier()
    tl.atomic_add(barrier_ptr, 1, sem="release", scope="gpu")
    while tl.atomic_add(barrier_ptr, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()
