"""Running a loop chunk by chunk, twice: of the first time only the states at the borders are kept."""

from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedrnn.replay import (
    Surroundings,
    as_leaf,
    differentiable,
    gradients,
    now,
    reached,
    require_unchanged,
    unhooked,
)
from fusedrnn.stepping import Loop


def recompute(loop: Loop, cell: Any, xs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    """Run a loop; run its chunks again, from the last to the first, in the backward pass.

    Args:
        loop: The loop.
        cell: The cell in it, whose parameters get gradients if it is a module.
        xs: Inputs, each [T, B, ...].
        state: Initial state.

    Returns:
        Outputs, each [T, B, ...], then the final state.
    """
    captured = _captured(loop, xs, state)
    if captured is None:
        # `torch.utils.checkpoint` follows any history, at the price of a graph of all steps.
        return loop.recorded(xs, state, partial(checkpoint, loop.run, use_reentrant=False))
    if isinstance(cell, nn.Module):
        captured.update((id(weight), weight) for weight in cell.parameters() if weight.requires_grad)
    return list(_Recompute.apply(loop, *xs, *state, *captured.values()))


def _captured(loop: Loop, xs: list[Tensor], state: list[Tensor]) -> dict[int, Tensor] | None:
    """Run the first step once, and find the leaves with gradients that the cell takes besides its arguments.

    Returns:
        The leaves by id, or None if the cell takes a tensor that has a history of its own.
    """
    first = loop.chunks[0]._replace(last=1)
    inputs = [as_leaf(tensor) for tensor in (*(x[:1] for x in loop.pieces(xs)[0]), *state)]
    with Surroundings(xs[0]).again(), unhooked():
        start = now()
        columns, after = loop.run(first, *inputs)
    leaves, history = reached([*(column[0] for column in columns), *after], start)
    for tensor in inputs:
        leaves.pop(id(tensor), None)
    return None if history else leaves


class _Saved(torch.autograd.Function):
    """A node of no graph that saves tensors now, where saved-tensor hooks see them, and not with all others at the end.

    Only `saved_tensors` of the node is read; it has no backward pass.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


def _save(tensors: list[Tensor]) -> Any:
    """Save tensors; `saved_tensors` of what is returned gives them back."""
    anchor = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        return _Saved.apply(anchor, *(tensor.detach() for tensor in tensors)).grad_fn


class _Recompute(torch.autograd.Function):
    """Inputs: the loop, its inputs, its initial state, and the leaves that the cell takes besides."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, *tensors: Tensor) -> tuple[Tensor, ...]:
        n_x, n_state = loop.x_spec.num_leaves, loop.state_spec.num_leaves
        xs, state = list(tensors[:n_x]), list(tensors[n_x : n_x + n_state])
        ctx.borders, ctx.surroundings = [], []

        def at_border(state: list[Tensor]) -> None:
            ctx.borders.append(_save(state))
            ctx.surroundings.append(Surroundings(xs[0]))

        results = loop.unrecorded(xs, state, at_border)
        # Casts that autocast remembers from here have no history.
        torch.clear_autocast_cache()
        ctx.save_for_backward(*xs)
        # Saved, these could come back from the caller's hooks as other tensors than those that the cell holds.
        ctx.captured = [(leaf, leaf._version) for leaf in tensors[n_x + n_state :]]
        ctx.loop = loop
        # Neither views, which could not be changed in place, nor what the cell was given.
        results[len(results) - n_state :] = [final.clone() for final in results[len(results) - n_state :]]
        ctx.mark_non_differentiable(*(result for result in results if not differentiable(result)))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                '`save="recompute"` gives first derivatives only, got a backward pass with `create_graph=True`: use '
                '`save="all"`'
            )
        loop: Loop = ctx.loop
        n_state = loop.state_spec.num_leaves
        xs = list(ctx.saved_tensors)
        captured = [leaf for leaf, _ in ctx.captured]
        require_unchanged(ctx.captured, "`cell`")
        dys, dstate = grads[: len(grads) - n_state], list(grads[len(grads) - n_state :])
        dxs = [torch.zeros_like(x) if needed else None for x, needed in zip(xs, ctx.needs_input_grad[1:], strict=False)]
        dcaptured: list[Tensor | None] = [None] * len(captured)
        pieces = loop.pieces(xs)
        for k in reversed(range(len(pieces))):
            chunk = loop.chunks[k]
            # Without steps the one step that was run has no gradient of its output.
            douts = [None if dy is None or not loop.T else dy[chunk.first : chunk.last] for dy in dys]
            if all(d is None for d in (*douts, *dstate)):
                continue
            piece = [as_leaf(x, dx is not None) for x, dx in zip(pieces[k], dxs, strict=True)]
            before = [as_leaf(s) for s in ctx.borders[k].saved_tensors]
            with ctx.surroundings[k].again():
                start = now()
                columns, after = loop.run(chunk, *piece, *before)
                results = [*(loop.stack(chunk, column) for column in columns), *after]
            _check_reached(results, start, [*piece, *before, *captured])
            inputs = [*piece, *before, *captured]
            found = iter(gradients((*captured, *results), (*dcaptured, *douts, *dstate), inputs))
            for dx, d in zip(dxs, islice(found, len(piece)), strict=True):
                if dx is not None and d is not None and loop.T:
                    dx[chunk.first : chunk.last] = d
            dstate, dcaptured = list(islice(found, len(before))), list(found)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.borders.clear()
        return None, *dxs, *dstate, *dcaptured


def _check_reached(results: list[Tensor], start: int, known: list[Tensor]) -> None:
    """Raise RuntimeError if results depend on tensors with gradients that are not `known`."""
    leaves, history = reached(results, start)
    for tensor in known:
        leaves.pop(id(tensor), None)
    if history or leaves:
        got = "with a history" if history else f"of shape {tuple(next(iter(leaves.values())).shape)}"
        raise RuntimeError(
            '`cell` must take the tensors that need gradients in its first step already with `save="recompute"`, got '
            f'another one {got} later: make it a parameter of `cell`, or use `save="all"`'
        )
