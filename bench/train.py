"""Train a character model on one long English text that every Python carries: `pydoc_data.topics`.

Each step is one backward pass over whole sequences of `--length` characters. The loss falls, or something is wrong.
Under `torchrun` the batch is divided over the processes, and gradients are averaged.
"""

import argparse
import math
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
import torch.utils.checkpoint
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.bench._measure import (
    OURS,
    TORCH,
    Job,
    NumericsError,
    check_numerics,
    peak_bytes,
    resident_bytes,
    synchronize,
)
from fusedrnn.bench._report import console, mib, row, table
from fusedrnn.cells import LSTM

EMBEDDING = 32
OFFLOADING = f"{OURS}, offloading"


@dataclass(frozen=True)
class Config:
    """A training run.

    Args:
        kernel: `TORCH` or `OURS`.
        length: Characters per sequence.
        steps: Optimizer steps.
        batch: Sequences per step.
        hidden: Hidden units.
        layers: Layers.
        lr: Learning rate of Adam.
        seed: Seed of weights and of the places in the text.
        device: Device.
        options: Further arguments of `fusedrnn.LSTM`.
    """

    kernel: str
    length: int
    steps: int
    batch: int
    hidden: int
    layers: int
    lr: float
    seed: int
    device: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Args:
        bits: Bits per character of each step.
        seconds: Seconds of each step.
        peak: Peak memory above the start, in bytes.
        moved: Bytes that went to the host, over all steps.
        sample: What the model writes afterwards.
    """

    bits: list[float]
    seconds: list[float]
    peak: int
    moved: int
    sample: str


@dataclass(frozen=True)
class Limit:
    """A source of occupancy: the memory that this process uses on `device`, as a fraction of `nbytes`."""

    device: str
    nbytes: int

    def __call__(self) -> float:
        """Return the fraction."""
        used = torch.cuda.memory_allocated(self.device) if self.device.startswith("cuda") else resident_bytes()
        return min(1.0, used / self.nbytes)


@cache
def text() -> tuple[Tensor, str]:
    """Return the text as indices [characters], and its alphabet."""
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(joined)))
    index = {character: k for k, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in joined]), alphabet


class Model(nn.Module):
    """Embedding, LSTM, linear."""

    def __init__(self, config: Config, symbols: int):
        super().__init__()
        self.embedding = nn.Embedding(symbols, EMBEDDING)
        if config.kernel == TORCH:
            self.rnn: nn.LSTM = nn.LSTM(EMBEDDING, config.hidden, config.layers)
        else:
            self.rnn = fusedrnn.LSTM(EMBEDDING, config.hidden, config.layers, **config.options)
        self.head = nn.Linear(config.hidden, symbols)

    def forward(self, indices: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return logits [T, B, symbols] and the state for indices [T, B]."""
        y, state = self.rnn(self.embedding(indices), state)
        return self.head(y), state

    def loss(self, indices: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats, its logits computed piece by piece and not kept.

        At 100,000 characters the logits would take more memory than the layer itself.
        """
        y, _ = self.rnn(self.embedding(indices))
        total = y.new_zeros(())
        for piece, target in zip(y.split(2048), targets.split(2048), strict=True):
            total = total + torch.utils.checkpoint.checkpoint(self._piece, piece, target, use_reentrant=False)
        return total / targets.numel()

    def _piece(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten(), reduction="sum")


def train(config: Config, report: Callable[[int, float, float, int], None] = lambda *_: None) -> Result:
    """Train and return what came of it.

    Args:
        config: The run.
        report: Called after each step with its number, bits per character, characters per second and peak bytes.

    Returns:
        The result.
    """
    data, alphabet = text()
    if len(data) <= config.length:
        raise SystemExit(f"--length must be below the {len(data):,} characters of the text, got {config.length:,}")
    torch.manual_seed(config.seed)
    model = Model(config, len(alphabet)).to(config.device)
    rank, ranks, wrapped = _distributed(model)
    if config.batch < ranks:
        raise SystemExit(f"--batch must be at least the number of processes, {ranks}, got {config.batch}")
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    places = torch.Generator().manual_seed(config.seed)
    data = data.to(config.device)
    bits, seconds = [], []

    def step() -> None:
        starts = torch.randint(len(data) - config.length, (config.batch,), generator=places).tolist()
        window = torch.stack([data[s : s + config.length + 1] for s in starts[rank::ranks]], 1)
        optimizer.zero_grad()
        # Processes count equally in the average of gradients, but may have unequal shares of the batch.
        loss = wrapped(window[:-1], window[1:]) * (window.shape[1] * ranks / config.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if ranks > 1:
            torch.distributed.all_reduce(loss.detach_(), op=torch.distributed.ReduceOp.SUM)
            loss = loss / ranks
        bits.append(float(loss.detach()) / math.log(2))

    peak = 0
    for number in range(config.steps):
        start = time.perf_counter()
        if number == 0:
            peak = peak_bytes(step, config.device)
        else:
            step()
            synchronize(config.device)
        seconds.append(time.perf_counter() - start)
        report(number + 1, bits[-1], config.batch * config.length / seconds[-1], peak)
    offloader = getattr(model.rnn, "offloader", None)
    moved = 0 if offloader is None else offloader.stats().spilled_bytes
    return Result(bits, seconds, peak, moved, sample(model, alphabet, config))


class _Loss(nn.Module):
    """The loss as a module's forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(indices, targets)


def _distributed(model: Model) -> tuple[int, int, nn.Module]:
    """Return this process's rank, their number, and the loss module, wrapped where torchrun started several."""
    module = _Loss(model)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, module
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo" if next(model.parameters()).device.type == "cpu" else "nccl")
    return (
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
        nn.parallel.DistributedDataParallel(module),
    )


@torch.no_grad()
def sample(model: Model, alphabet: str, config: Config, characters: int = 160, temperature: float = 0.7) -> str:
    """Let the model write."""
    generator = torch.Generator().manual_seed(config.seed)
    written = "The "
    indices = torch.tensor([[alphabet.index(character)] for character in written], device=config.device)
    logits, state = model(indices)
    for _ in range(characters):
        chances = torch.softmax(logits[-1, 0].float().cpu() / temperature, -1)
        index = torch.multinomial(chances, 1, generator=generator)
        written += alphabet[int(index)]
        logits, state = model(index[None].to(config.device), state)
    return written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument(
        "--length", type=int, default=5_000, help="characters in one backward pass (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden units (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="layers (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument(
        "--save", default="auto", choices=("auto", *LSTM.modes), help="save= of fusedrnn.LSTM (default: %(default)s)"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        choices=("auto", *BACKENDS["lstm"]),
        help="backend= of fusedrnn.LSTM (default: %(default)s)",
    )
    parser.add_argument("--compare", action="store_true", help="train torch.nn.LSTM from the same start beside it")
    parser.add_argument(
        "--offload",
        action="store_true",
        help="train once more with offloading and check that every loss is the same bit by bit; unless named otherwise "
        "with save=gates, on the CPU with backend=torch_step",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=1,
        metavar="MIB",
        help="with --offload: memory that counts as full (default: %(default)s, so that everything moves)",
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    check_numerics([Job(mode, 1, 1, 1, 1, device=args.device) for mode in ("torch", args.save)])
    found = {}
    with _bars(args) as bars:
        for name, config in _contenders(args).items():
            bar = bars.add_task(name, total=args.steps, bits=0.0, speed=0.0, peak="")
            found[name] = _run(
                config,
                lambda n, bits, speed, peak, bar=bar: bars.update(  # type: ignore[misc]
                    bar, completed=n, bits=bits, speed=speed, peak=mib(peak)
                ),
            )
    if args.offload and found[OFFLOADING].bits != found[OURS].bits:
        raise NumericsError(f"offloading changed the losses: {found[OFFLOADING].bits} instead of {found[OURS].bits}")
    if int(os.environ.get("RANK", "0")) > 0:
        return []
    return _show(args, found)


def _contenders(args: argparse.Namespace) -> dict[str, Config]:
    """Return what to train, by the name in the table."""
    options: dict[str, Any] = {"save": args.save, "backend": args.backend}
    if args.offload:
        options["save"] = "gates" if args.save == "auto" else args.save
        # What torch's own operator keeps is out of reach.
        options["backend"] = "torch_step" if args.backend == "auto" and args.device == "cpu" else args.backend
    sizes = (args.length, args.steps, args.batch, args.hidden, args.layers, args.lr, args.seed, args.device)
    found = {OURS: Config(OURS, *sizes, options)}
    if args.offload:
        limit = fusedrnn.OffloadConfig(occupancy=Limit(args.device, args.limit << 20))
        found[OFFLOADING] = Config(OURS, *sizes, options | {"offload": limit})
    if args.compare:
        found[TORCH] = Config(TORCH, *sizes)
    return found


def _show(args: argparse.Namespace, found: dict[str, Result]) -> list[dict[str, Any]]:
    """Print the table and a sample; return the rows."""
    shape = f"T={args.length} B={args.batch} I={EMBEDDING} H={args.hidden} L={args.layers} float32"
    rows, lines = [], []
    for kernel, result in found.items():
        mode = "torch" if kernel == TORCH else args.save + (", offload" if kernel == OFFLOADING else "")
        speeds = [args.batch * args.length / seconds for seconds in result.seconds[1:] or result.seconds]
        for metric, values in (
            ("bits_per_character", result.bits[-5:]),
            ("characters_per_second", speeds),
            ("peak_bytes", [result.peak]),
            ("moved_bytes_per_step", [result.moved / args.steps]),
        ):
            rows.append(row(TORCH if kernel == TORCH else OURS, mode, metric, shape, values, args.device))
        speed = rows[-3]["p50"]
        moved = mib(result.moved / args.steps)
        bits = f"{result.bits[0]:.3f}", f"{result.bits[-1]:.3f}"
        lines.append((kernel, *bits, f"{speed:,.0f}", mib(result.peak), moved))
    table(
        f"Character model: {args.length:,} characters in one backward pass, batch {args.batch}, {args.hidden} units",
        ("", "bits/char, first", "last", "characters/s", "peak", "to the host, per step"),
        lines,
        caption="memory above the start of the first step; each contender in a process of its own",
    )
    if args.offload:
        console.print(f"all {args.steps} losses are the same, bit by bit, with offloading and without", style="green")
    console.print("what it writes:", style="dim")
    console.print(found[OURS].sample, markup=False, highlight=False)
    return rows


@contextmanager
def _bars(args: argparse.Namespace) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[bits]:.3f} bits/char"),
        TextColumn("{task.fields[speed]:,.0f} char/s"),
        TextColumn("{task.fields[peak]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=args.quiet or int(os.environ.get("RANK", "0")) > 0) as bars:
        yield bars


def _run(config: Config, report: Callable[[int, float, float, int], None]) -> Result:
    """Train in a process of its own, or in this one where torchrun has started it for that."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return train(config, report)
    context = get_context("spawn")
    messages = context.Queue()
    process = context.Process(target=_child, args=(config, messages), daemon=True)
    process.start()
    while True:
        try:
            message = messages.get(timeout=1.0)
        except queue.Empty:
            if not process.is_alive():
                raise RuntimeError(f"training with {config.kernel} ended with status {process.exitcode}") from None
            continue
        if isinstance(message, Result):
            process.join()
            return message
        report(*message)


def _child(config: Config, messages: Any) -> None:
    messages.put(train(config, lambda *message: messages.put(message)))
