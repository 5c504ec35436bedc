"""How fast a machine multiplies, launches and moves bytes, for `fusedrnn-bench calibrate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.progress import Progress

from fusedrnn.bench import _speeds
from fusedrnn.bench._facts import find_gpus
from fusedrnn.bench._measure import synchronize
from fusedrnn.bench._passes import typical
from fusedrnn.machine import Machine, uncalibrated

_BLOCK = 128 << 20
"""Bytes of the blocks by which speeds of memory are measured."""


def measure(device: str, rounds: int, spill_dir: str | None, bar: Progress) -> Machine:
    """Measure what is not a matter of layers, and return it with what is known without measuring."""
    found = uncalibrated(device)
    measured: dict[str, float] = {"eta_product": 1.0, "eta_recurrent": found.eta_recurrent / found.eta_product}
    jobs: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("products", partial(_products, device, rounds)),
        ("memory", partial(_memory, device, rounds)),
        ("launches", partial(_launches, device, rounds)),
    ]
    if device != "cpu":
        jobs.append(("link", partial(_link, device)))
    if spill_dir is not None:
        jobs.append(("disk", partial(_disk, Path(spill_dir))))
    task = bar.add_task("", total=len(jobs))
    for name, job in jobs:
        bar.update(task, description=name)
        measured |= job()
        bar.advance(task)
    return replace(found, **measured)  # type: ignore[arg-type]  # all of them are floats


def _timed(device: str, rounds: int, job: Callable[[], Any], inner: int = 1) -> float:
    """Return the seconds of a job, of which `inner` are run between two readings of the clock."""
    seconds = []
    job()
    for _ in range(2 * rounds):
        synchronize(device)
        start = perf_counter()
        for _ in range(inner):
            job()
        synchronize(device)
        seconds.append((perf_counter() - start) / inner)
    return typical(seconds)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Let products of float32 be rounded to TF32, or not."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before


def _products(device: str, rounds: int) -> dict[str, float]:
    """Measure products as they are of a chunk with 256 units, or with 1024 on a GPU."""
    width = 256 if device == "cpu" else 1024
    found = {}
    for name, dtype, tf32 in (
        ("half_flops", torch.bfloat16, False),
        ("tf32_flops", torch.float32, True),
        ("float32_flops", torch.float32, False),
        ("float64_flops", torch.float64, False),
    ):
        x, weight = torch.randn(4 * width, width).to(device, dtype), torch.randn(4 * width, width).to(device, dtype)
        out = torch.empty(4 * width, 4 * width, device=device, dtype=dtype)
        with _tf32(tf32):
            seconds = _timed(device, rounds, partial(torch.mm, x, weight.t(), out=out), 4)
        found[name] = 2.0 * out.numel() * width / seconds
    return found


def _memory(device: str, rounds: int) -> dict[str, float]:
    """Measure copies within memory and, on the CPU, the mapping of memory that was not there before."""
    source = torch.ones(_BLOCK, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    found = {"memory_bytes_per_second": 2 * _BLOCK / _timed(device, rounds, lambda: target.copy_(source))}
    if device == "cpu":
        known = _timed(device, rounds, target.zero_)
        fresh = _timed(device, rounds, lambda: torch.empty_like(target).zero_())
        found["fresh_seconds_per_byte"] = max(0.0, fresh - known) / _BLOCK
    return found


def _launches(device: str, rounds: int) -> dict[str, float]:
    small = torch.zeros(16, device=device)
    return {"launch_latency": _timed(device, rounds, lambda: small.add_(1), 1000)}


def _link(device: str) -> dict[str, float]:
    """Take the doctor's copies: the speed of the largest, and what the smallest takes beyond that."""
    index = torch.device(device).index or 0
    (gpu,) = (gpu for gpu in find_gpus() if gpu.index == index)
    copies = [fact.value for fact in _speeds.transfer([gpu]) if isinstance(fact.value, dict)]
    if not copies:
        return {}
    slower = {copy["bytes"]: min(copy["to_host"], copy["to_device"]) for copy in copies}
    speed, least = slower[max(slower)], min(slower)
    return {"link_bytes_per_second": speed, "link_latency": max(1e-7, least / slower[least] - least / speed)}


def _disk(folder: Path) -> dict[str, float]:
    """Take the doctor's slower way; a way that it could not measure is left out."""
    facts = _speeds.disk(folder)
    known = [fact.value for fact in facts if fact.name in ("write", "read") and isinstance(fact.value, float)]
    return {"disk_bytes_per_second": min(known)} if known else {}
