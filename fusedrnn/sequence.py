"""The autograd function: chunks forward, chunks backward. It knows neither which cell runs nor how it is computed."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.base import (
    ChunkedBackend,
    Gradients,
    OptionalStates,
    RecordingBackend,
    Task,
    Workspace,
)
from fusedrnn.backends.reference import Reference
from fusedrnn.backends.rows import views
from fusedrnn.cells import States, Weights, state_dtype
from fusedrnn.chunking import Handle, Plan, Slot
from fusedrnn.layout import Chunk, SequenceLayout


def _parts(plan: Plan, task: Task, rows: int, states: States, buffer: Tensor) -> tuple[Tensor, States]:
    """Return the parts of a slot's buffer: the backend's, and the states, shaped like `states`."""
    own = plan.own_bytes(task, rows, states)
    return buffer[:own], tuple(views(buffer[own:], ((state.shape, state.dtype) for state in states)))


def run(plan: Plan, x: Tensor, states: States) -> tuple[States, States]:
    """Compute the layers of a plan.

    Args:
        plan: What to compute and how.
        x: Input [T, B, I], or rows [rows, I] where the layout is packed.
        states: Initial states, each [tasks * layers, B, width]; the first in the dtype of x, the others in
            `state_dtype`.

    Returns:
        The states over time that are an output ([T, B, directions * width] or rows [rows, directions * width]) and the
        final states.
    """
    if isinstance(plan.backend, RecordingBackend) and plan.tasks[0].save == "gates":
        return _recorded(plan, plan.backend, x, states)
    flat, present = _flatten(plan)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *states, *flat)):
        results = _Sequence.apply(plan, present, len(states), x, *states, *flat)
        out, finals = results[: -len(states)], results[-len(states) :]
    else:
        out, finals, _ = forward_pass(replace(plan, stack=None), x, states)
    return tuple(rows.view(*x.shape[:-1], rows.shape[-1]) for rows in out), finals


def _recorded(plan: Plan, backend: RecordingBackend, x: Tensor, states: States) -> tuple[States, States]:
    """Run the tasks of a plan for autograd to record."""
    results = [backend.run(task, x, plan.states(index, states)) for index, task in enumerate(plan.tasks)]
    if len(results) == 1:
        return results[0]
    outputs, finals = zip(*results, strict=True)
    out = tuple(torch.cat(rows, -1) for rows in zip(*outputs, strict=True))
    return out, tuple(map(torch.cat, zip(*finals, strict=True)))


def _flatten(plan: Plan) -> tuple[list[Tensor], list[list[bool]]]:
    """Return the weights that are there, and which those are."""
    present = [[weight is not None for weight in layer] for task in plan.tasks for layer in task.layers]
    return plan.weights, present


def _unflatten(flat: list[Any], present: list[list[bool]]) -> list[list[Any]]:
    """Undo `_flatten`."""
    items = iter(flat)
    return [[next(items) if there else None for there in layer] for layer in present]


def forward_pass(plan: Plan, x: Tensor, states: States) -> tuple[States, States, list[Handle]]:
    """Run the chunks.

    Returns:
        The rows of the states that are an output, the final states, and the handle of what each chunk saved.
    """
    assert isinstance(plan.backend, ChunkedBackend)
    layout, work = plan.layout, Workspace(x.device)
    out = tuple(
        state.new_empty(layout.rows, len(plan.tasks) * state.shape[-1]) for state in states[: plan.tasks[0].outputs]
    )
    after = [plan.states(index, states) for index in range(len(plan.tasks))]
    handles: list[Handle] = []
    for index, task, chunk in plan.chunks():
        slot, own = _reserve(plan, task, chunk, after[index]) if plan.stack else (None, None)
        rows = tuple(plan.columns(index, each)[chunk.start : chunk.stop] for each in out)
        after[index] = plan.backend.forward_chunk(task, chunk, layout.take(x, chunk), after[index], rows, own, work)
        if plan.stack:
            # A view of the buffer would count as another user of it.
            own = None
            handles.append(plan.stack.push(slot))
    return out, after[0] if len(after) == 1 else tuple(map(torch.cat, zip(*after, strict=True))), handles


def _reserve(plan: Plan, task: Task, chunk: Chunk, states: States) -> tuple[Slot, Tensor]:
    """Reserve a chunk's slot and save the states before it; return the slot and the part that is the backend's."""
    assert plan.stack
    slot = plan.stack.reserve(plan.slot_bytes(task, chunk.rows, states))
    own, before = _parts(plan, task, chunk.rows, states, slot.buffer)
    for part, state in zip(before, states, strict=True):
        part.copy_(state)
    return slot, own


class _Sequence(torch.autograd.Function):
    """Inputs: plan, which weights there are, number of states, x, the states, the weights."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, present: list[list[bool]], n_states: int, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        states, flat = tensors[:n_states], list(tensors[n_states:])
        plan = plan.with_layers(_layers(flat, present))
        assert plan.stack
        out, finals, handles = forward_pass(plan, x, states)
        reads = plan.reads(any(ctx.needs_input_grad[4 + n_states :]))[: 1 + len(out)]
        # Everything that lives until the backward pass goes through autograd, which frees it right after and shows it
        # to saved-tensor hooks; the handles hold no tensors.
        kept = [*states, *flat, *plan.stack.take()]
        read = [tensor for tensor, needed in zip((x, *out), reads, strict=True) if needed]
        ctx.save_for_backward(*read, *kept)
        ctx.plan, ctx.handles = plan.with_layers([]), handles
        ctx.reads, ctx.present, ctx.n_states, ctx.shape = reads, present, n_states, x.shape
        ctx.set_materialize_grads(False)
        return *out, *finals

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        x, *out = (next(saved) if read else None for read in ctx.reads)
        states = tuple(islice(saved, ctx.n_states))
        flat = list(islice(saved, sum(map(sum, ctx.present))))
        plan = ctx.plan.with_layers(_layers(flat, ctx.present))
        dout = tuple(None if rows is None else rows.view(*ctx.shape[:-1], -1) for rows in douts[: len(out)])
        dfinals = douts[len(out) :]
        if torch.is_grad_enabled():
            grads = _differentiable_backward(ctx, plan, x, states, flat, (*dout, *dfinals))
            return None, None, None, *grads
        needs_x, needs = ctx.needs_input_grad[3], ctx.needs_input_grad[4 + ctx.n_states :]
        dx = states[0].new_empty(plan.layout.rows, ctx.shape[-1]) if needs_x else None
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        plan.stack.give(list(saved))
        try:
            dstates, sums = backward_pass(plan, x, tuple(out), states, ctx.handles, dout, dfinals, dx, needs, keep)
        finally:
            plan.stack.take()
        return None, None, None, None if dx is None else dx.view(ctx.shape), *dstates, *sums


