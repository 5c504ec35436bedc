"""The layers as an operator of `torch.library`: torch.compile and torch.export take it whole, whatever the length.

The operator's results are the output, the final states, and what the backward pass reads again, as plain tensors; a
second operator computes the gradients from them. Backends that let autograd record have no part in it.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Variant, gpu_of, tf32_allowed
from fusedrnn.cells import CELLS, CellSpec, States, Weights
from fusedrnn.choice import choose
from fusedrnn.chunking import Plan, tasks
from fusedrnn.layout import SequenceLayout
from fusedrnn.offloading.resident import ResidentStack
from fusedrnn.sequence import backward_pass, forward_pass


def run(
    cell: CellSpec,
    parts: list[tuple[Weights, ...]],
    reverses: list[bool],
    resets: Tensor | None,
    variant: Variant,
    seeds: Tensor | None,
    x: Tensor,
    states: States,
    backend: str,
    save: str,
    chunk: int | str,
) -> tuple[States, States]:
    """Compute a stack of layers, or both directions of one, as `fusedrnn.sequence.run` does, in one operator.

    Args:
        cell: What each layer computes.
        parts: Weights of the layers, per direction.
        reverses: Per direction, whether time runs backwards.
        resets: bool [T, B], true where the states start anew before a step, or None.
        variant: How the recurrence departs from the cell's equations.
        seeds: int64 [directions * layers], from which zoneout is drawn, or None.
        x: Input [T, B, I].
        states: Initial states, each [directions * layers, B, width].
        backend: As for `fusedrnn.LSTM`.
        save: As for `fusedrnn.LSTM`.
        chunk: As for `fusedrnn.LSTM`.

    Returns:
        The outputs [T, B, directions * width] and the final states.
    """
    layers = [weights for part in parts for weights in part]
    flat = [weight for weights in layers for weight in weights if weight is not None]
    present = [weight is not None for weights in layers for weight in weights]
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *states, *flat))
    steps = 0 if isinstance(chunk, str) else chunk
    options = cell.name, present, reverses, variant.clip, variant.zoneout, variant.cells, backend, save, steps, grad
    results = torch.ops.fusedrnn.layers(x, list(states), flat, resets, seeds, *options)
    n = 1 + variant.cells
    return tuple(results[:n]), tuple(results[n : n + len(states)])


def _plan(
    x: Tensor,
    flat: list[Tensor],
    resets: Tensor | None,
    seeds: Tensor | None,
    cell: str,
    present: list[bool],
    reverses: list[bool],
    clip: float | None,
    zoneout: float,
    cells: bool,
    backend: str,
    save: str,
    steps: int,
    grad: bool,
) -> Plan:
    """Choose who runs the operator, as for an eager call, among the backends that write their own backward pass."""
    tensors = iter(flat)
    weights = [next(tensors) if there else None for there in present]
    width = len(Weights._fields)
    layers = [Weights(*weights[k : k + width]) for k in range(0, len(weights), width)]  # type: ignore[arg-type]
    call = Call(
        T=int(x.shape[0]),
        B=int(x.shape[1]),
        I=int(x.shape[2]),
        H=int(layers[0].hidden_size),
        P=int(layers[0].output_size),
        layers=len(layers) // len(reverses),
        directions=len(reverses),
        dtype=x.dtype,
        device=x.device.type,
        grad=grad,
        gpu=gpu_of(x.device),
        tf32=x.is_cuda and tf32_allowed(),
        recorded=False,
        cell=CELLS[cell],
        resets=resets is not None,
        variant=Variant(clip, zoneout, cells),
    )
    choice = choose(call, backend, save, steps or "auto")
    layout = SequenceLayout(call.T, call.B)
    depth = call.layers
    parts = [tuple(layers[k : k + depth]) for k in range(0, len(layers), depth)]
    made = tasks(CELLS[cell], parts, reverses, layout, choice.save, resets, call.variant, seeds)
    stack = ResidentStack(x.device) if grad else None
    return Plan(made, choice.backend, choice.chunk, stack, older=choice.older)


@torch.library.custom_op("fusedrnn::layers", mutates_args=())
def _layers(
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    resets: Tensor | None,
    seeds: Tensor | None,
    cell: str,
    present: list[bool],
    reverses: list[bool],
    clip: float | None,
    zoneout: float,
    cells: bool,
    backend: str,
    save: str,
    steps: int,
    grad: bool,
) -> list[Tensor]:
    """Return the outputs [T, B, directions * width], the final states, and the chunks' buffers."""
    plan = _plan(x, weights, resets, seeds, cell, present, reverses, clip, zoneout, cells, backend, save, steps, grad)
    out, finals, _ = forward_pass(plan, x, tuple(states))
    shaped = [rows.view(*x.shape[:2], -1) for rows in out]
    return [*shaped, *finals, *(plan.stack.take() if plan.stack else [])]


