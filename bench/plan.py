"""What a training step will take of memory and time, in every way in which it can run, before it runs."""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch

import fusedrnn
from fusedrnn._checks import size
from fusedrnn.bench._measure import allocated_bytes, synchronize, times
from fusedrnn.bench._passes import LAYERS
from fusedrnn.bench._report import row, table
from fusedrnn.cells import CELLS
from fusedrnn.machine import PRESETS
from fusedrnn.planner import StepPlan, Way

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Budgets of the curve, between the least that does and what keeping all gates takes."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    add = parser.add_argument
    add("--length", type=int, default=10_000, help="timesteps (default: %(default)s)")
    add("--batch", type=int, default=32, help="sequences (default: %(default)s)")
    add("--inputs", type=int, default=64, help="width of the input (default: %(default)s)")
    add("--units", type=int, default=256, help="hidden units (default: %(default)s)")
    add("--layers", type=int, default=1, help="layers (default: %(default)s)")
    add("--proj", type=int, default=0, help="width of the output, 0 for that of the hidden state")
    add("--bidirectional", action="store_true", help="run in both directions")
    add("--cell", choices=list(CELLS), default="lstm", help="what each layer computes (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    add("--preset", choices=list(PRESETS), help="a machine by its published figures, in place of --device")
    add("--backend", default="auto", help="who computes (default: %(default)s)")
    add("--memory-budget", metavar="BYTES", help='most memory that the step may take, such as "2GiB"')
    add("--offload", action="store_true", help="let activations move to the host")
    add("--spill-dir", metavar="DIR", help="and on to a file in DIR")
    add("--curve", action="store_true", help="show time against memory")
    add("--png", metavar="FILE", help="draw the curve to FILE, too (pip install fusedrnn[plot])")
    add("--check", action="store_true", help="run each way on this machine and show what it really took")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    if args.check and (args.preset or args.offload or args.spill_dir):
        raise SystemExit("--check runs the step on this machine: leave out --preset, --offload and --spill-dir")
    try:
        found = _plan(args, memory_budget=args.memory_budget)
        show(found)
        rows = [_row(found, way, name, value) for way in found.ways for name, value in _figures(way)]
        if args.curve or args.png:
            rows += curve(args, found)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    if args.check:
        rows += check(args, found)
    return rows


def _plan(args: argparse.Namespace, **options: Any) -> StepPlan:
    """Return the plan of the step that the options describe."""
    offload: bool | fusedrnn.OffloadConfig = args.offload
    if args.spill_dir:
        offload = fusedrnn.OffloadConfig(spill_dir=args.spill_dir)
    return fusedrnn.plan(
        args.inputs,
        args.units,
        args.layers,
        length=args.length,
        batch=args.batch,
        bidirectional=args.bidirectional,
        proj_size=args.proj,
        cell=args.cell,
        dtype=getattr(torch, args.dtype),
        device=args.preset or args.device,
        backend=args.backend,
        **{"offload": offload} | options,
    )


def show(found: StepPlan) -> None:
    """Print a plan as a table."""
    heading, *rows = found.rows()
    title = f"{found.call}; backend {found.best.choice.backend.name!r} on {found.machine.name}"
    table(title, heading, rows, caption=f"{found.machine.source}\n{found.reason}")


def _figures(way: Way) -> Iterator[tuple[str, float]]:
    yield "predicted_seconds", way.seconds.total
    for name in ("device_bytes", "host_bytes", "disk_bytes", "moved_bytes"):
        yield f"predicted_{name}", float(getattr(way, name))


def _row(found: StepPlan, way: Way, metric: str, value: float) -> dict[str, Any]:
    return row("fusedrnn.plan", way.name, metric, f"{found.call} on {found.machine.name}", [value])


def curve(args: argparse.Namespace, found: StepPlan) -> list[dict[str, Any]]:
    """Show the least time against the memory that it takes, and the single modes; return the rows."""
    singles = [way for way in _plan(args, offload=False).ways if not way.choice.older[0]]
    sizes = [way.device_bytes for way in singles]
    points: list[Way] = []
    for share in SHARES:
        budget = int(min(sizes) + share * (max(sizes) - min(sizes)))
        points.append(_plan(args, offload=False, memory_budget=budget).best)
    quickest = min(way.seconds.total for way in singles)
    longest = max(way.seconds.total for way in [*singles, *points])
    lines = [
        (
            f"{share:.0%}",
            size(way.device_bytes),
            f"{way.seconds.total:.4g}",
            f"{way.seconds.total / quickest:.3f}",
            "█" * round(10 * way.seconds.total / longest),
            way.name,
        )
        for share, way in zip(SHARES, points, strict=True)
    ]
    caption = "memory between what the leanest mode takes and the richest; single modes: " + ", ".join(
        f"{way.name} {size(way.device_bytes)}, {way.seconds.total / quickest:.3f}" for way in singles
    )
    columns = ("memory", "peak", "seconds", "ratio", "", "saved")
    table("time against memory", columns, lines, caption=caption)
    if args.png:
        draw(singles, points, args.png)
    return [
        _row(found, way, metric, value)
        for way in points
        for metric, value in (("curve_seconds", way.seconds.total), ("curve_device_bytes", float(way.device_bytes)))
    ]


def draw(singles: list[Way], points: list[Way], path: str) -> None:
    """Draw time against memory to a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--png needs matplotlib: pip install fusedrnn[plot]") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    ordered = sorted(points, key=lambda way: way.device_bytes)
    gib = float(1 << 30)
    axes.plot([w.device_bytes / gib for w in ordered], [w.seconds.total for w in ordered], "o-", label="best mix")
    for way in singles:
        axes.plot(way.device_bytes / gib, way.seconds.total, "s", label=way.name)
    axes.set(xlabel="peak memory of a step, GiB", ylabel="seconds of a step", title="time against memory")
    axes.legend()
    figure.savefig(path, dpi=150)


def check(args: argparse.Namespace, found: StepPlan) -> list[dict[str, Any]]:
    """Run the single modes as planned and show what they took; return the rows."""
    call, steps = found.call, {}
    x = torch.randn(call.T, call.B, call.I, device=args.device).to(call.dtype).requires_grad_()
    dy = torch.randn(call.T, call.B, call.P * call.directions, device=args.device).to(call.dtype)
    extra: dict[str, Any] = {"proj_size": args.proj} if args.proj else {}
    ways = [way for way in found.ways if way.fits and not way.choice.older[0]]
    for way in ways:
        module = LAYERS[args.cell](
            call.I,
            call.H,
            call.layers,
            bidirectional=args.bidirectional,
            device=args.device,
            dtype=call.dtype,
            save=way.choice.save,
            chunk=way.choice.chunk,
            backend=way.choice.backend.name,
            **extra,
        )

        def step(module: Any = module) -> None:
            torch.autograd.grad(module(x)[0], [x, *module.parameters()], dy)

        steps[way.name] = step
    seconds = times(steps, 3, lambda: synchronize(args.device))
    rows, lines = [], []
    for way in ways:
        taken, median = allocated_bytes(steps[way.name], args.device), statistics.median(seconds[way.name])
        lines.append(
            (
                way.name,
                size(way.device_bytes),
                size(taken),
                f"{way.device_bytes / taken:.3f}",
                f"{way.seconds.total:.4g}",
                f"{median:.4g}",
                f"{way.seconds.total / median:.2f}",
            )
        )
        rows += [_row(found, way, "seconds", median), _row(found, way, "device_bytes", float(taken))]
    columns = ("save", "bytes predicted", "counted", "ratio", "seconds predicted", "measured", "ratio")
    table("predicted and real", columns, lines)
    return rows
