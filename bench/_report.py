"""How results are reported: rows for machines, tables and progress bars for people."""

import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusedrnn.machine import device_name

console = Console()


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Return the version of Triton without loading it, or "" where it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def commit() -> str:
    """Return the short commit of the source, or "" where it is not a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        kernel: What ran: "torch.nn.LSTM", "fusedrnn.LSTM", or a kernel's name.
        mode: How it ran, such as the save mode.
        metric: What was measured, with its unit, such as "seconds" or "peak_bytes".
        shape: The sizes, such as "T=100 B=4 I=8 H=16 float32".
        p20: 20th percentile.
        p50: Median.
        p80: 80th percentile.
        device: Name of the device that ran it.
        torch: Version of torch.
        triton: Version of Triton, or "".
        commit: Commit of the source, or "".
        date: When, UTC.
    """

    kernel: str
    mode: str
    metric: str
    shape: str
    p20: float
    p50: float
    p80: float
    device: str = field(default_factory=device_name)
    torch: str = torch.__version__
    triton: str = field(default_factory=triton_version)
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def row(
    kernel: str, mode: str, metric: str, shape: str, values: Sequence[float], device: str = "cpu"
) -> dict[str, Any]:
    """Return a row with the percentiles of `values`."""
    p20, p50, p80 = percentiles(values)
    return asdict(Row(kernel, mode, metric, shape, p20, p50, p80, device=device_name(device)))


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile, interpolated."""
    p20, p50, p80 = torch.quantile(torch.tensor(values, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.8]).double())
    return float(p20), float(p50), float(p80)


def write_json(path: str | None, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a file, one JSON object a line; do nothing where `path` is None."""
    if path is not None:
        with Path(path).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in rows)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str | None = None) -> None:
    """Print a table; the first column is text, the others are right-aligned."""
    view = Table(title=title, caption=caption, box=box.SIMPLE_HEAVY, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        view.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for line in rows:
        view.add_row(*map(str, line))
    console.print(view)


def progress(quiet: bool = False) -> Progress:
    """Return a progress bar for a known number of jobs."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet,
    )


def machine_line(device: str = "cpu") -> str:
    """Return one line that says on what this ran."""
    parts = [device_name(device), f"{torch.get_num_threads()} threads", f"Python {platform.python_version()}"]
    parts += [
        f"torch {torch.__version__}",
        f"Triton {triton_version() or 'not installed'}",
        f"commit {commit() or '?'}",
    ]
    return ", ".join(parts)


def mib(nbytes: float) -> str:
    """Return bytes as MiB in words."""
    return f"{nbytes / 2**20:,.0f} MiB"
