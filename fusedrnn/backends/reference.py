"""The layers in plain torch: every float dtype, every device, differentiable to any order. Slow, and the meaning."""

import torch
from torch import Tensor

from fusedrnn.backends.base import RECORDS, Call, RecordingBackend, Task
from fusedrnn.cells import States, Weights, state_dtype


class Reference(RecordingBackend):
    """Autograd records every step."""

    name = "reference"
    saves = ("gates",)

    def refusals(self, call: Call) -> list[str]:
        """Refuse nothing but to be part of a compiled operator."""
        return [] if call.recorded else [RECORDS]

    def run(self, task: Task, x: Tensor, states: States) -> tuple[Tensor, States]:
        """Compute the whole sequence; see `RecordingBackend.run`."""
        finals = []
        for index, weights in enumerate(task.layers):
            x, after = self._layer(task, weights, x, tuple(state[index] for state in states))
            finals.append(after)
        return x, tuple(map(torch.stack, zip(*finals, strict=True)))

    def _layer(self, task: Task, weights: Weights, x: Tensor, states: States) -> tuple[Tensor, States]:
        layout, step = task.layout, task.cell.step
        dtypes = [state.dtype for state in states]
        xproj = task.cell.project(x, weights)
        states = (states[0], *(state.to(state_dtype(x.dtype)) for state in states[1:]))
        if not layout.rows:
            if layout.steps:
                states = step(xproj[0], states, weights)
            empty = xproj.narrow(-1, 0, weights.output_size).to(x.dtype)
            return (empty + 0 * states[0] if layout.steps else empty), _cast(states, dtypes)
        chunk = layout.chunks(layout.steps, task.reverse)[0]
        outputs: list[Tensor] = []
        for time, (offset, batch) in zip(_times(layout.steps, task.reverse), chunk.steps.spans(), strict=True):
            if layout.batch_sizes is None:
                if task.resets is not None:
                    anew = task.resets[offset : offset + batch]
                    states = tuple(state.masked_fill(anew, 0) for state in states)
                states = step(xproj[time], states, weights)
                outputs.append(states[0])
                continue
            active = step(xproj[offset : offset + batch], tuple(state[:batch] for state in states), weights)
            outputs.append(active[0])
            states = tuple(torch.cat((new, old[batch:])) for new, old in zip(active, states, strict=True))
        if task.reverse:
            outputs.reverse()
        y = torch.stack(outputs) if layout.batch_sizes is None else torch.cat(outputs)
        return y, _cast(states, dtypes)


def _times(steps: int, reverse: bool) -> range:
    return range(steps)[::-1] if reverse else range(steps)


def _cast(states: States, dtypes: list[torch.dtype]) -> States:
    return tuple(state.to(dtype) for state, dtype in zip(states, dtypes, strict=True))
