"""How long a timestep takes: from what was measured on a machine, else from its figures by a formula.

Per layer and direction, with G gates, a step multiplies B x P by P x GH (the recurrent product) and B x I by I x GH
(the input's). The backward pass has two products of each, and a save mode that computes gates again one more. Products
of all steps at once run at the speed of large ones; the recurrent product, and its counterpart on the way back, at that
of small ones, and no step takes less than its latency or than the traffic of its memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import torch

from fusedrnn.backends.base import Call
from fusedrnn.machine import Machine, Sample

_NUMBERS_PER_UNIT = 11
"""Numbers per unit that a step of the forward pass moves: its gates three times (the input's product, the recurrent
one added, read again), c twice, h twice and what is between, less what stays in caches."""
_LAUNCHES = {"triton_step": 2, "torch_step": 15, "reference": 40}
"""Launches of kernels, or torch's operators, in a step of the forward pass; other backends have many steps in one."""
_STEEPEST = {"B": 1.0, "H": 2.0}
"""Beyond what was measured, seconds grow at most with this power: of B all costs of a step, of H its products."""
_LEAST = 0.5
"""The part of a measured step that is left at least where the input is narrower than the layer: with an input as wide,
the input's products are half of all, and the faster ones."""

_KEPT_BYTES = 32 << 20
"""The largest block that glibc keeps when it is freed (DEFAULT_MMAP_THRESHOLD_MAX of malloc.c)."""
_ONEDNN_BLOCK, _ONEDNN_TOUCHED = (9, 6), (6, 3)
"""Numbers per row of the block in which oneDNN keeps what it recorded, and of those that a pass touches: per unit, and
per column of the wider of input and output. With gates of a size that is not kept, it also has them transposed in both
passes. (oneDNN of torch 2.13, by its calls of mmap and its page faults at six sizes.)"""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds per timestep of all layers and directions of a call.

    Args:
        forward: Of the forward pass.
        backward: Of the backward pass, with what it computes again.
    """

    forward: float
    backward: float


def step_seconds(machine: Machine, call: Call, backend: str, save: str) -> StepSeconds:
    """Return what a timestep of a call takes, averaged over a chunk, with its share of the products of whole chunks.

    Where the machine has samples of the backend, mode and cell, they are interpolated in the logarithms of B and H, and
    corrected for inputs of another width by samples of such, else by the speed of large products. Resets, clipping and
    zoneout are not counted.

    Args:
        machine: The machine.
        call: The call.
        backend: Name of the backend that runs it.
        save: Its save mode.
    """
    samples = _samples(machine.measured, call, backend, save)
    layers = [
        _measured(machine, call, save, samples, width) if samples else _estimated(machine, call, backend, save, width)
        for width in _widths(call)
    ]
    forward, backward = (call.directions * sum(parts) for parts in zip(*layers, strict=True))
    return StepSeconds(forward, backward)


def fresh_bytes(call: Call, backend: str, save: str) -> int:
    """Return the bytes that a pass, forward and backward, maps anew, its outputs and gradients of inputs included.

    On the CPU that is every block of 32 MiB and more: glibc gives those back when they are freed, and the kernel maps
    and zeroes them anew, page by page, when they are touched. Slots of chunks are smaller.

    Args:
        call: The call.
        backend: Name of the backend that runs it.
        save: Its save mode.
    """
    if call.device != "cpu":
        return 0
    row = call.T * call.B * call.dtype.itemsize
    whole = (backend, save) == ("onednn", "gates")
    stages = call.layers if whole else call.stages
    width = call.directions * call.P
    blocks = [row * width] * (2 * stages - 1) + [row * call.I]
    fresh = sum(nbytes for nbytes in blocks if nbytes >= _KEPT_BYTES)
    for inputs in _widths(call) if whole else ():
        gates, wider = row * call.cell.gates * call.H, max(inputs, call.H)
        block, touched = (
            row * (units * call.H + columns * wider) for units, columns in (_ONEDNN_BLOCK, _ONEDNN_TOUCHED)
        )
        fresh += call.directions * (touched if block >= _KEPT_BYTES else 0)
        fresh += call.directions * (2 * gates if gates >= _KEPT_BYTES else 0)
    return fresh


def fresh_seconds(machine: Machine, nbytes: int) -> float:
    """Return what it takes to map memory that the allocator has not kept, see `fresh_bytes`; nothing on a GPU.

    Args:
        machine: The machine.
        nbytes: Bytes that are mapped and touched.
    """
    return machine.fresh_seconds_per_byte * nbytes


def _widths(call: Call) -> list[int]:
    """Return the width of each layer's input."""
    return [call.I, *[call.directions * call.P] * (call.layers - 1)]


def _products(call: Call, width: int) -> tuple[float, float]:
    """Return the FLOPs of a step's recurrent product, with that of the projection, and of an input of some width."""
    per_column = 2.0 * call.B * call.cell.gates * call.H
    projection = 2.0 * call.B * call.H * call.P if call.P != call.H else 0.0
    return per_column * call.P + projection, per_column * width


