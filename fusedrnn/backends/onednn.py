"""torch's own fused CPU operator, whole or chunk by chunk.

In "gates" the operator runs once over the sequence and autograd records it, as in `torch.nn.LSTM`. In "hidden" it runs
chunk by chunk without recording; the backward pass runs each chunk again, recorded, and differentiates it at once, so
that the operator's workspace exists for one chunk only. (Chen et al. 2016; for recurrent networks Gruslys et al. 2016.)
"""

from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.base import (
    RECORDS,
    Call,
    ChunkedBackend,
    Gradients,
    OptionalStates,
    RecordingBackend,
    Task,
    Workspace,
    plain_call,
)
from fusedrnn.cells import States, Weights
from fusedrnn.layout import Chunk

_WORKSPACE_BYTES = 8 << 20
"""Recorded bytes per chunk. Measured on two Zen 4 cores in fp32 over (B, H) from (4, 128) to (512, 512): from 4 to
16 MiB the time is flat; below, calls cost; above, the workspace leaves the cache and is mapped anew at each call."""
_LEAST_STEPS, _MOST_STEPS = 8, 256


class OneDNN(RecordingBackend, ChunkedBackend):
    """`torch.lstm` on the CPU."""

    name = "onednn"
    saves = ("gates", "hidden")

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        reasons = plain_call(call)
        if call.device != "cpu":
            reasons.append(f"it runs on the CPU, the input is on {call.device}")
        elif not call.onednn:
            reasons.append("this torch has no oneDNN, or it is switched off (torch.backends.mkldnn.flags)")
        if call.dtype != torch.float32:
            reasons.append(f"it computes float32, the input is {str(call.dtype).removeprefix('torch.')}")
        if call.P != call.H:
            reasons.append("oneDNN has no projection (proj_size)")
        if not call.recorded:
            reasons.append(RECORDS)
        if call.resets:
            reasons.append("torch's operator knows no resets")
        if call.variant.clip is not None:
            reasons.append("torch's operator does not clip gradients between steps")
        if call.variant.zoneout:
            reasons.append("torch's operator has no zoneout")
        if call.variant.cells:
            reasons.append("torch's operator returns no cell states but the last")
        if call.packed:
            reasons.append("oneDNN takes no packed sequences")
        return reasons

    def run(self, task: Task, x: Tensor, states: States) -> tuple[States, States]:
        """Compute the whole sequence; see `RecordingBackend.run`."""
        y, after = _operator(task, x, states, record=torch.is_grad_enabled())
        return (y,), after

    def run_whole(
        self, x: Tensor, states: States, layers: list[Weights], directions: int, dropout: float
    ) -> tuple[Tensor, States]:
        """Compute a whole module, all layers and directions, in one recorded call, as `torch.nn.LSTM` does.

        Args:
            x: Input [T, B, I].
            states: h0 and c0, each [layers * directions, B, H].
            layers: Weights, layer by layer, forward before reverse.
            directions: 1 or 2.
            dropout: Probability of dropout between layers; 0 when evaluating.
        """
        flat = [weight for weights in layers for weight in weights if weight is not None]
        y, *after = torch.lstm(
            x,
            states,
            flat,
            layers[0].bias_ih is not None,
            len(layers) // directions,
            dropout,
            torch.is_grad_enabled() or dropout > 0,
            directions == 2,
            False,
        )
        return y, tuple(after)

    def chunk_steps(self, call: Call) -> int:
        """See `ChunkedBackend.chunk_steps`; always a power of two, so that primitives are few."""
        step = call.layers * call.B * (7 * call.H) * call.dtype.itemsize
        steps = min(max(_WORKSPACE_BYTES // max(step, 1), _LEAST_STEPS), _MOST_STEPS)
        return 1 << (steps.bit_length() - 1)

    def needs(self, save: str, weights_need_grad: bool) -> tuple[bool, ...]:
        """See `ChunkedBackend.needs`."""
        return True, False

    def forward_chunk(
        self, task: Task, chunk: Chunk, x: Tensor, states: States, out: States, slot: Tensor | None, work: Workspace
    ) -> States:
        """See `ChunkedBackend.forward_chunk`."""
        y, states = _operator(task, x.view(len(chunk.steps), -1, x.shape[-1]), states, record=False)
        out[0].copy_(y.view_as(out[0]))
        return states

    def backward_chunk(
        self,
        task: Task,
        chunk: Chunk,
        x: Tensor | None,
        out: OptionalStates,
        states: States,
        slot: Tensor,
        dout: OptionalStates,
        dstates: States,
        grads: Gradients,
        keep: bool,
        work: Workspace,
    ) -> States:
        """See `ChunkedBackend.backward_chunk`."""
        assert x is not None
        x = x.view(len(chunk.steps), -1, x.shape[-1]).detach().requires_grad_(grads.dx is not None)
        states = tuple(state.detach().requires_grad_() for state in states)
        layers: list[Weights] = []
        sums: list[tuple[Tensor, Tensor]] = []
        for weights, into in zip(task.layers, grads.layers, strict=True):
            leaves = [
                None if weight is None else weight.detach().requires_grad_(total is not None)
                for weight, total in zip(weights, into, strict=True)
            ]
            layers.append(Weights(*leaves))  # type: ignore[arg-type]
            sums += [
                (leaf, total)
                for leaf, total in zip(leaves, into, strict=True)
                if leaf is not None and total is not None
            ]
        with torch.enable_grad():
            y, after = _operator(Task(task.cell, tuple(layers), task.layout, task.reverse), x, states, record=True)
        outputs, douts = [*after], [*dstates]
        if dout[0] is not None:
            outputs.append(y)
            douts.append(dout[0].view_as(y))
        wanted = [*states, *(leaf for leaf, _ in sums), *([x] if grads.dx is not None else [])]
        results = torch.autograd.grad(outputs, wanted, douts)
        if grads.dx is not None:
            dx = results[-1].view_as(grads.dx)
            grads.dx.add_(dx) if grads.add else grads.dx.copy_(dx)
        for (_, total), gradient in zip(sums, results[len(states) :], strict=False):
            total.add_(gradient)
        return results[: len(states)]


def _operator(task: Task, x: Tensor, states: States, record: bool) -> tuple[Tensor, States]:
    """Run torch's operator over x [T, B, I]; it knows no reverse direction alone, so time is turned round for it."""
    flat = [weight for weights in task.layers for weight in weights if weight is not None]
    has_biases = task.layers[0].bias_ih is not None
    x = x.flip(0) if task.reverse else x
    y, *after = torch.lstm(x, states, flat, has_biases, len(task.layers), 0.0, record, False, False)
    return (y.flip(0) if task.reverse else y), tuple(after)


def scratch_bytes(operator: Any, args: tuple[Any, ...]) -> int:
    """Return what oneDNN allocates beside its results while an operator of torch runs, 0 where it is not oneDNN's LSTM.

    It packs both weights, and keeps the gates of all steps; gradients of weights are made in packed form and copied.
    Rows are padded as get_good_ld in oneDNN's source says (src/cpu/rnn/rnn_utils.hpp).
    """
    backward = operator.overloadpacket is torch.ops.aten.mkldnn_rnn_layer_backward
    if not backward and operator.overloadpacket is not torch.ops.aten.mkldnn_rnn_layer:
        return 0
    x, *weights = args[:3]
    rows = weights[0].shape[0]
    numbers = (sum(weight.shape[1] for weight in weights) + x.shape[0] * x.shape[1]) * _padded(rows)
    if backward:
        numbers += sum(rows * _padded(w.shape[1]) for w in weights if _padded(w.shape[1]) != w.shape[1])
        dy = args[10]
        numbers += 0 if dy is None or dy.is_contiguous() else dy.numel()
    return numbers * x.element_size()


def _padded(numbers: int) -> int:
    """Return the length of a row of float32: whole cache lines, and no multiple of 1 KiB."""
    padded = -(-numbers // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded
