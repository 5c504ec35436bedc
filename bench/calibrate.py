"""Measure what a timestep takes on this machine, and how fast it multiplies and moves bytes, for `fusedrnn.plan`.

The result is kept in a file, which `fusedrnn.machine` reads. All passes are run in rounds, each once a round, and of
each the lower quartile is kept: what else a machine does only ever adds, and often for longer than a pass takes.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import Call, RecordingBackend, gpu_of, tf32_allowed
from fusedrnn.bench import _speeds
from fusedrnn.bench._facts import find_gpus
from fusedrnn.bench._measure import synchronize
from fusedrnn.bench._report import console, device_name, progress, row, table
from fusedrnn.cells import CELLS
from fusedrnn.choice import choose
from fusedrnn.costs import fresh_seconds, step_seconds
from fusedrnn.machine import Machine, Sample, machine, path_of, uncalibrated, write

_KEPT_BYTES = 32 << 20
"""The largest block that glibc keeps when it is freed (DEFAULT_MMAP_THRESHOLD_MAX)."""
_BUSY = 0.5
"""Load of the last minute from which others are in the way."""
_WHOLE = ("onednn", "triton_sequence")
"""Backends with many steps in a launch, or an operator."""
_LAYERS: dict[str, Callable[..., torch.nn.RNNBase]] = {
    "lstm": fusedrnn.LSTM,
    "gru": fusedrnn.GRU,
    "layer_norm_lstm": partial(fusedrnn.LSTM, layer_norm=True),
}


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        batches: Batch sizes of the grid.
        units: Hidden units of the grid.
        seconds: What one pass, forward and backward, takes about.
        rounds: How often everything is run, where the limit allows it, at least once.
        limit: Seconds after which nothing is run again.
        bytes: Size of the blocks by which speeds of memory are measured.
    """

    batches: tuple[int, ...]
    units: tuple[int, ...]
    seconds: float = 0.03
    rounds: int = 4
    limit: float = 90.0
    bytes: int = 128 << 20


EFFORTS = {
    ("cpu", False): Effort((1, 4, 16, 64), (32, 64, 128, 256, 512)),
    ("cpu", True): Effort((1, 8, 64), (32, 128, 512), 0.01, 2),
    ("cuda", False): Effort((1, 8, 64, 256), (64, 128, 256, 512, 1024), 0.02),
    ("cuda", True): Effort((1, 64), (64, 256, 1024), 0.01, 2),
}
"""By type of device, and whether it shall be quick."""

