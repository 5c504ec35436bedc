"""How a stack of layers runs as chosen: in stages, between which a layer must be complete."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedrnn.backends import Choice
from fusedrnn.backends.base import PLAIN, ChunkedBackend, Variant, stage_depth
from fusedrnn.backends.onednn import OneDNN
from fusedrnn.cells import CellSpec, States, Weights
from fusedrnn.chunking import Plan, Stack, tasks
from fusedrnn.layout import SequenceLayout
from fusedrnn.offloading import OffloadHooks
from fusedrnn.offloading.resident import ResidentStack
from fusedrnn.sequence import run


def run_choice(
    cell: CellSpec,
    choice: Choice,
    x: Tensor,
    states: States,
    layers: Sequence[Weights],
    layout: SequenceLayout,
    *,
    directions: int = 1,
    dropout: float = 0.0,
    reverse: bool = False,
    resets: Tensor | None = None,
    variant: Variant = PLAIN,
    seeds: Tensor | None = None,
    offload: OffloadHooks | None = None,
    sums: Mapping[int, Tensor] | None = None,
) -> tuple[States, States]:
    """Run a stack of layers by whom and how it was chosen.

    Args:
        cell: What each layer computes.
        choice: Who runs it, and how.
        x: Input [T, B, I], or rows [rows, I] where the layout is packed.
        states: Initial states, each [layers * directions, B, width].
        layers: Weights, layer by layer, forward before reverse.
        layout: Where the rows lie.
        directions: 1, or 2 for bidirectional layers.
        dropout: Probability of dropout between layers; 0 when evaluating.
        reverse: With one direction: run from the last step to the first.
        resets: bool [T, B], true where the states start anew before a step, or None.
        variant: How the recurrence departs from the cell's equations.
        seeds: int64 [layers * directions], from which zoneout is drawn, or None.
        offload: Who looks after what is saved; None where it stays where it is.
        sums: Sums of the gradients of weights by id(weight), to be added to; see `fusedrnn.functional.run_layers`.

    Returns:
        The outputs and the final states.
    """
    if isinstance(choice.backend, OneDNN) and choice.save == "gates" and not reverse:
        y, states = choice.backend.run_whole(x, states, list(layers), directions, dropout)
        return (y,), states
    run_stage = partial(_eager, cell, choice, layout, resets, offload, sums)
    return run_stages(x, states, layers, directions, dropout, reverse, variant, seeds, run_stage)


def run_stages(
    x: Tensor,
    states: States,
    layers: Sequence[Weights],
    directions: int,
    dropout: float,
    reverse: bool,
    variant: Variant,
    seeds: Tensor | None,
    run_stage: Callable[..., tuple[States, States]],
) -> tuple[States, States]:
    """Run the layers in stages: chunks pass through all layers of a stage before the next chunk starts."""
    depth = stage_depth(len(layers), directions, dropout)
    finals = []
    out: States = (x,)
    for first in range(0, len(layers), depth * directions):
        last = first + depth * directions
        parts = [tuple(layers[k : k + depth]) for k in range(first, last, depth)]
        reverses = [reverse] if directions == 1 else [False, True]
        own = variant if last == len(layers) else replace(variant, cells=False)
        drawn = None if seeds is None else seeds[first:last]
        out, after = run_stage(parts, reverses, own, drawn, out[0], tuple(state[first:last] for state in states))
        finals.append(after)
        if dropout and last < len(layers):
            out = (F.dropout(out[0], dropout, training=True),)
    if len(finals) == 1:
        return out, finals[0]
    return out, tuple(map(torch.cat, zip(*finals, strict=True)))


def plan_stage(
    cell: CellSpec,
    choice: Choice,
    layout: SequenceLayout,
    resets: Tensor | None,
    parts: list[tuple[Weights, ...]],
    reverses: list[bool],
    variant: Variant,
    seeds: Tensor | None,
) -> Plan:
    """Return the plan of one stage, without a stack."""
    made = tasks(cell, parts, reverses, layout, choice.save, resets, variant, seeds)
    return Plan(made, choice.backend, choice.chunk, older=choice.older)


def _eager(
    cell: CellSpec,
    choice: Choice,
    layout: SequenceLayout,
    resets: Tensor | None,
    offload: OffloadHooks | None,
    sums: Mapping[int, Tensor] | None,
    parts: list[tuple[Weights, ...]],
    reverses: list[bool],
    variant: Variant,
    seeds: Tensor | None,
    x: Tensor,
    states: States,
) -> tuple[States, States]:
    """Run one stage through the autograd function."""
    plan = plan_stage(cell, choice, layout, resets, parts, reverses, variant, seeds)
    stack: Stack = ResidentStack(x.device)
    if offload is not None and isinstance(choice.backend, ChunkedBackend):
        stack = offload.stack(x.device, plan.expected_bytes(states))
    running = None if sums is None else tuple(sums.get(id(weight)) for weight in plan.weights)
    return run(replace(plan, stack=stack, sums=running), x, states)
