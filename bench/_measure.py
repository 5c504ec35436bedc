"""How time and memory are measured, and what is measured: one pass forward and backward of an LSTM.

Times are wall time of a pass after a warm-up, with the device synchronised before the clock is read; contenders take
turns, so that a noisy machine is noisy for all. Memory is measured in a process that does nothing else: on the CPU the
peak of the resident set above its size before the pass, on CUDA the allocator's peak above what was allocated.
"""

import multiprocessing
import resource
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn.testing import results, twin

TORCH = "torch.nn.LSTM"
OURS = "fusedrnn.LSTM"
LOOP = "loop of torch operators"


@dataclass(frozen=True)
class Job:
    """One contender at one size.

    Args:
        mode: "torch" for `torch.nn.LSTM` (a loop of torch's operators with `layer_norm`, which it has not), else the
            `save=` of `fusedrnn.LSTM`.
        T: Timesteps.
        B: Batch size.
        I: Width of the input.
        H: Hidden units.
        layers: Number of layers.
        dtype: Element type by name.
        device: Device.
        backend: The `backend=` of `fusedrnn.LSTM`.
        seed: Seed of weights and data.
        layer_norm: Whether the layer is normalised.
    """

    mode: str
    T: int
    B: int
    I: int
    H: int
    layers: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    seed: int = 0
    layer_norm: bool = False

    @property
    def kernel(self) -> str:
        """Name of the contender."""
        if self.mode == "torch":
            return LOOP if self.layer_norm else TORCH
        return OURS

    @property
    def shape(self) -> str:
        """The sizes in words."""
        words = f"T={self.T} B={self.B} I={self.I} H={self.H} L={self.layers} {self.dtype}"
        return words + (" layer_norm" if self.layer_norm else "")

    def module(self) -> nn.LSTM:
        """Build the layer."""
        torch.manual_seed(self.seed)
        where: dict[str, Any] = {"device": self.device, "dtype": getattr(torch, self.dtype)}
        if self.mode != "torch":
            where |= {"save": self.mode, "backend": self.backend, "layer_norm": self.layer_norm}
        elif self.layer_norm:
            where |= {"backend": "reference", "layer_norm": True}
        else:
            return nn.LSTM(self.I, self.H, self.layers, **where)
        return fusedrnn.LSTM(self.I, self.H, self.layers, **where)

    def step(self) -> Callable[[], None]:
        """Return a function that runs one pass forward and backward."""
        module = self.module()
        dtype = getattr(torch, self.dtype)
        x = torch.randn(self.T, self.B, self.I, device=self.device).to(dtype).requires_grad_()
        dy = torch.randn(self.T, self.B, self.H, device=self.device).to(dtype)

        def run() -> None:
            module.zero_grad()
            x.grad = None
            module(x)[0].backward(dy)

        return run


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def times(
    steps: Mapping[Any, Callable[[], None]],
    repeats: int,
    wait: Callable[[], None],
    tick: Callable[[], None] = lambda: None,
    warm_up: int = 1,
) -> dict[Any, list[float]]:
    """Time functions in turns.

    Args:
        steps: What to run, by name.
        repeats: How often each is timed.
        wait: Waits for the device; called before each reading of the clock.
        tick: Called after each run, for a progress bar.
        warm_up: Runs before the timed ones.

    Returns:
        Seconds of each run, by name.
    """
    found: dict[Any, list[float]] = {name: [] for name in steps}
    for turn in range(warm_up + repeats):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            step()
            wait()
            if turn >= warm_up:
                found[name].append(time.perf_counter() - start)
            tick()
    return found


def _status(key: str) -> int:
    """Return a size from this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    return 0


def resident_bytes() -> int:
    """Return the size of this process's memory, in bytes."""
    return _status("VmRSS")


def peak_bytes(step: Callable[[], None], device: str = "cpu") -> int:
    """Run a function once and return the peak of memory above its start, in bytes."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    start = resident_bytes()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from here
        step()
        return _status("VmHWM") - start
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - start


def allocated_bytes(step: Callable[[], None], device: str = "cpu") -> int:
    """Run a function once and return the most bytes of tensors that it had at once, by torch's own account."""
    if device.startswith("cuda"):
        return peak_bytes(step, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fresh process and return what it returns.

    A process that has run another contender holds on to freed memory, thread pools and compiled primitives.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def job_memory(job: Job) -> int:
    """Return the peak bytes of a job's first pass, after a tiny one has loaded what is loaded once."""
    small = Job(**{**vars(job), "T": 2, "B": min(job.B, 2)})
    small.step()()
    return peak_bytes(job.step(), job.device)


def job_time_and_memory(job: Job, repeats: int) -> tuple[list[float], int]:
    """Return the seconds of each pass and the peak bytes of the first."""
    small = Job(**{**vars(job), "T": 2, "B": min(job.B, 2)})
    small.step()()
    step = job.step()
    peak = peak_bytes(step, job.device)
    return times({"": step}, repeats, lambda: synchronize(job.device), warm_up=0)[""], peak


class NumericsError(Exception):
    """A contender computes something else."""


def check_numerics(jobs: list[Job], make: Callable[[Job], nn.LSTM] = Job.module) -> None:
    """Raise NumericsError unless every contender agrees with float64 at a small size, output and gradients.

    The limit is 16 units in the last place of the dtype, relative to each tensor's largest value: wide enough for
    any order of summation at this size, far below any wrong formula. With `layer_norm` it is 1024 units, since a
    division by the standard deviation of a row magnifies what was rounded before.
    """
    for mode, backend, dtype, device, layers, norm in dict.fromkeys(
        (job.mode, job.backend, job.dtype, job.device, job.layers, job.layer_norm) for job in jobs
    ):
        sizes: dict[str, Any] = {"T": 40, "B": 3, "I": 8, "H": 16, "layers": layers, "layer_norm": norm}
        job = Job(mode, **sizes, dtype=dtype, device=device, backend=backend)
        module = make(job)
        x: Tensor = torch.randn(job.T, job.B, job.I).to(device)
        exact = results(twin(module).to(device), x.to(getattr(torch, dtype)))
        for name, tensor in results(module, x).items():
            error = float((tensor.double() - exact[name]).abs().max() / exact[name].abs().max())
            limit = (1024 if norm else 16) * torch.finfo(getattr(torch, dtype)).eps
            if not error <= limit:
                raise NumericsError(
                    f"{job.kernel} (mode {mode}, {dtype}) is wrong: {name} is off by {error:.2g} of its largest value, "
                    f"allowed {limit:.2g}; no times are shown"
                )
