"""Time to the first result against the length of the sequence.

The table is that of TensorFlow's change that introduced `swap_memory` ("Graph Creation"). The rival is an LSTM unrolled
statically: a loop over `torch.nn.LSTMCell` that `torch.jit.trace` turns into a graph of that length. What the first
call takes beyond the second is set-up; the second is the work itself.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn.bench._measure import Job, check_numerics, in_process, synchronize
from fusedrnn.bench._report import progress, row, table

UNROLLED = "unrolled, traced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--batch", type=int, default=16, help="batch size (default: %(default)s)")
    parser.add_argument("--units", type=int, default=128, help="hidden units (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 25, 50, 100, 200, 1000], help="lengths")


def first_and_second(kernel: str, T: int, B: int, H: int, device: str, seed: int) -> tuple[float, float]:
    """Return the seconds to the first result, construction included, and those of the second call."""
    x = torch.randn(T, B, H, device=device)
    # What a process does once, whatever runs: the first product starts the thread pool.
    torch.mm(x[0], x[0].t())
    synchronize(device)
    start = time.perf_counter()
    call = _build(kernel, x, seed)
    call(x)
    synchronize(device)
    middle = time.perf_counter()
    call(x)
    synchronize(device)
    return middle - start, time.perf_counter() - middle


def _build(kernel: str, x: Tensor, seed: int) -> Callable[[Tensor], Any]:
    torch.manual_seed(seed)
    _, B, H = x.shape
    if kernel != UNROLLED:
        return fusedrnn.LSTM(H, H, device=x.device)
    cell = nn.LSTMCell(H, H, device=x.device)

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            state = (x.new_zeros(B, H), x.new_zeros(B, H))
            outputs = []
            for step in x.unbind(0):
                state = self.cell(step, state)
                outputs.append(state[0])
            return torch.stack(outputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, and still the way to unroll
        return torch.jit.trace(Unrolled(), (x,), check_trace=False)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    check_numerics([Job("auto", 1, 1, 1, 1, device=args.device)])
    rows: list[dict[str, Any]] = []
    lines = []
    jobs = [(kernel, T) for T in args.lengths for kernel in ("fusedrnn.LSTM", UNROLLED)]
    found: dict[tuple[str, int], tuple[float, float]] = {}
    with progress(args.quiet) as bar:
        task = bar.add_task("setup", total=len(jobs))
        for kernel, T in jobs:
            bar.update(task, description=f"length {T}, {kernel}")
            found[kernel, T] = in_process(first_and_second, kernel, T, args.batch, args.units, args.device, args.seed)
            shape = f"T={T} B={args.batch} I={args.units} H={args.units}"
            for metric, value in zip(("first_seconds", "second_seconds"), found[kernel, T], strict=True):
                rows.append(row(kernel, "auto", metric, shape, [value], args.device))
            bar.advance(task)
    for T in args.lengths:
        pairs = [found[kernel, T] for kernel in ("fusedrnn.LSTM", UNROLLED)]
        lines.append((T, *(f"{1e3 * value:,.1f}" for first, second in pairs for value in (first, second))))
    table(
        "Set-up: milliseconds to the first and to the second result",
        ("length", "ours, first", "second", "unrolled, first", "second"),
        lines,
        caption=f"batch {args.batch}, {args.units} units, forward only; each cell in a process of its own; unrolled = "
        "a loop over nn.LSTMCell traced by torch.jit.trace",
    )
    return rows