def _layers(flat: list[Tensor], present: list[list[bool]]) -> list[Weights]:
    return [Weights(*layer) for layer in _unflatten(flat, present)]


def backward_pass(
    plan: Plan,
    x: Tensor | None,
    out: OptionalStates,
    states: States,
    handles: list[Handle],
    dout: OptionalStates,
    dfinals: OptionalStates,
    dx: Tensor | None,
    needs: tuple[bool, ...],
    keep: bool,
) -> tuple[States, list[Tensor | None]]:
    """Run the chunks from the last to the first.

    Args:
        plan: As in the forward pass.
        x: Input, or None where it is not read.
        out: Rows of the states that are an output [rows, directions * width], each None where not read.
        states: The initial states.
        handles: What each chunk pushed.
        dout: Gradients of the outputs, [T, B, directions * width] or rows, each None for zero.
        dfinals: Gradients of the final states, each None for zero.
        dx: Where the gradient of the input goes, rows [rows, I], or None where it needs none.
        needs: For each weight that is there, whether it needs a gradient.
        keep: Whether what is saved must stay as it is.

    Returns:
        The gradients of the initial states, and those of the weights, None where not needed or added to `plan.sums`.
    """
    assert isinstance(plan.backend, ChunkedBackend)
    dtype, layout = states[0].dtype, plan.layout
    flat, present = _flatten(plan)
    running = plan.sums or (None,) * len(flat)
    sums = [
        (torch.zeros_like(weight, dtype=state_dtype(dtype)) if total is None else total) if needed else None
        for weight, total, needed in zip(flat, running, needs, strict=True)
    ]
    layers, depth = _unflatten(sums, present), len(present) // len(plan.tasks)
    dstates: States = tuple(
        torch.zeros_like(state) if given is None else given.clone(memory_format=torch.contiguous_format)
        for state, given in zip(states, dfinals, strict=True)
    )
    before = [plan.states(index, states) for index in range(len(plan.tasks))]
    after = [plan.states(index, dstates) for index in range(len(plan.tasks))]
    work = Workspace(states[0].device)
    with nullcontext() if states[0].is_meta else torch.autocast(states[0].device.type, enabled=False):
        for (index, task, chunk), handle in reversed(list(zip(plan.chunks(), handles, strict=True))):
            own, entered = _parts(plan, task, chunk.rows, before[index], handle.get(writable=not keep))
            after[index] = plan.backend.backward_chunk(
                task,
                chunk,
                _take(layout, x, chunk),
                tuple(None if t is None else plan.columns(index, t)[chunk.start : chunk.stop] for t in out),
                entered,
                own,
                tuple(None if t is None else _adjacent(layout.take(plan.columns(index, t), chunk)) for t in dout),
                after[index],
                Gradients(
                    layers=layers[index * depth : (index + 1) * depth],
                    dx=_take(layout, dx, chunk),
                    # The last direction comes first here.
                    add=index + 1 < len(plan.tasks),
                ),
                keep,
                work,
            )
            # Views of the buffer would count as other users of it.
            del own, entered
            if not keep:
                handle.release()
    dstates = after[0] if len(after) == 1 else tuple(map(torch.cat, zip(*after, strict=True)))
    return dstates, [
        None if total is None or total is known else total.to(dtype) for total, known in zip(sums, running, strict=True)
    ]


