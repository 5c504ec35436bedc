"""The layers in plain torch: every float dtype, every device, differentiable to any order. Slow, and the meaning."""

from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.base import RECORDS, Call, RecordingBackend, Task
from fusedrnn.backends.zoneout import held_units, hold, of_rows
from fusedrnn.cells import States, Weights, state_dtype


class Reference(RecordingBackend):
    """Autograd records every step."""

    name = "reference"
    saves = ("gates",)

    def refusals(self, call: Call) -> list[str]:
        """Refuse nothing but to be part of a compiled operator."""
        return [] if call.recorded else [RECORDS]

    def run(self, task: Task, x: Tensor, states: States) -> tuple[States, States]:
        """Compute the whole sequence; see `RecordingBackend.run`."""
        finals: list[States] = []
        over_time: States = (x,)
        for index in range(len(task.layers)):
            over_time, after = self._layer(task, index, over_time[0], tuple(state[index] for state in states))
            finals.append(after)
        return over_time, tuple(map(torch.stack, zip(*finals, strict=True)))

    def _layer(self, task: Task, index: int, x: Tensor, states: States) -> tuple[States, States]:
        """Return a layer's states over time, as many as the last layer puts out, and the final ones."""
        layout, weights = task.layout, task.layers[index]
        dtypes = [state.dtype for state in states]
        xproj = task.cell.project(x, weights)
        states = (states[0], *(state.to(state_dtype(x.dtype)) for state in states[1:]))
        held = held_units(task, index, 0, layout.rows)
        if not layout.rows:
            if layout.steps:
                states = _step(task, weights, xproj[0], states, of_rows(held, slice(0)))
            empty = tuple(
                xproj.narrow(-1, 0, state.shape[-1]).to(state.dtype) + (0 * state if layout.steps else 0)
                for state in states[: task.outputs]
            )
            return empty, _cast(states, dtypes)
        chunk = layout.chunks(layout.steps, task.reverse)[0]
        outputs: list[States] = []
        for time, (offset, batch) in zip(_times(layout.steps, task.reverse), chunk.steps.spans(), strict=True):
            rows = slice(offset, offset + batch)
            if layout.batch_sizes is None:
                anew = None if task.resets is None else task.resets[rows]
                states = _step(task, weights, xproj[time], states, of_rows(held, rows), anew)
                outputs.append(states[: task.outputs])
                continue
            active = _step(task, weights, xproj[rows], tuple(s[:batch] for s in states), of_rows(held, rows))
            outputs.append(active[: task.outputs])
            states = tuple(torch.cat((new, old[batch:])) for new, old in zip(active, states, strict=True))
        if task.reverse:
            outputs.reverse()
        join = torch.stack if layout.batch_sizes is None else torch.cat
        return tuple(map(join, zip(*outputs, strict=True))), _cast(states, dtypes)


def _step(
    task: Task,
    weights: Weights,
    xproj: Tensor,
    states: States,
    held: Tensor | float | None,
    anew: Tensor | None = None,
) -> States:
    """Compute a step of the cell as the task varies it; states start anew where `anew` [n, 1] is true."""
    if task.variant.clip is not None:
        states = tuple(_Clipped.apply(state, task.variant.clip) for state in states)
    if anew is not None:
        states = tuple(state.masked_fill(anew, 0) for state in states)
    h, *others = task.cell.step(xproj, states, weights)
    return (h if held is None else hold(h, states[0], held)), *others


class _Clipped(torch.autograd.Function):
    """The identity, whose gradient is clipped elementwise; a gradient that is NaN stays so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: Tensor, bound: float) -> Tensor:
        return state.view_as(state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.bound, ctx.bound), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)


def _times(steps: int, reverse: bool) -> range:
    return range(steps)[::-1] if reverse else range(steps)


def _cast(states: States, dtypes: list[torch.dtype]) -> States:
    return tuple(state.to(dtype) for state, dtype in zip(states, dtypes, strict=True))