CHECKED = (
    (3000, 2, 48, 48, 1, 1),
    (2000, 3, 64, 100, 1, 1),
    (1500, 2, 16, 200, 1, 1),
    (1000, 6, 300, 80, 1, 1),
    (1000, 8, 32, 256, 1, 1),
    (800, 8, 128, 128, 2, 1),
    (600, 12, 96, 96, 1, 2),
    (1000, 24, 40, 150, 1, 1),
    (500, 20, 200, 300, 1, 1),
    (500, 32, 64, 192, 2, 1),
    (500, 48, 400, 400, 1, 1),
    (3000, 48, 24, 64, 1, 1),
)
"""T, B, I, H, layers and directions that the grid does not have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--quick", action="store_true", help="a coarser grid and fewer passes")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes of a grid of your own")
    parser.add_argument("--units", type=int, nargs="+", help="hidden units of a grid of your own")
    parser.add_argument("--spill-dir", help="folder whose disk is measured, too (default: none, an assumed speed)")
    parser.add_argument("--output", metavar="FILE", help="where to save (default: where fusedrnn looks for it)")
    parser.add_argument(
        "--check", action="store_true", help="measure other sizes instead, and compare with what is predicted"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    effort = EFFORTS[args.device.partition(":")[0], args.quick]
    effort = replace(effort, batches=_sizes("--batch", args.batch or effort.batches))
    effort = replace(effort, units=_sizes("--units", args.units or effort.units))
    torch.manual_seed(args.seed)
    _say_if_busy()
    if args.check:
        return _check(args.device, effort.rounds, args.quiet)
    path = Path(args.output) if args.output else path_of(args.device)
    _require_writable(path)
    if args.spill_dir is not None and not Path(args.spill_dir).is_dir():
        raise SystemExit(f"--spill-dir must be a folder that exists, got {args.spill_dir}")
    with progress(args.quiet) as bar:
        samples = _samples(args.device, effort, bar)
        found = _speeds_of(args.device, effort, args.spill_dir, bar)
    found = replace(
        found,
        name=device_name(args.device),
        step_latency=min((s.forward for s in samples if s.backend in _WHOLE), default=found.step_latency),
        measured=tuple(samples),
        source=f"measured by fusedrnn-bench calibrate on {datetime.now(UTC).date()}",
    )
    write(found, args.device, path)
    _show(found)
    console.print(f"saved to {path}", highlight=False, soft_wrap=True)
    return [
        row(s.backend, f"{s.save}, {way}", "seconds", f"{s.cell} B={s.B} I=H={s.H} {s.dtype}", [seconds], args.device)
        for s in samples
        for way, seconds in (("forward", s.forward), ("backward", s.backward))
    ]


def _sizes(option: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if min(sizes) < 1:
        raise SystemExit(f"{option} must be at least 1, got {min(sizes)}")
    return tuple(sorted(set(sizes)))


def _say_if_busy() -> None:
    """Say so where other processes use the processor: threads that wait for each other stand still for milliseconds."""
    busy = os.getloadavg()[0]
    if busy > _BUSY:
        text = (
            f"others use this machine (load {busy:.1f}): the figures will be too slow; better measure when it is quiet"
        )
        console.print(text, style="yellow")


def _require_writable(path: Path) -> None:
    """Make the file's folder and raise SystemExit unless a file can be made there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SystemExit(
            f"cannot write to {path.parent} ({error.strerror or error}): pass --output with a file elsewhere, or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error


# Passes.


class Runner:
    """Runs passes of a layer, over random numbers that all of them share."""

    def __init__(self, device: str):
        self._device = device
        self._numbers: dict[torch.dtype, Tensor] = {}

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = shape[0] * shape[1] * shape[2]
        numbers = self._numbers.get(dtype)
        if numbers is None or numbers.numel() < numel:
            numbers = self._numbers[dtype] = torch.randn(numel, device=self._device).to(dtype)
        return numbers[:numel].view(shape)

    def passes(self, call: Call, backend: str, save: str, count: int) -> list[tuple[float, float]]:
        """Return the seconds of some passes, forward and backward."""
        options: dict[str, Any] = {"backend": backend, "save": save, "bidirectional": call.directions == 2}
        layer = _LAYERS[call.cell.name](call.I, call.H, call.layers, **options, device=self._device, dtype=call.dtype)
        x = self._random((call.T, call.B, call.I), call.dtype).detach().requires_grad_()
        dy = self._random((call.T, call.B, call.directions * call.H), call.dtype)
        found = []
        for _ in range(count):
            layer.zero_grad()
            x.grad = None
            start = self._now()
            y = layer(x)[0]
            turn = self._now()
            y.backward(dy)
            found.append((turn - start, self._now() - turn))
            del y
        return found

    def _now(self) -> float:
        synchronize(self._device)
        return perf_counter()


def _typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def _call(device: str, dtype: torch.dtype, cell: str, T: int, B: int, I: int, H: int, *more: int) -> Call:
    """Describe a call; `more` may be the numbers of layers and of directions."""
    layers, directions = more or (1, 1)
    where = torch.device(device)
    return Call(
        **{"T": T, "B": B, "I": I, "H": H, "P": H, "layers": layers, "directions": directions},
        dtype=dtype,
        device=where.type,
        gpu=gpu_of(where),
        tf32=where.type == "cuda" and tf32_allowed(),
        onednn=torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        cell=CELLS[cell],
    )


