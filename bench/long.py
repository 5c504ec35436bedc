"""Time and memory against the length of the sequence.

The table is that of TensorFlow's change that introduced `swap_memory` ("Long LSTM Sequence"): elapsed time per step
must stay constant as the length grows, and memory must not grow out of bounds.
"""

import argparse
from statistics import median
from typing import Any

from fusedrnn.bench._measure import Job, check_numerics, in_process, job_time_and_memory
from fusedrnn.bench._report import mib, progress, row, table

MODES = ("torch", "gates", "cells", "hidden", "auto")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--batch", type=int, default=64, help="batch size (default: %(default)s)")
    parser.add_argument("--units", type=int, default=256, help="hidden units (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 400, 800, 1600], help="lengths of the sequence")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="contenders")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="element type (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="passes timed (default: %(default)s)")
    parser.add_argument("--full-size", action="store_true", help="batch 512, 512 units, lengths 100 to 1000")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    batch, units, lengths = args.batch, args.units, args.lengths
    if args.full_size:
        batch, units, lengths = 512, 512, list(range(100, 1001, 100))
    jobs = [
        Job(mode, T, batch, units, units, dtype=args.dtype, device=args.device, seed=args.seed)
        for T in lengths
        for mode in args.modes
    ]
    check_numerics(jobs)
    rows: list[dict[str, Any]] = []
    lines = []
    with progress(args.quiet) as bar:
        task = bar.add_task("long", total=len(jobs))
        for job in jobs:
            bar.update(task, description=f"length {job.T}, {job.mode}")
            seconds, peak = in_process(job_time_and_memory, job, args.repeats)
            rows.append(row(job.kernel, job.mode, "seconds", job.shape, seconds, job.device))
            rows.append(row(job.kernel, job.mode, "peak_bytes", job.shape, [peak], job.device))
            name = job.kernel if job.mode == "torch" else f'save="{job.mode}"'
            elapsed = median(seconds)
            lines.append((name, job.B, job.T, job.H, f"{elapsed:.3g}", f"{1e6 * elapsed / job.T:.0f}", mib(peak)))
            bar.advance(task)
    table(
        "Long LSTM sequence: one pass forward and backward",
        ("", "batch", "len", "units", "elapsed s", "us/step", "peak"),
        lines,
        caption="median of the passes; memory above the start; each row in a process of its own",
    )
    return rows