@_layers.register_fake
def _layers_fake(
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    resets: Tensor | None,
    seeds: Tensor | None,
    cell: str,
    present: list[bool],
    reverses: list[bool],
    clip: float | None,
    zoneout: float,
    cells: bool,
    backend: str,
    save: str,
    steps: int,
    grad: bool,
) -> list[Tensor]:
    plan = _plan(x, weights, resets, seeds, cell, present, reverses, clip, zoneout, cells, backend, save, steps, grad)
    shown = states[: plan.tasks[0].outputs]
    out = [state.new_empty(*x.shape[:2], len(reverses) * state.shape[-1]) for state in shown]
    out += [torch.empty_like(state, memory_format=torch.contiguous_format) for state in states]
    entered = plan.states(0, tuple(states))
    sizes = [plan.slot_bytes(task, chunk.rows, entered) for _, task, chunk in plan.chunks()] if grad else []
    return out + [x.new_empty(size, dtype=torch.uint8) for size in sizes]


@torch.library.custom_op("fusedrnn::layers_backward", mutates_args=())
def _layers_backward(
    grads: list[Tensor],
    x: Tensor,
    out: list[Tensor],
    states: list[Tensor],
    buffers: list[Tensor],
    weights: list[Tensor],
    resets: Tensor | None,
    seeds: Tensor | None,
    cell: str,
    present: list[bool],
    reverses: list[bool],
    clip: float | None,
    zoneout: float,
    cells: bool,
    backend: str,
    save: str,
    steps: int,
    needs_x: bool,
    needs: list[bool],
) -> list[Tensor]:
    """Return the gradients of the input (if it needs one), of the states, and of the weights that need one."""
    plan = _plan(
        x, weights, resets, seeds, cell, present, reverses, clip, zoneout, cells, backend, save, steps, grad=True
    )
    stack = plan.stack
    assert isinstance(stack, ResidentStack)
    stack.give(buffers)
    dx = x.new_empty(plan.layout.rows, x.shape[2]) if needs_x else None
    rows = tuple(each.view(plan.layout.rows, -1) for each in out)
    dout, dfinals = tuple(grads[: len(out)]), tuple(grads[len(out) :])
    dstates, sums = backward_pass(
        plan, x, rows, tuple(states), [*stack.handles()], dout, dfinals, dx, tuple(needs), keep=True
    )
    return [*([dx.view(x.shape)] if dx is not None else []), *dstates, *(total for total in sums if total is not None)]


@_layers_backward.register_fake
def _layers_backward_fake(
    grads: list[Tensor],
    x: Tensor,
    out: list[Tensor],
    states: list[Tensor],
    buffers: list[Tensor],
    weights: list[Tensor],
    resets: Tensor | None,
    seeds: Tensor | None,
    cell: str,
    present: list[bool],
    reverses: list[bool],
    clip: float | None,
    zoneout: float,
    cells: bool,
    backend: str,
    save: str,
    steps: int,
    needs_x: bool,
    needs: list[bool],
) -> list[Tensor]:
    wanted = [weight for weight, needed in zip(weights, needs, strict=True) if needed]
    like = [*([x] if needs_x else []), *states, *wanted]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, states, weights, resets, seeds, *options, _ = inputs
    n, n_out = len(states), 1 + options[5]
    ctx.save_for_backward(x, resets, seeds, *weights, *states, *output[:n_out], *output[n_out + n :])
    ctx.options, ctx.counts = options, (len(weights), n, n_out)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, resets, seeds, *rest = ctx.saved_tensors
    saved = iter(rest)
    weights, states, out = (list(islice(saved, count)) for count in ctx.counts)
    like = [*out, *states]
    given = [torch.zeros_like(t) if grad is None else grad for grad, t in zip(grads[: len(like)], like, strict=True)]
    needs_x, needs = ctx.needs_input_grad[0], [bool(needed) for needed in ctx.needs_input_grad[2]]
    found = iter(
        torch.ops.fusedrnn.layers_backward(
            given, x, out, states, list(saved), weights, resets, seeds, *ctx.options, needs_x, needs
        )
    )
    dx = next(found) if needs_x else None
    dstates = [next(found) for _ in states]
    return dx, dstates, [next(found) if needed else None for needed in needs], *[None] * 12


_layers.register_autograd(_backward, setup_context=_setup_context)
