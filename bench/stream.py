"""A sequence that no device holds: input from a memory-mapped file, a loss per chunk, and the peak of memory.

Beside it stand the same layer at a short length, whose time per step must be the same, and torch.nn.LSTM at that
length, whose need at the full length is its measured one by proportion.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedrnn
from fusedrnn import OffloadConfig
from fusedrnn.bench._measure import OURS, TORCH, in_process, peak_bytes, synchronize, times
from fusedrnn.bench._report import mib, progress, row, table

CLASSES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000, 1_000_000], help="timesteps, shortest first")
    parser.add_argument("--batch", type=int, default=4, help="batch size (default: %(default)s)")
    parser.add_argument("--inputs", type=int, default=32, help="width of the input (default: %(default)s)")
    parser.add_argument("--units", type=int, default=128, help="hidden units (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="layers (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="passes timed of short lengths (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="processes for each row (default: %(default)s)")
    parser.add_argument("--spill-dir", default=None, help="folder to whose disk the states between segments go")
    parser.add_argument("--dir", default=None, help="folder of the file that is mapped (default: the temp folder)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    sizes = (args.batch, args.inputs, args.units, args.layers)
    shortest = min(args.lengths)
    jobs = [(TORCH, shortest), *((OURS, T) for T in sorted(args.lengths))]
    seconds: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    peaks: dict[tuple[str, int], list[int]] = {job: [] for job in jobs}
    with progress(args.quiet) as bar, tempfile.TemporaryDirectory(dir=args.dir) as folder:
        task = bar.add_task("stream", total=len(jobs) * args.processes)
        for kernel, T in jobs * args.processes:
            bar.update(task, description=f"{kernel}, {T:,} steps")
            # The long pass warms itself up in its first steps.
            repeats = args.repeats if 10 * shortest >= T else 1
            found, peak = in_process(_measure, kernel, T, sizes, repeats, folder, args.device, args.spill_dir)
            seconds[kernel, T] += found
            peaks[kernel, T].append(peak)
            bar.advance(task)
    rows: list[dict[str, Any]] = []
    lines = []
    per_step: dict[str, float] = {}
    for kernel, T in jobs:
        shape = f"T={T} B={args.batch} I={args.inputs} H={args.units} L={args.layers} float32"
        mode = "whole" if kernel == TORCH else "stream"
        rows.append(row(kernel, mode, "seconds", shape, seconds[kernel, T], args.device))
        rows.append(row(kernel, mode, "peak_bytes", shape, peaks[kernel, T], args.device))
        time, peak = median(seconds[kernel, T]), median(peaks[kernel, T])
        ratio = time / T / per_step.setdefault(kernel, time / T)
        spread = f" ({min(peaks[kernel, T]) >> 20:,} to {max(peaks[kernel, T]) >> 20:,})" if args.processes > 1 else ""
        lines.append((kernel, f"{T:,}", f"{time:.2f}", f"{1e6 * time / T:.1f}", f"{ratio:.2f}", mib(peak) + spread))
    need = median(peaks[jobs[0]]) * max(args.lengths) / shortest
    lines.insert(1, (TORCH, f"{max(args.lengths):,}", "", "", "", f"{mib(need)} by proportion"))
    table(
        "One pass forward and backward with a loss per chunk, input from a memory-mapped file",
        ("", "steps", "seconds", "us/step", "of the first", "peak"),
        lines,
        caption="medians of the passes and processes; memory above the start; each row in processes of its own"
        + (f"; states between segments go to {args.spill_dir}" if args.spill_dir else ""),
    )
    return rows


def _measure(
    kernel: str,
    T: int,
    sizes: tuple[int, int, int, int],
    repeats: int,
    folder: str,
    device: str,
    spill_dir: str | None = None,
) -> tuple[list[float], int]:
    """Return the seconds of each pass and the peak bytes of the first."""
    _step(kernel, 64, sizes, folder, device, spill_dir)()
    step = _step(kernel, T, sizes, folder, device, spill_dir)
    found: list[float] = []

    def timed() -> None:
        found.extend(times({"": step}, 1, lambda: synchronize(device), warm_up=0)[""])

    peak = peak_bytes(timed, device)
    for _ in range(repeats - 1):
        timed()
    return found, peak


def _step(
    kernel: str, T: int, sizes: tuple[int, int, int, int], folder: str, device: str, spill_dir: str | None
) -> Callable[[], None]:
    """Return a function that runs one pass over data of a file."""
    import numpy as np

    B, I, H, layers = sizes
    torch.manual_seed(0)
    path = Path(folder) / f"{T}.dat"
    if not path.exists():
        mapped = np.memmap(path, np.float32, "w+", shape=(T, B, I))
        for first in range(0, T, 10_000):
            block = mapped[first : first + 10_000]
            block[:] = torch.randn(block.shape).numpy()
        mapped.flush()
        del mapped, block
        _forget(path)
    data = np.memmap(path, np.float32, "r", shape=(T, B, I))
    head = nn.Linear(H, CLASSES).to(device)

    def loss(y: Tensor, steps: slice) -> Tensor:
        labels = torch.arange(steps.start, steps.stop, device=y.device) % CLASSES
        return F.cross_entropy(head(y).flatten(0, 1), labels.repeat_interleave(y.shape[1]), reduction="sum") / T

    if kernel == TORCH:
        reference = nn.LSTM(I, H, layers).to(device)
        return lambda: loss(reference(torch.from_numpy(data.copy()).to(device))[0], slice(0, T)).backward()
    # With a disk, everything that may go there does.
    everything = OffloadConfig(spill_dir=spill_dir, occupancy=lambda: 1.0) if spill_dir else False
    ours = fusedrnn.LSTM(I, H, layers, offload=everything).to(device)
    return lambda: ours(data, chunk_loss=loss)[0].backward()


def _forget(path: Path) -> None:
    """Let the system drop a file's pages, so that reading it means reading the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
