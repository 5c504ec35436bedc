"""What this machine has for fusedrnn, how fast it moves bytes, and what is wrong with it.

Every check stands alone: one that breaks says so, and the others go on.
"""

import argparse
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fusedrnn.bench import _facts, _speeds, _support
from fusedrnn.bench._facts import Fact, Gpu
from fusedrnn.bench._report import console, progress

Checks = Mapping[str, Callable[[], list[Fact]]]
_ROOT = Path("/")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument(
        "--dir", default=tempfile.gettempdir(), help="folder whose disk is measured (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its facts as rows."""
    folder = Path(args.dir)
    if not folder.is_dir():
        raise SystemExit(f"--dir must be a folder that exists, got {args.dir}")
    found, broken = examine(_checks(folder), args.quiet)
    show(found)
    args.status = 1 if broken else 0
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return [{"section": name, **asdict(fact), "date": date} for name, facts in found.items() for fact in facts]


def _checks(folder: Path) -> Checks:
    gpus: list[Gpu] = []

    def devices() -> list[Fact]:
        gpus.extend(_facts.find_gpus())
        return _facts.devices(gpus)

    return {
        "devices": devices,  # First, since the others ask about them.
        "installed": partial(_facts.installed, _ROOT, gpus),
        "switches": partial(_facts.switches, os.environ, gpus),
        "processor": partial(_facts.processor, _ROOT, os.environ, gpus),
        "host memory": partial(_facts.memory, _ROOT, gpus),
        "backends": partial(_support.backends, gpus),
        "persistent kernels": partial(_support.fits, gpus),
        "transfer": partial(_speeds.transfer, gpus),
        "disk": partial(_speeds.disk, folder),
    }


def examine(checks: Checks, quiet: bool) -> tuple[dict[str, list[Fact]], list[str]]:
    """Run checks one after another.

    Args:
        checks: Functions that return facts, by name.
        quiet: Whether no progress is shown.

    Returns:
        The facts by check, and the names of checks that broke.
    """
    found: dict[str, list[Fact]] = {}
    broken = []
    with progress(quiet) as bar:
        task = bar.add_task("", total=len(checks))
        for name, check in checks.items():
            bar.update(task, description=name)
            try:
                found[name] = check()
            except Exception as error:
                # What is wrong with a machine is what is looked for, so anything may be raised.
                broken.append(name)
                text = "".join(traceback.format_exception_only(error)).strip()
                advice = "this check broke, the others stand: report it with its traceback, which --json writes"
                found[name] = [Fact(name, text, traceback.format_exc(), advice)]
            bar.advance(task)
    return found, broken


def show(found: Mapping[str, Sequence[Fact]]) -> None:
    """Print facts by section, then what to do about those that are bad."""
    width = max(len(fact.name) for facts in found.values() for fact in facts)
    bad = []
    for section, facts in found.items():
        console.print(f"\n{section}", style="bold")
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(width=width, overflow="fold")
        table.add_column(overflow="fold")
        for fact in facts:
            style = "yellow" if fact.advice else ""
            table.add_row(Text("!" if fact.advice else "", style), Text(fact.name, style or "cyan"), Text(fact.text))
            if fact.advice:
                bad.append((section, fact))
        console.print(table)
    console.print("\nwhat to do", style="bold")
    for section, fact in bad:
        console.print(Text.assemble(("! ", "yellow"), (f"{section}, {fact.name}: ", "yellow"), fact.advice))
    if not bad:
        console.print("nothing: no bad sign was found", style="green")
