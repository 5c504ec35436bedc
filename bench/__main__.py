"""`fusedrnn-bench` and `python -m fusedrnn.bench`: every benchmark is a subcommand."""

import argparse
import re
import sys
from importlib import import_module
from importlib.util import find_spec

import torch

from fusedrnn.bench._measure import NumericsError
from fusedrnn.bench._report import console, machine_line, write_json

COMMANDS = {
    "main": "train briefly, then long, then setup (what `make bench` runs)",
    "train": "train a character model on one long text, in one backward pass of up to 100,000 characters",
    "long": "time and memory against the length of the sequence, beside torch.nn.LSTM",
    "setup": "time to the first result against the length, beside an unrolled graph",
    "shapes": "time and memory at five sizes, as ratios to torch.nn.LSTM, and with layer_norm",
    "stream": "a million steps: input from a file, a loss per chunk, beside torch.nn.LSTM by proportion",
    "packed": "sequences of very different lengths, beside torch.nn.LSTM on packed and on padded input",
    "kernels": "registers, shared memory and floors of the Triton kernels, compiled without a GPU",
    "plan": "what a step will take of memory and time, in every way, before it runs",
    "offload": "what offloading costs, on a simulated device and where there is one on a GPU",
    "timeline": "the streams of an offloaded pass as a picture",
    "doctor": "what this machine has for fusedrnn, how fast it moves bytes, and what is wrong with it",
    "calibrate": "measure this machine's speeds and what a timestep takes on it, and save them for `fusedrnn.plan`",
    "gpu-check": "everything that a GPU can show: correctness, then speed and memory beside peers",
}


def _module(command: str) -> str:
    return f"fusedrnn.bench.{command.replace('-', '_')}"


def _device(text: str) -> str:
    """Return a device's name after checking that this machine has it."""
    match, count = re.fullmatch(r"cpu|cuda(?::(\d+))?", text), torch.cuda.device_count()
    if match is None or (text != "cpu" and int(match[1] or 0) >= count):
        raise argparse.ArgumentTypeError(f"must be cpu, or cuda or cuda:N of the {count} CUDA devices, got {text!r}")
    return text


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="fusedrnn-bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        if find_spec(_module(name)) is None:
            continue
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", metavar="FILE", help="append the results to FILE, one JSON object a line")
        command.add_argument("--device", type=_device, default="cpu", help="cpu or cuda (default: %(default)s)")
        command.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
        command.add_argument("--quiet", action="store_true", help="show no progress bars")
        import_module(_module(name)).add_arguments(command)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_args(argv)
    console.print(machine_line(args.device), style="dim")
    try:
        rows = import_module(_module(args.command)).run(args)
    except NumericsError as error:
        console.print(f"error: {error}", style="bold red")
        return 1
    write_json(args.json, rows)
    return getattr(args, "status", 0)


if __name__ == "__main__":
    sys.exit(main())
