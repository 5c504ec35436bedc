"""The ways to run a call, how long each takes, and the quickest whose peak of memory keeps to a budget."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fusedrnn._checks import size
from fusedrnn.backends import Backend, Choice, lengths_of, mixes, steps_of
from fusedrnn.backends.base import Call
from fusedrnn.backends.mix import Mode, best_mix
from fusedrnn.costs import fresh_bytes, fresh_seconds, step_seconds
from fusedrnn.machine import Machine, machine_with
from fusedrnn.memory import footprint

_CHUNK_LAUNCHES = 40
"""Operators that a chunk costs in both passes beside its steps and products."""
_LEAST_CHUNK = 8


class Seconds(NamedTuple):
    """Seconds of the two passes of a step."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Seconds of both."""
        return self.forward + self.backward


def seconds_of(call: Call, choice: Choice, where: Machine) -> Seconds:
    """Return the seconds of a step, nothing being moved off the device.

    Args:
        call: The step.
        choice: Who runs it, and how it is saved.
        where: The machine.
    """
    lengths = lengths_of(call, choice.chunk)
    count, save = choice.older
    share = sum(lengths[:count]) / max(1, sum(lengths))
    total = [0.0, 0.0]
    for mode, part in ((choice.save, 1 - share), (save, share)):
        if part:
            found = step_seconds(where, call, choice.backend.name, mode)
            total[0] += call.T * part * found.forward
            total[1] += call.T * part * found.backward
    total[0] += fresh_seconds(where, fresh_bytes(call, choice.backend.name, choice.save))
    # Steps include what chunks of the usual length cost beside them.
    usual = lengths_of(call, steps_of(choice.backend, call, "auto"))
    more = max(0, len(lengths) - len(usual)) * _CHUNK_LAUNCHES * where.launch_latency * call.layers
    return Seconds(total[0] + more / 3, total[1] + more * 2 / 3)


def ways(call: Call, backend: Backend, save: str, steps: int, limit: int, where: Machine) -> Iterator[Choice]:
    """Yield every mode alone, and the mix of two that is the quickest of those whose peak fits a limit."""
    modes = backend.saves if save == "auto" else (save,)
    single = [Choice(backend, mode, steps, "") for mode in modes]
    yield from single
    if save != "auto" or not mixes(backend):
        return
    taken = [footprint(call, choice) for choice in single]
    lengths = lengths_of(call, steps)
    speeds = [seconds_of(call, choice, where).total for choice in single]
    total = sum(lengths)
    known = [Mode(c.save, f.saved / total, s / total) for c, f, s in zip(single, taken, speeds, strict=True)]
    # Scratch is that of the mode that needs more of it.
    mix = best_mix(known, lengths, limit - max(f.peak - f.saved for f in taken))
    if mix is None or not mix.older[0]:
        return
    choice = Choice(backend, mix.save, steps, "", mix.older)
    while footprint(call, choice).peak > limit and choice.older[0] < len(lengths):
        choice = choice._replace(older=(choice.older[0] + 1, mix.older[1]))
    if choice.older[0] < len(lengths):
        yield choice


@lru_cache(maxsize=256)
def within(call: Call, usable: Sequence[Backend], save: str, chunk: int | str, budget: int) -> Choice:
    """Choose the quickest way whose peak keeps to a budget.

    Args:
        call: The call.
        usable: The backends that can run it, the preferred first.
        save: A save mode, or "auto".
        chunk: Timesteps per chunk, or "auto".
        budget: Most bytes that the step may take; see `footprint`.

    Raises:
        ValueError: If none does; the message names the smallest budget that would do.
    """
    where = machine_with(call.gpu)
    least: tuple[int, Choice] | None = None
    for backend in usable:
        found = []
        for steps in _chunk_lengths(backend, call, chunk):
            for choice in ways(call, backend, save, steps, budget, where):
                peak = footprint(call, choice).peak
                if least is None or peak < least[0]:
                    least = peak, choice
                if peak <= budget:
                    found.append((seconds_of(call, choice, where).total, peak, choice))
        if found:
            _, peak, choice = min(found, key=lambda way: way[:2])
            return choice._replace(reason=f"a step takes {size(peak)}, the budget is {size(budget)}")
    assert least is not None
    peak, choice = least
    raise ValueError(
        f"`memory_budget` must be at least {peak} bytes ({size(peak)}) for this call ({call}), got {budget} "
        f"({size(budget)}); that is backend={choice.backend.name!r}, save={choice.save!r}, chunk={choice.chunk}. Raise "
        "it, stream the sequence (`chunk_loss`, `stream`), or make the batch smaller"
    )


def _chunk_lengths(backend: Backend, call: Call, chunk: int | str) -> Iterator[int]:
    """Yield the lengths of chunks to try, the longest first."""
    steps = steps_of(backend, call, chunk)
    yield steps
    while chunk == "auto" and mixes(backend) and steps > _LEAST_CHUNK:
        steps = max(_LEAST_CHUNK, steps // 2)
        yield steps
