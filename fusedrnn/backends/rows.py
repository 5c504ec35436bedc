"""What the flows of all cells do with the rows of a chunk: lay out its slot, find states, multiply."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, gpu_of
from fusedrnn.layout import Steps

_GATES_BYTES = 4 << 20
_LEAST_STEPS = 32
_ALIGNMENT = 256


@dataclass(frozen=True)
class Field:
    """One tensor in a slot: [rows, width] of one layer."""

    name: str
    layer: int
    width: int
    dtype: torch.dtype
    start: int
    stop: int


def lay_out(rows: int, wanted: Iterable[tuple[str, int, int, torch.dtype]]) -> list[Field]:
    """Lay out a slot for tensors of `rows` rows, each given as (name, layer, width, dtype)."""
    fields: list[Field] = []
    stop = 0
    for name, layer, width, dtype in wanted:
        start = aligned(stop)
        stop = start + rows * width * dtype.itemsize
        fields.append(Field(name, layer, width, dtype, start, stop))
    return fields


def find(fields: list[Field], name: str, layer: int, buffer: Tensor | None) -> Tensor | None:
    """Return a field's tensor [rows, width] in the slot's buffer, or None where the slot has no such field."""
    for field in fields:
        if (field.name, field.layer) == (name, layer) and buffer is not None:
            return buffer[field.start : field.stop].view(field.dtype).view(-1, field.width)
    return None


def chunk_steps(call: Call) -> int:
    """Return how many steps have pre-activations of about 4 MiB, and at least 32."""
    return max(_LEAST_STEPS, _GATES_BYTES // max(1, call.cell.gates * call.B * call.H * call.dtype.itemsize))


def _previous(rows: Tensor, initial: Tensor, before: int, n_before: int, n: int) -> Tensor:
    """Return the states [n, ...] that a step of n rows follows: a view where they lie together."""
    if n <= n_before:
        return rows[before : before + n]
    if not n_before:
        return initial[:n]
    return torch.cat((rows[before : before + n_before], initial[n_before:n]))


def aligned(nbytes: int) -> int:
    """Round a size up to where the next tensor of a slot may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def views(buffer: Tensor, like: Iterable[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """Return tensors of these shapes and dtypes that lie one after another in a slot, each aligned."""
    found, start = [], 0
    for shape, dtype in like:
        stop = start + shape.numel() * dtype.itemsize
        found.append(buffer[start:stop].view(dtype).view(shape))
        start = aligned(stop)
    return found


def walk(
    steps: Steps, resets: Tensor | None, *states: tuple[Tensor, Tensor], backward: bool = False
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the rows of each step, and the states that they follow, zero where they start anew.

    Args:
        steps: The steps of a chunk.
        resets: bool [rows, 1], true where the states start anew before the row, or None.
        *states: The rows of each state, which may be written as the walk goes on, and what it was before the chunk.
        backward: Whether the last step comes first.
    """
    spans = list(steps.spans())
    pairs = list(zip([(0, 0), *spans], spans, strict=False))
    for (before, n_before), (offset, n) in reversed(pairs) if backward else pairs:
        stop = offset + n
        followed = [_previous(rows, initial, before, n_before, n) for rows, initial in states]
        yield slice(offset, stop), [anew(state, resets, offset, stop) for state in followed]


def linked(steps: Steps, rows: Tensor, initial: Tensor, resets: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
    """Yield runs of rows (start, stop) with what they follow [stop - start, ...], zero where the states start anew."""
    for start, stop, source, from_state in steps.links:
        before = (initial if from_state else rows)[source : source + stop - start]
        yield start, stop, anew(before, resets, start, stop)


def anew(states: Tensor, resets: Tensor | None, start: int, stop: int) -> Tensor:
    """Return the states that rows `start .. stop` follow, zero where they start anew."""
    return states if resets is None else states.masked_fill(resets[start:stop], 0)


def pass_back_(gradient: Tensor, resets: Tensor | None, clip: float | None, rows: slice) -> None:
    """Turn the gradient [n, ...] of what the rows follow into that of the step before, in place."""
    if resets is not None:
        gradient.masked_fill_(resets[rows], 0)
    if clip is not None:
        gradient.clamp_(-clip, clip)


def finals(rows: Tensor, initial: Tensor, steps: Steps) -> Tensor:
    """Return the states after the chunk, a tensor of its own."""
    after = initial.clone()
    for start, stop, row in steps.finals:
        after[start:stop] = rows[row : row + stop - start]
    return after


def project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b to `out`."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b to `total` in its own dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif gpu_of(a.device) is not None:
        total.add_(torch.mm(a.t(), b, out_dtype=total.dtype))
    else:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
