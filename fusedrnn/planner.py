"""What a training step will take, said before it runs: memory, time, and the way that fits a budget."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from fusedrnn._checks import budget_bytes, require_choice, require_chunk, size
from fusedrnn.backends import Choice, lengths_of, mixes, steps_of
from fusedrnn.backends.base import Call, onednn_allowed, tf32_allowed
from fusedrnn.budget import Seconds, seconds_of, ways, within
from fusedrnn.cells import CELLS
from fusedrnn.choice import choose
from fusedrnn.machine import PRESETS, Machine, machine
from fusedrnn.memory import footprint
from fusedrnn.offloading import OffloadConfig
from fusedrnn.offloading.config import process_memory
from fusedrnn.offloading.forecast import Forecast, forecast

_MUCH = 1 << 50
_MOST_CHUNKS = 2000
"""Chunks that the scheduler is run for at most; longer sequences are planned in larger pieces."""


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Args:
        choice: Backend, what is saved, and the chunks.
        device_bytes: Most bytes of the device's memory that the step takes.
        host_bytes: Most bytes of pinned host memory.
        disk_bytes: Most bytes in the file of the disk tier.
        moved_bytes: Bytes that leave the device, and as many come back.
        seconds: Seconds of the step.
        overhead: Part by which moving bytes makes it longer; 0 where nothing moves.
        longest: Timesteps of the longest sequence that fits this way.
        fits: Whether this one does.
    """

    choice: Choice
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    moved_bytes: int
    seconds: Seconds
    overhead: float
    longest: int
    fits: bool

    @property
    def name(self) -> str:
        """What is saved, in words."""
        return self.choice.name


@dataclass(frozen=True)
class StepPlan:
    """What a training step takes, in each of the ways in which it can run; printed, it is a table.

    Args:
        call: The step.
        machine: Where it runs.
        limit: Bytes that it may take of the device's memory.
        ways: The save modes, and the mix of two that is best; the quickest that fits comes first.
        reason: Why that is.
    """

    call: Call
    machine: Machine
    limit: int
    ways: tuple[Way, ...]
    reason: str

    @property
    def best(self) -> Way:
        """The quickest way that fits, or the one that needs least where none does."""
        return self.ways[0]

    @property
    def fits(self) -> bool:
        """Whether there is a way that fits."""
        return self.best.fits

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: a heading, then a row for each way."""
        columns: dict[str, list[str]] = {
            "save": [way.name for way in self.ways],
            "chunk": [str(way.choice.chunk) for way in self.ways],
            "memory": [size(way.device_bytes) + ("" if way.fits else " (too much)") for way in self.ways],
        }
        if any(way.moved_bytes for way in self.ways):
            columns["host"] = [size(way.host_bytes) for way in self.ways]
            columns["disk"] = [size(way.disk_bytes) for way in self.ways]
            columns["moved"] = [size(way.moved_bytes) for way in self.ways]
            columns["overhead"] = [f"{way.overhead:.0%}" for way in self.ways]
        columns["seconds"] = [f"{way.seconds.total:.3g}" for way in self.ways]
        columns["us per T"] = [f"{way.seconds.total / self.call.T * 1e6:.4g}" for way in self.ways]
        columns["longest T"] = [f"{way.longest:,}" for way in self.ways]
        return [tuple(columns), *zip(*columns.values(), strict=True)]

    def __str__(self) -> str:
        """Return the table as text."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        head = f"{self.call}; backend {self.best.choice.backend.name!r} on {self.machine.name} ({self.machine.source})"
        return "\n".join([head, *lines, self.reason])


