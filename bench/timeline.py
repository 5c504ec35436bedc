"""The streams of an offloaded training step as a picture: what is computed, spilled and fetched when."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.text import Text

import fusedrnn
from fusedrnn.bench._report import console, row
from fusedrnn.bench.offload import CHUNK, LINK
from fusedrnn.offloading.forecast import Forecast, forecast
from fusedrnn.offloading.simulated import Work

ROWS = ("compute", "spill", "fetch")
COLOURS = {"compute": ("#2f6f4f", "#54b17f"), "spill": ("#8a5a00", "#e0a030"), "fetch": ("#1f4f8f", "#5a9fe8")}
"""Two shades of each stream, for chunks in turns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--chunks", type=int, default=16, help="chunks of the sequence (default: %(default)s)")
    parser.add_argument("--ring", type=int, default=4, help="slots of the ring (default: %(default)s)")
    parser.add_argument("--prefetch", type=int, default=2, help="chunks fetched ahead (default: %(default)s)")
    parser.add_argument(
        "--copy",
        type=float,
        default=0.7,
        metavar="X",
        help="time of a copy over that of a chunk (default: %(default)s)",
    )
    parser.add_argument("--width", type=int, help="characters across (default: the terminal's)")
    parser.add_argument("--png", metavar="FILE", help="draw it to FILE, too (pip install fusedrnn[plot])")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    for name, least in (("chunks", 1), ("ring", 2), ("prefetch", 0)):
        if getattr(args, name) < least:
            raise SystemExit(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.copy <= 0:
        raise SystemExit(f"--copy must be above 0, got {args.copy}")
    compute = CHUNK / LINK / args.copy
    config = fusedrnn.OffloadConfig(
        occupancy=lambda: 1.0, ring_slots=args.ring, prefetch=args.prefetch, host_limit=4 * args.chunks * CHUNK
    )
    found = forecast([CHUNK] * args.chunks, compute, compute, config=config, bytes_per_second=LINK, steps=2)
    for line in picture(found, args.width or min(console.width, 160)):
        console.print(line, no_wrap=True, overflow="crop")
    total = found.forward + found.backward
    ratio = total / (2 * args.chunks * compute)
    console.print(
        f"{args.chunks} chunks forward and backward, copies at {args.copy:g} of a chunk's time: {ratio:.3f} of the "
        f"time without offloading, at most {found.peak / CHUNK:.0f} chunks on the device"
    )
    if args.png:
        draw(found, args.png)
    shape = f"chunks={args.chunks} ring={args.ring} prefetch={args.prefetch} x={args.copy:g}"
    return [row("fusedrnn.offload", "simulated", "time_over_none", shape, [ratio])]


def picture(found: Forecast, width: int) -> list[Text]:
    """Return a line of text for each stream, coloured where it is busy, and one that says which pass it is.

    Args:
        found: What happened.
        width: Characters across.
    """
    label = max(map(len, ROWS)) + 1
    columns = max(10, width - label)
    total = found.forward + found.backward
    lines = []
    turn = round(found.forward / total * columns)
    head = Text(" " * label)
    head.append("forward".center(turn)[:turn], style="dim").append("backward".center(columns - turn), style="dim")
    lines.append(head)
    for stream in ROWS:
        line = Text(f"{stream:<{label}}")
        cells = _cells([work for work in found.work if work.stream == stream], total, columns)
        for cell in cells:
            if cell is None:
                line.append("·", style="dim")
            else:
                line.append("█", style=COLOURS[stream][cell % 2])
        lines.append(line)
    return lines


def _cells(work: Sequence[Work], total: float, columns: int) -> list[int | None]:
    """Return for each column which piece of work fills most of it, None where the stream is idle for most of it."""
    cells: list[int | None] = []
    for column in range(columns):
        start, end = column * total / columns, (column + 1) * total / columns
        best, index = 0.0, None
        busy = 0.0
        for number, piece in enumerate(work):
            shared = min(piece.end, end) - max(piece.start, start)
            if shared > 0:
                busy += shared
                if shared > best:
                    best, index = shared, number
        cells.append(index if busy >= (end - start) / 2 else None)
    return cells


def draw(found: Forecast, path: str) -> None:
    """Draw the streams to a picture file.

    Args:
        found: What happened.
        path: The file; its ending says which format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--png needs matplotlib: pip install fusedrnn[plot]") from error
    figure = Figure(figsize=(12, 2.4), layout="constrained")
    axes = figure.add_subplot()
    for height, stream in enumerate(reversed(ROWS)):
        pieces = [work for work in found.work if work.stream == stream]
        spans = [(work.start * 1e3, (work.end - work.start) * 1e3) for work in pieces]
        colours = [COLOURS[stream][number % 2] for number in range(len(pieces))]
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolors=colours)
    axes.axvline(found.forward * 1e3, color="0.5", linestyle=":")
    axes.set_yticks(range(len(ROWS)), reversed(ROWS))
    axes.set_xlabel("milliseconds")
    figure.savefig(path)
    console.print(f"drawn to {path}")
