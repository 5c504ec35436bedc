"""Time and memory of one pass at five sizes, as ratios to `torch.nn.LSTM` in the same run; and with `layer_norm`.

`torch.nn.LSTM` cannot be normalised: there ours stands beside the same equations as a loop of torch's operators.
"""

import argparse
from statistics import median
from typing import Any

from fusedrnn.bench._measure import Job, check_numerics, in_process, job_memory, synchronize, times
from fusedrnn.bench._report import mib, progress, row, table

SHAPES = {
    "long": (5000, 16, 64, 256),
    "very long": (20000, 4, 32, 128),
    "wide batch": (2000, 64, 128, 256),
    "large": (400, 512, 512, 512),
    "short": (50, 32, 64, 128),
    "layer_norm": (200, 32, 64, 256),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--repeats", type=int, default=5, help="passes timed (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), help="some of the sizes")
    parser.add_argument("--size", type=int, nargs=4, metavar=("T", "B", "I", "H"), help="a size of your own instead")
    parser.add_argument("--layer-norm", action="store_true", help="normalised layers at all sizes")
    parser.add_argument("--mode", default="auto", choices=("auto", "gates", "cells", "hidden"), help="ours: save=")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    sizes = {"yours": tuple(args.size)} if args.size else {name: SHAPES[name] for name in args.only}
    norms = {name: args.layer_norm or name == "layer_norm" for name in sizes}
    check_numerics(
        [
            Job(mode, 1, 1, 1, 1, device=args.device, layer_norm=norm)
            for norm in dict.fromkeys(norms.values())
            for mode in ("torch", args.mode)
        ]
    )
    rows: list[dict[str, Any]] = []
    lines = []
    with progress(args.quiet) as bar:
        task = bar.add_task("shapes", total=len(sizes) * (2 * (1 + args.repeats) + 2))
        for name, (T, B, I, H) in sizes.items():
            bar.update(task, description=f"{name}: T={T} B={B} I={I} H={H}")
            jobs = [
                Job(mode, T, B, I, H, device=args.device, seed=args.seed, layer_norm=norms[name])
                for mode in ("torch", args.mode)
            ]
            peaks = []
            for job in jobs:
                peaks.append(in_process(job_memory, job))
                bar.advance(task)
            seconds = in_process(_times_of, jobs, args.repeats)
            bar.advance(task, 2 * (1 + args.repeats))
            for job, taken, peak in zip(jobs, seconds, peaks, strict=True):
                rows.append(row(job.kernel, job.mode, "seconds", job.shape, taken, job.device))
                rows.append(row(job.kernel, job.mode, "peak_bytes", job.shape, [peak], job.device))
            theirs, ours = map(median, seconds)
            size = f"{T}, {B}, {I}, {H}" + (", layer norm" if norms[name] else "")
            memory = f"{peaks[1] / max(peaks[0], 1):.2f}"
            lines.append(
                (size, f"{theirs:.3g}", f"{ours:.3g}", f"{ours / theirs:.2f}", mib(peaks[0]), mib(peaks[1]), memory)
            )
    table(
        "One pass forward and backward: torch.nn.LSTM and fusedrnn.LSTM",
        ("T, B, I, H", "torch s", "ours s", "ratio", "torch peak", "ours peak", "ratio"),
        lines,
        caption=f"medians of {args.repeats} passes in turns; memory above the start, each in a process of its own"
        + ("; layer norm: torch is a loop of its operators" if any(norms.values()) else ""),
    )
    return rows


def _times_of(jobs: list[Job], repeats: int) -> list[list[float]]:
    steps = {job.mode if job.mode == "torch" else "ours": job.step() for job in jobs}
    return list(times(steps, repeats, lambda: synchronize(jobs[0].device)).values())