def plan(
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
    *,
    length: int,
    batch: int,
    bidirectional: bool = False,
    proj_size: int = 0,
    dropout: float = 0.0,
    cell: str = "lstm",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | Machine = "cpu",
    save: str = "auto",
    chunk: int | str = "auto",
    backend: str = "auto",
    offload: bool | OffloadConfig = False,
    memory_budget: int | str | None = None,
) -> StepPlan:
    """Say what a training step will take, without running it.

    Memory is counted: everything that the layer allocates in one forward and backward pass, the gradients of its input
    and weights included, above what is in use before; not what the loss takes (the gradient of the output), nor what an
    allocator rounds up. Time comes from what `fusedrnn-bench calibrate` measured on this machine, or from published
    figures and assumed efficiencies; `machine.source` says which. With `offload`, the scheduler itself runs the step on
    a device that only keeps the time.

    Args:
        input_size: Width of the input.
        hidden_size: Number of hidden units.
        num_layers: Number of layers.
        length: Timesteps T.
        batch: Batch size B.
        bidirectional: Whether there are two directions.
        proj_size: Width of the output, 0 for that of the hidden state.
        dropout: Probability of dropout between layers.
        cell: "lstm", "gru" or "layer_norm_lstm".
        dtype: Element type.
        device: "cpu", "cuda" or "cuda:N" for a device of this machine, or a preset such as "h100".
        save: As for `fusedrnn.LSTM`; "auto" compares all modes and the best mix of two.
        chunk: As for `fusedrnn.LSTM`.
        backend: As for `fusedrnn.LSTM`.
        offload: Whether activations move off the device, and how.
        memory_budget: Most bytes of the device's memory that the step may take, or a string such as "2GiB"; None for
            all that the device has.

    Raises:
        ValueError: If an argument is not among its choices.
        RuntimeError: If no backend can run the step; the message has every backend's reasons.
    """
    require_choice("cell", cell, tuple(CELLS))
    require_choice("save", save, ("auto", *CELLS[cell].modes))
    require_chunk(chunk)
    sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
    for name, value in (sizes | {"length": length, "batch": batch}).items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}")
    budget, where = budget_bytes(memory_budget), machine(device)
    call = Call(
        T=length,
        B=batch,
        I=input_size,
        H=hidden_size,
        P=proj_size or hidden_size,
        layers=num_layers,
        directions=2 if bidirectional else 1,
        dtype=dtype,
        device=where.device,
        gpu=where.info,
        tf32=where.device == "cuda" and tf32_allowed(),
        onednn=onednn_allowed(),
        cell=CELLS[cell],
        dropout=float(dropout),
    )
    limit = budget or where.memory or process_memory()
    config = (OffloadConfig() if offload else None) if isinstance(offload, bool) else offload
    if config is not None and where.name in PRESETS and isinstance(config.host_limit, str):
        # A percentage is of the memory of the machine at hand, which is another one.
        config = replace(config, host_limit=_MUCH)
    chosen = choose(call, backend, save, chunk, offload=config)
    modes = chosen.backend.saves if save == "auto" else (save,)
    choices = [Choice(chosen.backend, mode, steps_of(chosen.backend, call, chunk), "") for mode in modes]
    if save == "auto" and config is None:
        choices += [way for way in ways(call, chosen.backend, save, choices[0].chunk, limit, where) if way.older[0]]
    if save == "auto" and config is not None and mixes(chosen.backend):
        # What the link does not hide may be computed again instead.
        first, count = choices[0], len(lengths_of(call, choices[0].chunk))
        choices += [first._replace(older=(count * part // 4, modes[-1])) for part in (1, 2, 3) if count * part // 4]
        choices.append(chosen)
    if budget is not None:
        with suppress(ValueError):
            choices.append(within(call, (chosen.backend,), save, chunk, budget))
    distinct = {(choice.save, choice.older, choice.chunk): choice for choice in choices}
    found = [_way(call, choice, where, limit, config) for choice in distinct.values()]
    found.sort(key=lambda way: (not way.fits, way.seconds.total if way.fits else way.device_bytes))
    mixed = [way for way in found if way.choice.older[0]]
    found = [way for way in found if way not in mixed[1:]]
    reason = _reason(found, limit)
    if save == "auto" and budget is None and config is None:
        reason += f'. By itself, save="auto" takes {chosen.name}: {chosen.reason}'
    return StepPlan(call, where, limit, tuple(found), reason)


def _reason(found: Sequence[Way], limit: int) -> str:
    best = found[0]
    if not best.fits:
        return (
            f"nothing fits {size(limit)}: {best.name} needs least, {size(best.device_bytes)}, and would fit with at "
            f"most {best.longest:,} timesteps. Stream the sequence, make the batch smaller, or offload"
        )
    others = [way for way in found[1:] if way.fits]
    text = f"{best.name} is best: the quickest of what fits {size(limit)}"
    if others:
        text += f" ({others[0].seconds.total / best.seconds.total - 1:.0%} ahead of {others[0].name})"
    large = [way.name for way in found if not way.fits]
    return text + (f"; too large: {', '.join(large)}" if large else "")


def _way(call: Call, choice: Choice, where: Machine, limit: int, config: OffloadConfig | None) -> Way:
    """Return what a step takes that is saved in one way."""
    taken, seconds = footprint(call, choice), seconds_of(call, choice, where)
    # All sizes are linear in the number of steps.
    per_step = (footprint(replace(call, T=2 * call.T), choice).peak - taken.peak) / call.T
    if config is None or not taken.saved:
        longest = int(call.T + (limit - taken.peak) / per_step)
        return Way(choice, taken.peak, 0, 0, 0, seconds, 0.0, max(0, longest), taken.peak <= limit)
    outer, saved_per_step = taken.peak - taken.saved, taken.saved / call.T
    longest = int((limit - outer + config.host_bytes()) / saved_per_step)
    if per_step > saved_per_step:
        longest = min(longest, int(call.T * limit / outer))
    try:
        found = _forecast(call, choice, taken.saved, seconds, config, where, limit, outer)
    except torch.OutOfMemoryError:
        return Way(choice, taken.peak, config.host_bytes(), 0, 0, seconds, 0.0, max(0, longest), False)
    actual = Seconds(found.forward, found.backward)
    return Way(
        choice,
        device_bytes=outer + found.peak,
        host_bytes=found.host_peak,
        disk_bytes=found.counters.disk_peak,
        moved_bytes=found.moved,
        seconds=actual,
        overhead=max(0.0, actual.total / seconds.total - 1),
        longest=max(0, longest),
        fits=outer + found.peak <= limit,
    )


def _forecast(
    call: Call,
    choice: Choice,
    saved: int,
    seconds: Seconds,
    config: OffloadConfig,
    where: Machine,
    limit: int,
    outer: int,
) -> Forecast:
    """Run the scheduler on a step's chunks, beside `outer` bytes that are not in them."""
    lengths = lengths_of(call, choice.chunk) * call.stages
    merged = -(-len(lengths) // _MOST_CHUNKS)
    steps = [sum(lengths[k : k + merged]) for k in range(0, len(lengths), merged)]
    sizes = [max(1, round(saved * n / sum(lengths))) for n in steps]
    parts = [(seconds.forward * n / sum(lengths), seconds.backward * n / sum(lengths)) for n in steps]
    forward, backward = zip(*parts, strict=True)
    with warnings.catch_warnings():
        # What the scheduler would warn of is in the plan.
        warnings.simplefilter("ignore", RuntimeWarning)
        return forecast(
            sizes,
            forward,
            backward,
            config=config,
            memory=None if config.occupancy else limit,
            other=0 if config.occupancy else outer,
            bytes_per_second=where.link_bytes_per_second,
            latency=where.link_latency,
            disk_bytes_per_second=where.disk_bytes_per_second,
            direct=call.device == "cpu",
            steps=2,
        )