def _estimated(machine: Machine, call: Call, backend: str, save: str, width: int) -> tuple[float, float]:
    """Return the seconds of a layer's step, forward and backward, by a formula: latency, FLOPs or bytes."""
    flops = machine.flops_per_second(call.dtype, call.tf32)
    recurrent, inputs = _products(call, width)
    large = 1 / (machine.eta_product * flops)
    units, itemsize = call.B * call.H, call.dtype.itemsize
    traffic = _NUMBERS_PER_UNIT * units * itemsize / machine.memory_bytes_per_second
    weights = call.cell.gates * call.H * call.P * itemsize / machine.memory_bytes_per_second
    if backend in _LAUNCHES:
        latency = _LAUNCHES[backend] * machine.launch_latency
    else:
        # The weights stay on the chip.
        latency, weights = machine.step_latency, 0.0
    product = recurrent / (machine.eta_recurrent * flops)
    forward = max(latency, product, weights + traffic) + inputs * large
    backward = max(2 * latency, product, weights + 2 * traffic) + (recurrent + 2 * inputs) * large
    if save != "gates" and backend == "onednn":
        backward += forward  # torch's operator can only run the chunk again.
    elif save != "gates":
        backward += (recurrent + inputs) * large + (traffic if save == "hidden" else 0.0)
    return forward, backward


def _samples(measured: Iterable[Sample], call: Call, backend: str, save: str) -> list[Sample]:
    """Return the samples of a backend, mode and cell in the dtype whose size is nearest to the call's."""
    found = [s for s in measured if (s.cell, s.backend, s.save) == (call.cell.name, backend, save)]
    word = str(call.dtype).removeprefix("torch.")

    def distance(name: str) -> tuple[int, bool]:
        return abs(getattr(torch, name).itemsize - call.dtype.itemsize), name != word

    nearest = min({sample.dtype for sample in found if sample.I == sample.H}, key=distance, default="")
    return [sample for sample in found if sample.dtype == nearest]


def _measured(machine: Machine, call: Call, save: str, samples: Sequence[Sample], width: int) -> tuple[float, float]:
    """Return the seconds of a layer's step, forward and backward, from samples."""
    square = [sample for sample in samples if sample.I == sample.H]
    flops = machine.flops_per_second(call.dtype, call.tf32)
    recurrent, inputs = _products(call, width)
    same = _products(replace(call, P=call.H), call.H)[0]
    small, large = ((recurrent - same) / (eta * flops) for eta in (machine.eta_recurrent, machine.eta_product))
    again = 0 if save == "gates" else 1
    # What is wider than the layer costs more than what is as wide gains: its rows are copied at that width.
    others = [sample for sample in samples if (sample.I - sample.H) * (width - call.H) > 0]
    others = others or [sample for sample in samples if sample.I != sample.H]
    found = []
    for way, count, projected in (("forward", 1, small), ("backward", 2 + again, small + (1 + again) * large)):
        seconds = _at(square, way, call.B, call.H)
        slopes = [
            (getattr(other, way) - _at(square, way, other.B, other.H))
            / (2.0 * other.B * call.cell.gates * other.H * (other.I - other.H))
            for other in others
        ]
        per_flop = max(0.0, sum(slopes) / len(slopes)) if slopes else count / (machine.eta_product * flops)
        found.append(max(_LEAST * seconds, seconds + projected + per_flop * (inputs - same)))
    return found[0], found[1]


def _at(samples: Iterable[Sample], way: str, B: int, H: int) -> float:
    """Interpolate seconds, "forward" or "backward", between samples; for each B there may be other H."""
    rows: dict[int, list[tuple[int, float]]] = {}
    for sample in samples:
        rows.setdefault(sample.B, []).append((sample.H, getattr(sample, way)))
    return _interpolate([(size, _interpolate(row, H, _STEEPEST["H"])) for size, row in rows.items()], B, _STEEPEST["B"])


def _interpolate(points: Iterable[tuple[int, float]], at: int, steepest: float) -> float:
    """Interpolate between points (size, seconds) in the logarithms of both; beyond them along the nearest two.

    Args:
        points: At least one, sizes all different.
        at: The size.
        steepest: Most power of the size with which seconds may grow beyond the points; they do not fall there.
    """
    known = sorted((log(size), log(seconds)) for size, seconds in points)
    if len(known) == 1:
        return exp(known[0][1])
    x = log(at)
    index = min(max(sum(size <= x for size, _ in known), 1), len(known) - 1)
    (x0, y0), (x1, y1) = known[index - 1 : index + 1]
    slope = (y1 - y0) / (x1 - x0)
    if x < x0:
        return exp(y0 + min(max(slope, 0.0), steepest) * (x - x0))
    if x > x1:
        return exp(y1 + min(max(slope, 0.0), steepest) * (x - x1))
    return exp(y0 + slope * (x - x0))
