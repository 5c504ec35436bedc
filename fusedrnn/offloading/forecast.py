"""What a training step would take: the scheduler itself, on a device that only keeps the time."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.simulated import SimulatedDevice, Work
from fusedrnn.offloading.stack import ActivationStack
from fusedrnn.offloading.stats import Counters


@dataclass(frozen=True)
class Forecast:
    """A step as it would be.

    Args:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        peak: Most bytes of buffers on the device.
        host_peak: Most bytes of pinned memory.
        moved: Bytes that went to the host in this step.
        counters: What the scheduler counted in this step and those before it.
        work: What every stream did when, in this step, from time 0.
    """

    forward: float
    backward: float
    peak: int
    host_peak: int
    moved: int
    counters: Counters
    work: list[Work]


def forecast(
    sizes: Sequence[int],
    compute: float | Sequence[float],
    consume: float | Sequence[float],
    *,
    config: OffloadConfig,
    memory: int | None = None,
    other: int = 0,
    bytes_per_second: float = 50e9,
    latency: float = 0.0,
    announced: bool = True,
    steps: int = 1,
    disk_bytes_per_second: float = 3e9,
    direct: bool = False,
) -> Forecast:
    """Run training steps of the scheduler on the simulated device and return the last.

    Args:
        sizes: Bytes of each chunk's buffer, in the order of the pushes.
        compute: Seconds of a chunk in the forward pass, or of each chunk.
        consume: Seconds of a chunk in the backward pass, or of each chunk.
        config: How to offload. Unless occupancy is injected, the device's memory holds these buffers and nothing else.
        memory: Bytes of the device's memory, None where occupancy is injected.
        other: Bytes of it that are in use for something else.
        bytes_per_second: Speed of the link, each way.
        latency: Seconds that each copy takes in addition.
        announced: Whether the scheduler is told beforehand how much is coming.
        steps: How many steps to run; from the second on, speeds and sizes are known.
        disk_bytes_per_second: Speed of the disk, each way, where the configuration names a `spill_dir`.
        direct: Whether buffers then go there at once, as they do on the CPU.
    """
    device = SimulatedDevice(
        memory=memory,
        bytes_per_second=bytes_per_second,
        latency=latency,
        disk_bytes_per_second=disk_bytes_per_second,
        direct=direct,
        trace=True,
    )
    others = device.allocate(other) if other else None
    scheduler = Scheduler(device, config)
    stream = device.current
    forward, backward = (
        [part] * len(sizes) if isinstance(part, (int, float)) else list(part) for part in (compute, consume)
    )
    for _ in range(steps):
        device.work, before = [], scheduler.counters.spilled_bytes
        start = stream.time
        stack = ActivationStack(scheduler, sum(sizes) if announced else 0)
        handles = []
        for nbytes, seconds in zip(sizes, forward, strict=True):
            slot = stack.reserve(nbytes)
            device.write(slot.buffer, None, seconds)
            handles.append(stack.push(slot))
        stack.take()
        turn = stream.time
        while handles:
            handle = handles.pop()
            device.read(handle.get(writable=True), None, backward[len(handles)])
            handle.release()
    work = [done._replace(start=done.start - start, end=done.end - start) for done in device.work or []]
    del others
    peak, moved = device.peak - other, scheduler.counters.spilled_bytes - before
    return Forecast(turn - start, stream.time - turn, peak, device.host_peak, moved, scheduler.stats(), work)