def _take(layout: SequenceLayout, tensor: Tensor | None, chunk: Chunk) -> Tensor | None:
    return None if tensor is None else layout.take(tensor, chunk)


def _adjacent(rows: Tensor) -> Tensor:
    """Return rows whose columns are neighbours in memory, as kernels need them; those of an expanded scalar are not."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _differentiable_backward(
    ctx: Any,
    plan: Plan,
    x: Tensor | None,
    states: States,
    flat: list[Tensor],
    douts: OptionalStates,
) -> list[Tensor | None]:
    """Compute the gradients by recorded operations, so that they can be differentiated again.

    The reference computes the sequence once more with autograd recording all of it: derivatives of any order, at the
    memory that this takes.
    """
    if x is None:
        raise RuntimeError(
            'a derivative of second order needs the input, which save="gates" does not keep when all weights are '
            'frozen: use save="hidden", or backend="reference"'
        )
    # Views, so that no input is reached through another one's history.
    inputs = [tensor.view_as(tensor) for tensor in (x, *states, *flat)]
    n = 1 + ctx.n_states
    plan = plan.with_layers(_layers(inputs[n:], ctx.present))
    out, finals = _recorded(plan, Reference(), inputs[0], tuple(inputs[1:n]))
    pairs = [(each, given) for each, given in zip((*out, *finals), douts, strict=True) if given is not None]
    wanted = [tensor for tensor, needed in zip(inputs, ctx.needs_input_grad[3:], strict=True) if needed]
    outputs, grads = zip(*pairs, strict=True)
    results = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(results) if needed else None for needed in ctx.needs_input_grad[3:]]
