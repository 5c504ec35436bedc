"""What lets the programs of one launch work together: a barrier over global memory.

A program that waits for another one must be sure that the other one runs. A launcher therefore starts at most as many
programs as the device has multiprocessors, each of which fits on one by itself, and launches them cooperatively, so
that kernels on two streams cannot hold half of the device each.
"""

import triton
import triton.language as tl


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
