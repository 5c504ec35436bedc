"""What a training step would take: the scheduler itself, on a device that only keeps the time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusedrnn.offload.config import OffloadConfig
from fusedrnn.offload.scheduler import Scheduler
from fusedrnn.offload.simulated import SimulatedDevice, Work
from fusedrnn.offload.stack import ActivationStack
from fusedrnn.offload.stats import Counters


@dataclass(frozen=True)
class Forecast:
    """A step as it would be.

    Args:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        peak: Most bytes of buffers on the device.
        host_peak: Most bytes of pinned memory.
        counters: What the scheduler counted in this step and those before it.
        work: What every stream did when, in this step, from time 0.
    """

    forward: float
    backward: float
    peak: int
    host_peak: int
    counters: Counters
    work: list[Work]


def forecast(
    sizes: Sequence[int],
    compute: float,
    consume: float,
    *,
    config: OffloadConfig,
    memory: int | None = None,
    bytes_per_second: float = 50e9,
    latency: float = 0.0,
    announced: bool = True,
    steps: int = 1,
    disk_bytes_per_second: float = 3e9,
    host_limit: int | None = None,
) -> Forecast:
    """Run training steps of the scheduler on the simulated device and return the last.

    Args:
        sizes: Bytes of each chunk's buffer, in the order of the pushes.
        compute: Seconds of a chunk in the forward pass.
        consume: Seconds of a chunk in the backward pass.
        config: How to offload. Unless occupancy is injected, the device's memory holds these buffers and nothing else.
        memory: Bytes of the device's memory, None where occupancy is injected.
        bytes_per_second: Speed of the link, each way.
        latency: Seconds that each copy takes in addition.
        announced: Whether the scheduler is told beforehand how much is coming.
        steps: How many steps to run; from the second on, speeds and sizes are known.
        disk_bytes_per_second: Speed of the disk, each way, where the configuration names a `spill_dir`.
        host_limit: Bytes of pinned memory, in place of the configuration's limit and this machine's memory.
    """
    device = SimulatedDevice(
        memory=memory,
        bytes_per_second=bytes_per_second,
        latency=latency,
        disk_bytes_per_second=disk_bytes_per_second,
        trace=True,
    )
    scheduler = Scheduler(device, config if host_limit is None else replace(config, host_limit=host_limit))
    stream = device.current
    for _ in range(steps):
        device.work = []
        start = stream.time
        stack = ActivationStack(scheduler, sum(sizes) if announced else 0)
        handles = []
        for nbytes in sizes:
            slot = stack.reserve(nbytes)
            device.write(slot.buffer, None, compute)
            handles.append(stack.push(slot))
        stack.take()
        turn = stream.time
        while handles:
            handle = handles.pop()
            device.read(handle.get(writable=True), None, consume)
            handle.release()
    work = [done._replace(start=done.start - start, end=done.end - start) for done in device.work or []]
    return Forecast(turn - start, stream.time - turn, device.peak, device.host_peak, scheduler.stats(), work)
