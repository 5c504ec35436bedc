"""Zoneout (Krueger et al. 2016) of the outputs: in each step a unit keeps its value with probability p.

h_t = m h_{t-1} + (1 - m) h', where h' is what the cell computes, m is drawn while training and p in evaluation. Nothing
of m is stored: it is a function of a seed and of the number of the element in the sequence, so that it is the same in
the backward pass, and whatever the backend, the chunks and the save mode.
"""

import torch
from torch import Tensor

from fusedrnn.backends.base import Task

_GAMMA, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele, Lea, Flood 2014), as signed integers."""


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Return a seed [count] for each layer and direction of a call from torch's default generator of the device."""
    return torch.randint(1 << 62, (count,), device=device)


def seeds_from(seeds: Tensor, row: int, width: int) -> Tensor:
    """Return the seeds that draw for a sequence's rows, of `width` outputs, from `row` on what these draw there."""
    shift = row * width * _GAMMA & (1 << 64) - 1
    return seeds + (shift - (1 << 64) if shift >> 63 else shift)


def held_units(task: Task, layer: int, start: int, stop: int) -> Tensor | float | None:
    """Return m for rows `start .. stop` of the sequence: bool [rows, P], p in evaluation, None without zoneout."""
    p = task.variant.zoneout
    if not p or task.seeds is None:
        return p or None
    width = task.layers[layer].output_size
    bits = torch.arange(start * width, stop * width, device=task.seeds.device) * _GAMMA + task.seeds[layer]
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    # SplitMix64 has one more shift, which leaves the upper bits, and so this comparison, as they are.
    return (bits < int((p - 0.5) * 2.0**64)).view(-1, width)


def hold(new: Tensor, before: Tensor, held: Tensor | float) -> Tensor:
    """Return the outputs [n, P] of a step from what the cell computes and the outputs before."""
    return torch.lerp(new, before, held) if isinstance(held, float) else torch.where(held, before, new)


def split(grad: Tensor, held: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the shares [n, P] of what the cell computes and of the outputs before in the gradient of the outputs."""
    if isinstance(held, float):
        return grad * (1 - held), grad * held
    return grad.masked_fill(held, 0), grad.masked_fill(~held, 0)


def of_rows(held: Tensor | float | None, rows: slice) -> Tensor | float | None:
    """Return m for some of the rows."""
    return held[rows] if isinstance(held, Tensor) else held


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right; torch's own operator brings copies of the sign, which are cleared here."""
    return bits >> by & (1 << 64 - by) - 1
