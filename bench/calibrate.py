"""Measure what a timestep takes on this machine, and how fast it multiplies and moves bytes, for `fusedrnn.plan`.

The result is kept in a file, which `fusedrnn.machine` reads. All passes are run in rounds, each once a round, and of
each the lower quartile is kept: what else a machine does only ever adds, and often for longer than a pass takes.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.progress import Progress

from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import Backend, Call
from fusedrnn.bench._passes import Runner, describe, typical
from fusedrnn.bench._rates import measure
from fusedrnn.bench._report import console, progress, row, table
from fusedrnn.budget import seconds_of
from fusedrnn.choice import choose
from fusedrnn.costs import fresh_bytes, fresh_seconds
from fusedrnn.machine import Machine, Sample, device_name, machine, path_of, write

_BUSY = 0.5
"""Load of the last minute from which others are in the way."""
_PROBE = 64
"""Steps by which the length of a pass is found."""
_WHOLE = ("onednn", "triton_sequence")
"""Backends with many steps in a launch, or an operator."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        batches: Batch sizes of the grid.
        units: Hidden units of the grid.
        seconds: What one pass, forward and backward, takes about.
        rounds: How often everything is run, where the limit allows it, at least once.
        limit: Seconds after which nothing is run again.
    """

    batches: tuple[int, ...]
    units: tuple[int, ...]
    seconds: float = 0.03
    rounds: int = 4
    limit: float = 90.0


EFFORTS = {
    ("cpu", False): Effort((1, 4, 16, 64), (32, 64, 128, 256, 512)),
    ("cpu", True): Effort((1, 8, 64), (32, 128, 512), 0.01, 2),
    ("cuda", False): Effort((1, 16, 128), (64, 256, 512, 1024), 0.02),
    ("cuda", True): Effort((1, 64), (64, 256, 1024), 0.01, 2),
}
"""By type of device, and whether it shall be quick."""

CHECKED = (
    ("lstm", 3000, 2, 48, 48, 1, 1),
    ("lstm", 2000, 3, 64, 100, 1, 1),
    ("lstm", 1500, 2, 16, 200, 1, 1),
    ("lstm", 1000, 6, 300, 80, 1, 1),
    ("lstm", 1000, 8, 32, 256, 1, 1),
    ("lstm", 800, 8, 128, 128, 2, 1),
    ("lstm", 600, 12, 96, 96, 1, 2),
    ("lstm", 1000, 24, 40, 150, 1, 1),
    ("lstm", 500, 20, 200, 300, 1, 1),
    ("lstm", 500, 32, 64, 192, 2, 1),
    ("lstm", 500, 48, 400, 400, 1, 1),
    ("lstm", 3000, 48, 24, 64, 1, 1),
    ("gru", 500, 8, 64, 100, 1, 1),
    ("layer_norm_lstm", 300, 24, 64, 150, 1, 1),
)
"""Cell, T, B, I, H, layers and directions that the grid does not have."""


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
        found = measure(args.device, effort.rounds, args.spill_dir, bar)
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
        row(
            s.backend,
            f"{s.save}, {way}",
            "seconds",
            f"{s.cell} B={s.B} I={s.I} H={s.H} {s.dtype}",
            [seconds],
            args.device,
        )
        for s in samples
        for way, seconds in (("forward", s.forward), ("backward", s.backward))
    ]


def _sizes(option: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if min(sizes) < 1:
        raise SystemExit(f"{option} must be at least 1, got {min(sizes)}")
    return tuple(sorted(set(sizes)))


def _say_if_busy() -> None:
    """Say so where others seem to use the processor: threads that wait for each other then stand still for long."""
    load = os.getloadavg()[0]
    if load > _BUSY:
        text = f"the load of the last minute was {load:.1f}: if others use this machine now, the figures are too slow"
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


def _points(device: str, effort: Effort) -> Iterator[tuple[Call, str, str]]:
    """Yield a call, a backend and a mode for each point of the grid, and in its middle with inputs of other widths."""
    middle = effort.batches[len(effort.batches) // 2], effort.units[len(effort.units) // 2]
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        for cell in BACKENDS:
            for H in effort.units:
                for B in effort.batches:
                    widths = dict.fromkeys((H, max(1, H // 4), 4 * H) if middle == (B, H) else (H,))
                    for call in (describe(device, dtype, cell, 1 << 20, B, I, H) for I in widths):
                        yield from ((call, backend.name, mode) for backend in _able(call) for mode in backend.saves)


def _able(call: Call) -> list[Backend]:
    """Return the backends that "auto" may take for a call, in one mode or another."""
    able = [known for known in BACKENDS[call.cell.name].values() if not known.refusals(call)]
    able = [known for known in able if known.name != "reference"]
    if call.device == "cpu":
        # Interpreted kernels are for tests.
        return [known for known in able if not known.name.startswith("triton")]
    return [known for known in able if known.name != "torch_step" or len(able) == 1]


def _length(runner: Runner, call: Call, backend: str, save: str, seconds: float) -> int:
    """Return how many steps take about so many seconds: whole chunks, unless one takes longer than twice that."""
    chunk, most = choose(call, backend, save).chunk, call.T
    # Memory that is mapped at every pass is counted apart.
    while most > 1 and fresh_bytes(replace(call, T=most), backend, save):
        most = most * 3 // 4
    probe = min(chunk, most, _PROBE)
    taken = min(sum(each) for each in runner.passes(replace(call, T=probe), backend, save, 2)) / probe
    steps = max(1, round(seconds / taken))
    if 2 * steps >= chunk:
        steps = chunk * max(1, round(steps / chunk))
    return min(max(steps, probe), most)


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
        forward, backward = (typical(way) / call.T for way in zip(*seconds, strict=True))
        word = str(call.dtype).removeprefix("torch.")
        samples.append(Sample(call.cell.name, backend, save, word, call.B, call.I, call.H, forward, backward))
    return samples


def _order(sample: Sample) -> tuple[str, str, int]:
    return sample.backend, sample.save, sample.B


def _show(found: Machine) -> None:
    units = sorted({s.H for s in found.measured})
    for cell, dtype in sorted({(s.cell, s.dtype) for s in found.measured}):
        own = [s for s in found.measured if (s.cell, s.dtype) == (cell, dtype) and s.I == s.H]
        known = {(f"{s.backend} {s.save}", s.B, s.H): f"{1e6 * s.forward:.3g}+{1e6 * s.backward:.3g}" for s in own}
        lines = [
            (name, B, *(known.get((name, B, H), "") for H in units))
            for name, B in dict.fromkeys((f"{s.backend} {s.save}", s.B) for s in sorted(own, key=_order))
        ]
        title = f"{cell}, {dtype}: microseconds per timestep, forward+backward, I = H"
        table(title, ("", "B", *(f"H={H}" for H in units)), lines)
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
    calls = [describe(device, torch.float32, *shape) for shape in CHECKED]
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
        # One mode for all chunks, as in the passes.
        predicted = seconds_of(call, choice._replace(older=(0, choice.save)), known).total
        measured, mode = typical(seconds), f"{choice.backend.name} {choice.save}"
        rows.append(row(mode, "measured", "seconds", str(call), seconds, device))
        rows.append(row(mode, "predicted", "seconds", str(call), [predicted], device))
        lines.append((str(call), mode, f"{predicted:.3g}", f"{measured:.3g}", f"{predicted / measured:.2f}"))
    table("Seconds of a pass forward and backward", ("call", "", "predicted", "measured", "ratio"), lines)
    return rows
