"""Running a loop chunk by chunk, twice: of the first time only the states at the borders are kept."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

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


class _Surroundings:
    """What a cell's results depend on beyond its arguments: random numbers, autocast, default device."""

    def __init__(self, x: Tensor) -> None:
        self.type, self.device = x.device.type, torch.get_default_device()
        self.rng = torch.get_rng_state(), *get_device_states(x)
        self.autocast: dict[str, Any] | None = None
        if torch.amp.is_autocast_available(self.type):
            self.autocast = {
                "dtype": torch.get_autocast_dtype(self.type),
                "enabled": torch.is_autocast_enabled(self.type),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run what is inside as it would have run then, recorded by autograd; nothing of this remains afterwards."""
        host, devices, states = self.rng
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=self.type))
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.type, **self.autocast))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            torch.set_rng_state(host)
            set_device_states(devices, states, device_type=self.type)
            # A cast remembered from elsewhere would hide which tensor it is a copy of.
            torch.clear_autocast_cache()
            try:
                yield
            finally:
                torch.clear_autocast_cache()


def _captured(loop: Loop, xs: list[Tensor], state: list[Tensor]) -> dict[int, Tensor] | None:
    """Run the first step once, and find the leaves with gradients that the cell takes besides its arguments.

    Returns:
        The leaves by id, or None if the cell takes a tensor that has a history of its own.
    """
    first = loop.chunks[0]._replace(last=1)
    inputs = [_leaf(tensor) for tensor in (*(x[:1] for x in loop.pieces(xs)[0]), *state)]
    # Hooks around this one, the caller's, are not to see what is dropped right away.
    with _Surroundings(xs[0]).again(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        start = _now()
        columns, after = loop.run(first, *inputs)
    leaves, history = _reached([*(column[0] for column in columns), *after], start)
    for tensor in inputs:
        leaves.pop(id(tensor), None)
    return None if history else leaves


def _leaf(tensor: Tensor, needed: bool = True) -> Tensor:
    """Return the tensor without its history, as one whose gradient is wanted if it is needed and can exist."""
    return tensor.detach().requires_grad_(needed and _differentiable(tensor))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _now() -> int:
    """Return the number that autograd, which counts the operations of a thread, gave to the last one."""
    node = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    assert node is not None
    return node._sequence_nr()


def _reached(tensors: list[Tensor], start: int) -> tuple[dict[int, Tensor], bool]:
    """Return the leaves (by id) on which tensors depend, and whether operations numbered `start` or less are among it.

    Nothing before those operations is visited.
    """
    leaves = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None}
    seen = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    todo, history = list(seen), False
    while todo:
        node = todo.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            leaves[id(node.variable)] = node.variable
        elif node._sequence_nr() <= start:
            history = True
        else:
            for other, _ in node.next_functions:
                if other is not None and other not in seen:
                    seen.add(other)
                    todo.append(other)
    return leaves, history


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
            ctx.surroundings.append(_Surroundings(xs[0]))

        results = loop.unrecorded(xs, state, at_border)
        # Casts that autocast remembers from here have no history.
        torch.clear_autocast_cache()
        ctx.save_for_backward(*xs)
        # Saved, these could come back from the caller's hooks as other tensors than those that the cell holds.
        ctx.captured = [(leaf, leaf._version) for leaf in tensors[n_x + n_state :]]
        ctx.loop = loop
        # Neither views, which could not be changed in place, nor what the cell was given.
        results[len(results) - n_state :] = [final.clone() for final in results[len(results) - n_state :]]
        ctx.mark_non_differentiable(*(result for result in results if not _differentiable(result)))
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
        for leaf, version in ctx.captured:
            if leaf._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(leaf.shape)} that `cell` uses must stay as it was until the backward "
                    f"pass, got version {leaf._version} after {version}: it was modified by an inplace operation"
                )
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
            piece = [_leaf(x, dx is not None) for x, dx in zip(pieces[k], dxs, strict=True)]
            before = [_leaf(s) for s in ctx.borders[k].saved_tensors]
            with ctx.surroundings[k].again():
                start = _now()
                columns, after = loop.run(chunk, *piece, *before)
                results = [*(loop.stack(chunk, column) for column in columns), *after]
            _check_reached(results, start, [*piece, *before, *captured])
            # The sums so far come first, as if all steps were in one graph: the order decides the rounding.
            pairs = [
                (result, d)
                for result, d in zip((*captured, *results), (*dcaptured, *douts, *dstate), strict=True)
                if d is not None and result.requires_grad
            ]
            wanted = [leaf for leaf in (*piece, *before, *captured) if leaf.requires_grad]
            sums: dict[int, Tensor | None] = {}
            if pairs and wanted:
                outputs, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
                sums = dict(zip(map(id, wanted), found, strict=True))
            for dx, leaf in zip(dxs, piece, strict=True):
                if dx is not None and (d := sums.get(id(leaf))) is not None and loop.T:
                    dx[chunk.first : chunk.last] = d
            dstate = [sums.get(id(s)) for s in before]
            dcaptured = [sums.get(id(leaf)) for leaf in captured]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.borders.clear()
        return None, *dxs, *dstate, *dcaptured


def _check_reached(results: list[Tensor], start: int, known: list[Tensor]) -> None:
    """Raise RuntimeError if results depend on tensors with gradients that are not `known`."""
    leaves, history = _reached(results, start)
    for tensor in known:
        leaves.pop(id(tensor), None)
    if history or leaves:
        got = "with a history" if history else f"of shape {tuple(next(iter(leaves.values())).shape)}"
        raise RuntimeError(
            '`cell` must take the tensors that need gradients in its first step already with `save="recompute"`, got '
            f'another one {got} later: make it a parameter of `cell`, or use `save="all"`'
        )
