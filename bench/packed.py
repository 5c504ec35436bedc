"""Sequences of very different lengths: packed rows against `torch.nn.LSTM` on packed and on padded input."""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fusedrnn
from fusedrnn.bench._measure import OURS, TORCH, in_process, peak_bytes, synchronize, times
from fusedrnn.bench._report import mib, progress, row, table
from fusedrnn.testing import assert_close, results, twin

CONTENDERS = {
    f"{TORCH}, packed": (TORCH, True),
    f"{TORCH}, padded": (TORCH, False),
    f"{OURS}, packed": (OURS, True),
}
Sizes = tuple[int, int, int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument(
        "--longest", type=int, default=2000, help="steps of the longest sequence (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences (default: %(default)s)")
    parser.add_argument("--input", type=int, default=64, help="width of the input (default: %(default)s)")
    parser.add_argument("--units", type=int, default=128, help="hidden units (default: %(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="both directions")
    parser.add_argument("--repeats", type=int, default=5, help="passes timed (default: %(default)s)")


def lengths(longest: int, batch: int) -> list[int]:
    """Return lengths that fall as 1/rank, as those of texts do: the longest, half of it, a third, ..."""
    return [max(1, longest // rank) for rank in range(1, batch + 1)]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    _check(args.device, args.bidirectional)
    sizes = args.longest, args.batch, args.input, args.units
    with progress(args.quiet) as bar:
        task = bar.add_task("packed", total=2 * len(CONTENDERS))
        peaks = {}
        for name in CONTENDERS:
            peaks[name] = in_process(_peak, name, sizes, args.bidirectional, args.device, args.seed)
            bar.advance(task)
        seconds = in_process(_seconds, sizes, args.bidirectional, args.device, args.seed, args.repeats)
        bar.advance(task, len(CONTENDERS))
    total = sum(lengths(args.longest, args.batch))
    shape = f"longest={args.longest} B={args.batch} rows={total} I={args.input} H={args.units} L=1 float32"
    rows, lines = [], []
    first = next(iter(CONTENDERS))
    for name, (kernel, packed) in CONTENDERS.items():
        mode = "packed" if packed else "padded"
        rows.append(row(kernel, mode, "seconds", shape, seconds[name], args.device))
        rows.append(row(kernel, mode, "peak_bytes", shape, [peaks[name]], args.device))
        taken, ratio = median(seconds[name]), median(seconds[name]) / median(seconds[first])
        memory = f"{peaks[name] / max(1, peaks[first]):.2f}"
        lines.append((name, f"{taken:.3g}", f"{ratio:.2f}", mib(peaks[name]), memory))
    share, shortest = total / (args.longest * args.batch), lengths(args.longest, args.batch)[-1]
    table(
        f"{args.batch} sequences of {args.longest:,} to {shortest} steps: {share:.0%} of the padded rows",
        ("", "seconds", "ratio", "peak", "ratio"),
        lines,
        caption=f"forward and backward, medians of {args.repeats} passes in turns; memory above the start",
    )
    return rows


def _check(device: str, bidirectional: bool) -> None:
    """Raise AssertionError unless packed rows give what float64 gives, at a small size."""
    module = fusedrnn.LSTM(5, 16, bidirectional=bidirectional, device=device)
    x = pack_padded_sequence(torch.randn(9, 4, 5, device=device), lengths(9, 4))
    exact = results(twin(module).to(device), x)
    for name, tensor in results(module, x).items():
        assert_close(tensor, exact[name], name)


def _step(name: str, sizes: Sizes, bidirectional: bool, device: str, seed: int) -> Callable[[], None]:
    longest, batch, width, units = sizes
    kernel, packed = CONTENDERS[name]
    torch.manual_seed(seed)
    make = nn.LSTM if kernel == TORCH else fusedrnn.LSTM
    module = make(width, units, bidirectional=bidirectional, device=device)
    padded = torch.randn(longest, batch, width, device=device)
    x: Tensor | PackedSequence = pack_padded_sequence(padded, lengths(longest, batch)) if packed else padded

    def step() -> None:
        module.zero_grad()
        y = module(x)[0]
        (y.data if isinstance(y, PackedSequence) else y).sum().backward()

    return step


def _peak(name: str, sizes: Sizes, bidirectional: bool, device: str, seed: int) -> int:
    _step(name, (3, *sizes[1:]), bidirectional, device, seed)()
    return peak_bytes(_step(name, sizes, bidirectional, device, seed), device)


def _seconds(sizes: Sizes, bidirectional: bool, device: str, seed: int, repeats: int) -> dict[str, list[float]]:
    steps = {name: _step(name, sizes, bidirectional, device, seed) for name in CONTENDERS}
    return times(steps, repeats, lambda: synchronize(device))