def _points(device: str, effort: Effort) -> Iterator[tuple[Call, str, str]]:
    """Yield a call, a backend and a mode for each point that can be measured."""
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        for cell, backends in BACKENDS.items():
            for H in effort.units:
                for B in effort.batches:
                    call = _call(device, dtype, cell, 1 << 20, B, H, H)
                    able = [known for known in backends.values() if not known.refusals(call)]
                    able = [known for known in able if known.name != "reference"]
                    if device != "cpu" and len(able) > 1:
                        # Beside Triton's kernels nobody takes it.
                        able = [known for known in able if known.name != "torch_step"]
                    yield from ((call, known.name, mode) for known in able for mode in known.saves)


def _length(runner: Runner, call: Call, backend: str, save: str, seconds: float) -> int:
    """Return how many steps, of whole chunks, take about so many seconds."""
    choice = choose(call, backend, save)
    chunk, most = choice.chunk, call.T
    whole = isinstance(choice.backend, RecordingBackend) and save == "gates"
    if whole and call.device == "cpu":
        # Recorded at once, gates, cells and what oneDNN adds must stay in a block that is kept.
        most = max(1, _KEPT_BYTES * 3 // 4 // (7 * call.B * call.H * call.dtype.itemsize))
        chunk = min(chunk, most)
    taken = min(sum(each) for each in runner.passes(replace(call, T=chunk), backend, save, 2))
    return chunk * max(1, min(round(seconds / taken), most // chunk))


def _samples(device: str, effort: Effort, bar: Progress) -> list[Sample]:
    """Measure the grid."""
    points, runner, start = list(_points(device, effort)), Runner(device), perf_counter()
    task = bar.add_task("", total=len(points) * (1 + effort.rounds))
    jobs = []
    for call, backend, save in points:
        bar.update(task, advance=1, description=f"{call.cell.name} {backend} {save}: sizes")
        jobs.append((replace(call, T=_length(runner, call, backend, save, effort.seconds)), backend, save))
    taken: list[list[tuple[float, float]]] = [[] for _ in jobs]
    for turn in range(effort.rounds):
        for (call, backend, save), seconds in zip(jobs, taken, strict=True):
            if turn == 0 or perf_counter() - start < effort.limit:
                bar.update(task, description=f"{call.cell.name} {backend} {save}: round {turn + 1}")
                seconds += runner.passes(call, backend, save, 2)
            bar.advance(task)
    bar.remove_task(task)
    samples = []
    for (call, backend, save), seconds in zip(jobs, taken, strict=True):
        forward, backward = (_typical(way) / call.T for way in zip(*seconds, strict=True))
        word = str(call.dtype).removeprefix("torch.")
        samples.append(Sample(call.cell.name, backend, save, word, call.B, call.H, forward, backward))
    return samples


# Speeds.


def _speeds_of(device: str, effort: Effort, spill_dir: str | None, bar: Progress) -> Machine:
    """Measure what is not a matter of layers, and return it with what is known without measuring."""
    found = uncalibrated(device)
    measured: dict[str, float] = {"eta_product": 1.0, "eta_recurrent": found.eta_recurrent / found.eta_product}
    jobs: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("products", partial(_products, device, effort)),
        ("memory", partial(_memory, device, effort)),
        ("launches", partial(_launches, device, effort)),
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
    return replace(found, **measured)


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
    return _typical(seconds)


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


def _products(device: str, effort: Effort) -> dict[str, float]:
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
            seconds = _timed(device, effort.rounds, partial(torch.mm, x, weight.t(), out=out), 4)
        found[name] = 2.0 * out.numel() * width / seconds
    return found


def _memory(device: str, effort: Effort) -> dict[str, float]:
    """Measure copies within memory and, on the CPU, the mapping of memory that was not there before."""
    source = torch.ones(effort.bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    found = {"memory_bytes_per_second": 2 * effort.bytes / _timed(device, effort.rounds, lambda: target.copy_(source))}
    if device == "cpu":
        known = _timed(device, effort.rounds, target.zero_)
        fresh = _timed(device, effort.rounds, lambda: torch.empty_like(target).zero_())
        found["fresh_seconds_per_byte"] = max(0.0, fresh - known) / effort.bytes
    return found


def _launches(device: str, effort: Effort) -> dict[str, float]:
    small = torch.zeros(16, device=device)
    return {"launch_latency": _timed(device, effort.rounds, lambda: small.add_(1), 1000)}


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


# Tables.


def _show(found: Machine) -> None:
    groups = sorted({(s.cell, s.backend, s.save, s.dtype) for s in found.measured})
    lines: list[tuple[str, ...]] = []
    for group in groups:
        own = {(s.B, s.H): s for s in found.measured if (s.cell, s.backend, s.save, s.dtype) == group}
        for B in sorted({B for B, _ in own}):
            units = [own.get((B, H)) for H in sorted({s.H for s in found.measured})]
            lines.append(
                (
                    f"{group[0]} {group[1]} {group[2]} {group[3]}, B={B}",
                    *("" if s is None else f"{1e6 * s.forward:.3g} + {1e6 * s.backward:.3g}" for s in units),
                )
            )
    columns = ("", *(f"H={H}" for H in sorted({s.H for s in found.measured})))
    table("Microseconds per timestep, forward + backward", columns, lines, caption="lower quartiles, I = H")
    speeds = [
        ("products, half precision", f"{found.half_flops / 1e9:,.0f} GFLOP/s"),
        ("products, TF32", f"{found.tf32_flops / 1e9:,.0f} GFLOP/s"),
        ("products, float32", f"{found.float32_flops / 1e9:,.0f} GFLOP/s"),
        ("products, float64", f"{found.float64_flops / 1e9:,.0f} GFLOP/s"),
        ("memory", f"{found.memory_bytes_per_second / 1e9:.3g} GB/s"),
        ("mapping fresh memory", f"{1e3 * fresh_seconds(found, 1 << 30):.3g} ms/GiB"),
        ("small operator or launch", f"{1e6 * found.launch_latency:.3g} us"),
        ("link", f"{found.link_bytes_per_second / 1e9:.3g} GB/s, {1e6 * found.link_latency:.3g} us a copy"),
        ("disk", f"{found.disk_bytes_per_second / 1e9:.3g} GB/s"),
    ]
    table(found.name, ("", ""), speeds)


def _check(device: str, rounds: int, quiet: bool) -> list[dict[str, Any]]:
    """Compare passes with what is predicted of them."""
    known, runner = machine(device), Runner(device)
    console.print(known.source, style="dim")
    calls = [_call(device, torch.float32, "lstm", *shape) for shape in CHECKED]
    choices = [choose(call) for call in calls]
    taken: list[list[float]] = [[] for _ in calls]
    with progress(quiet) as bar:
        task = bar.add_task("", total=rounds * len(calls))
        for turn in range(rounds):
            for call, choice, seconds in zip(calls, choices, taken, strict=True):
                bar.update(task, advance=1, description=f"round {turn + 1}: {call}")
                seconds += [sum(each) for each in runner.passes(call, choice.backend.name, choice.save, 2)]
    rows, lines = [], []
    for call, choice, seconds in zip(calls, choices, taken, strict=True):
        step = step_seconds(known, call, choice.backend.name, choice.save)
        predicted = call.T * (step.forward + step.backward) + fresh_seconds(known, _fresh_bytes(call))
        measured, mode = _typical(seconds), f"{choice.backend.name} {choice.save}"
        rows.append(row(mode, "measured", "seconds", str(call), seconds, device))
        rows.append(row(mode, "predicted", "seconds", str(call), [predicted], device))
        lines.append((str(call), mode, f"{predicted:.3g}", f"{measured:.3g}", f"{predicted / measured:.2f}"))
    table("Seconds of a pass forward and backward", ("call", "", "predicted", "measured", "ratio"), lines)
    return rows


def _fresh_bytes(call: Call) -> int:
    """Return the bytes of outputs and gradients of inputs whose blocks the allocator does not keep."""
    if call.device != "cpu":
        return 0
    step = call.B * call.dtype.itemsize
    blocks = [call.T * step * width for width in (call.directions * call.P, call.I)]
    return sum(nbytes for nbytes in blocks if nbytes >= _KEPT_BYTES)
