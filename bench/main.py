"""The tour that `make bench` takes: train, then the two tables."""

import argparse
from importlib import import_module
from typing import Any

from fusedrnn.bench._report import console

TOUR = {
    "train": ["--compare", "--steps", "30"],
    "long": [],
    "setup": [],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")


SMALL = {
    "train": ["--length", "100", "--steps", "2", "--batch", "2", "--hidden", "8"],
    "long": ["--batch", "2", "--units", "8", "--lengths", "4", "8", "--repeats", "1"],
    "setup": ["--batch", "2", "--units", "8", "--lengths", "1", "4"],
}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the commands one after another and return their rows."""
    rows = []
    for name, options in (SMALL if args.small else TOUR).items():
        module = import_module(f"fusedrnn.bench.{name}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        own = parser.parse_args(options)
        console.rule(name)
        rows += module.run(argparse.Namespace(**(vars(args) | vars(own))))
    return rows
