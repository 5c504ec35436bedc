"""Sequences of very different lengths: packed rows against `torch.nn.LSTM` on packed and on padded input."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fusedrnn
from fusedrnn.bench._measure import OURS, TORCH, NumericsError, in_process, peak_bytes, synchronize, times
from fusedrnn.bench._report import mib, progress, row, table
from fusedrnn.cells import LSTM
from fusedrnn.testing import assert_close, results, twin

CONTENDERS = {
    f"{TORCH}, packed": (TORCH, True),
    f"{TORCH}, padded": (TORCH, False),
    f"{OURS}, packed": (OURS, True),
}


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Args:
        lengths: Steps of each sequence, falling.
        input: Width of the input.
        units: Hidden units.
        bidirectional: Whether both directions run.
        save: The `save=` of `fusedrnn.LSTM`.
    """

    lengths: tuple[int, ...]
    input: int
    units: int
    bidirectional: bool
    save: str


def lengths(text: str) -> tuple[int, ...]:
    """Return lengths, falling, from a list such as "2000,1500,62" or a range FROM:TO:COUNT such as "2000:62:32"."""
    try:
        if ":" in text:
            first, last, count = map(int, text.split(":"))
            found = [round(first + (last - first) * k / max(1, count - 1)) for k in range(count)]
        else:
            found = list(map(int, text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"must be lengths of at least 1, as a list such as 2000,1500,62 or FROM:TO:COUNT such as 2000:62:32, "
            f"got {text!r}"
        )
    return tuple(sorted(found, reverse=True))


def ranked(longest: int, batch: int) -> tuple[int, ...]:
    """Return lengths that fall as 1/rank, as those of texts do: the longest, half of it, a third, ..."""
    return tuple(max(1, longest // rank) for rank in range(1, batch + 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--longest",
        type=int,
        default=2000,
        help="steps of the longest sequence; the others have a half, a third, ... of it (default: %(default)s)",
    )
    which.add_argument(
        "--lengths", type=lengths, help="steps of every sequence instead: 2000,1500,62, or FROM:TO:COUNT, 2000:62:32"
    )
    parser.add_argument("--batch", type=int, help="sequences (default: 32, or as many as --lengths has)")
    parser.add_argument("--input", type=int, default=64, help="width of the input (default: %(default)s)")
    parser.add_argument("--units", type=int, default=128, help="hidden units (default: %(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="both directions")
    parser.add_argument(
        "--mode", "--save", default="auto", choices=("auto", *LSTM.modes), help="ours: save= (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="passes timed (default: %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    sizes = _sizes(args)
    _check(args.device, args.bidirectional, args.mode)
    with progress(args.quiet) as bar:
        task = bar.add_task("packed", total=2 * len(CONTENDERS))
        peaks = {}
        for name in CONTENDERS:
            bar.update(task, description=f"memory of {name}")
            peaks[name] = in_process(_peak, name, sizes, args.device, args.seed)
            bar.advance(task)
        bar.update(task, description="times of all in turns")
        seconds = in_process(_seconds, sizes, args.device, args.seed, args.repeats)
        bar.advance(task, len(CONTENDERS))
    total, longest, batch = sum(sizes.lengths), sizes.lengths[0], len(sizes.lengths)
    shape = f"longest={longest} B={batch} rows={total} I={sizes.input} H={sizes.units} L=1 float32"
    shape += " bidirectional" if sizes.bidirectional else ""
    rows, lines = [], []
    first = next(iter(CONTENDERS))
    for name, (kernel, packed) in CONTENDERS.items():
        mode = ("packed" if packed else "padded") + (f", {sizes.save}" if kernel == OURS else "")
        rows.append(row(kernel, mode, "seconds", shape, seconds[name], args.device))
        rows.append(row(kernel, mode, "peak_bytes", shape, [peaks[name]], args.device))
        taken, ratio = median(seconds[name]), median(seconds[name]) / median(seconds[first])
        memory = f"{peaks[name] / max(1, peaks[first]):.2f}"
        lines.append((name, f"{taken:.3g}", f"{ratio:.2f}", mib(peaks[name]), memory))
    table(
        f"{batch} sequences of {longest:,} to {sizes.lengths[-1]:,} steps: {total / (longest * batch):.0%} of the "
        "padded rows",
        ("", "seconds", "of the first", "peak", "of the first"),
        lines,
        caption=f"forward and backward, medians of {args.repeats} passes in turns; memory above the start; ours with "
        f'save="{sizes.save}"',
    )
    return rows


def _sizes(args: argparse.Namespace) -> Sizes:
    found = args.lengths or ranked(args.longest, 32 if args.batch is None else args.batch)
    if args.batch not in (None, len(found)):
        raise SystemExit(f"--batch must be the number of --lengths, {len(found)}, or left out, got {args.batch}")
    if not found or args.longest < 1:
        raise SystemExit(f"--longest and --batch must be at least 1, got {args.longest} and {args.batch}")
    return Sizes(found, args.input, args.units, args.bidirectional, args.mode)


def _check(device: str, bidirectional: bool, save: str) -> None:
    """Raise NumericsError unless packed rows give what float64 gives, at a small size."""
    module = fusedrnn.LSTM(5, 16, bidirectional=bidirectional, save=save, device=device)
    x = pack_padded_sequence(torch.randn(9, 4, 5, device=device), list(ranked(9, 4)))
    exact = results(twin(module).to(device), x)
    for name, tensor in results(module, x).items():
        try:
            assert_close(tensor, exact[name], name)
        except AssertionError as error:
            raise NumericsError(f"{OURS} on packed input is wrong: {error}; no times are shown") from error


def _step(name: str, sizes: Sizes, device: str, seed: int) -> Callable[[], None]:
    kernel, packed = CONTENDERS[name]
    torch.manual_seed(seed)
    shape = sizes.input, sizes.units
    where: dict[str, Any] = {"bidirectional": sizes.bidirectional, "device": device}
    module = nn.LSTM(*shape, **where) if kernel == TORCH else fusedrnn.LSTM(*shape, save=sizes.save, **where)
    padded = torch.randn(sizes.lengths[0], len(sizes.lengths), sizes.input, device=device)
    x: Tensor | PackedSequence = pack_padded_sequence(padded, list(sizes.lengths)) if packed else padded

    def step() -> None:
        module.zero_grad()
        y = module(x)[0]
        (y.data if isinstance(y, PackedSequence) else y).sum().backward()

    return step


def _peak(name: str, sizes: Sizes, device: str, seed: int) -> int:
    _step(name, replace(sizes, lengths=ranked(3, len(sizes.lengths))), device, seed)()
    return peak_bytes(_step(name, sizes, device, seed), device)


def _seconds(sizes: Sizes, device: str, seed: int, repeats: int) -> dict[str, list[float]]:
    steps = {name: _step(name, sizes, device, seed) for name in CONTENDERS}
    return times(steps, repeats, lambda: synchronize(device))
