"""The layer-normalised LSTM's data flow in a chunk: large products around a recurrence, and that one step by step.

With N(v) = (v - mean v) / sqrt(var v + eps), forward, per chunk and layer: the products xproj = x W_ih^T are normalised
for the whole chunk, pre = N(xproj) norm_ih + b_ih + b_hh; each step multiplies hproj = h_prev W_hh^T and adds
N(hproj) norm_hh to pre, from which gates and c come as in an LSTM, and h = o tanh(N(c) norm_c + norm_c_bias).

Backward: from xproj, hproj and c, which are in the slot or computed again (two products, since every h is known), all
gates and statistics follow elementwise for the whole chunk. With z = N(v) w, the gradient of v is

    dv = (w dz - mean(w dz) - N(v) mean(w dz N(v))) / sqrt(var v + eps)

(Ba, Kiros and Hinton 2016; what `native_layer_norm_backward` computes). Steps go through it twice: with dh the gradient
of h and a = N(c) norm_c + norm_c_bias, from da = dh o (1 - tanh(a)^2) to c, and from the gradients of the
pre-activations to hproj. The gradients of xproj and of all parameters are computed for the whole chunk.

`save` says what a slot holds per row beyond the output: "gates" xproj, hproj and c, "cells" c, "hidden" nothing. The
products take less than gates and products would, and gates of half precision stay unrounded. A slot is only read.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Gradients, OptionalStates, Task, Workspace, plain_call
from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.rows import (
    Field,
    add_product,
    finals,
    find,
    lay_out,
    linked,
    pass_back_,
    project,
    walk,
)
from fusedrnn.backends.slotted import SlottedBackend, pass_down
from fusedrnn.cells import LAYER_NORM_LSTM, NORM_EPS, States, Weights, state_dtype
from fusedrnn.layout import Chunk, Steps


@dataclass
class Normalized:
    """Rows [rows, width] and their statistics, in the dtype of the states.

    Args:
        raw: The rows before their normalisation.
        mean: [rows, 1].
        rstd: [rows, 1], 1 / sqrt(variance + eps).
        gain: [width].
    """

    raw: Tensor
    mean: Tensor
    rstd: Tensor
    gain: Tensor

    def backward(self, dz: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return the gradient of `raw[rows]` from that of its normalised rows with gain."""
        return self._backward(dz, rows, [True, False, False])[0]

    def backward_parameters(self, dz: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gain and bias from that of all rows."""
        _, dgain, dbias = self._backward(dz, slice(None), [False, True, True])
        return dgain, dbias

    def _backward(self, dz: Tensor, rows: slice, wanted: list[bool]) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_layer_norm_backward(
            dz,
            self.raw[rows],
            self.gain.shape,
            self.mean[rows],
            self.rstd[rows],
            self.gain,
            # Only whether there is a bias matters.
            self.gain,
            wanted,
        )


def normalize(raw: Tensor, gain: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Normalized]:
    """Return N(raw) gain + bias [rows, width] in the dtype of gain, and what a backward pass needs of it."""
    raw = raw.to(gain.dtype)
    result, mean, rstd = torch.native_layer_norm(raw, gain.shape, gain, bias, NORM_EPS)
    return result, Normalized(raw, mean, rstd, gain)


class Norms(NamedTuple):
    """The parameters of the normalisations in the dtype of the states, and the sum of both biases."""

    ih: Tensor  # [4H]
    hh: Tensor  # [4H]
    c: Tensor  # [H]
    c_bias: Tensor  # [H]
    bias: Tensor | None  # [4H]

    @staticmethod
    def of(weights: Weights) -> "Norms":
        """Collect them."""
        wide = state_dtype(weights.weight_ih.dtype)
        found = (weights.norm_ih, weights.norm_hh, weights.norm_c, weights.norm_c_bias)
        ih, hh, c, c_bias = (norm.to(wide) for norm in found if norm is not None)
        bias = None
        if weights.bias_ih is not None and weights.bias_hh is not None:
            bias = weights.bias_ih.to(wide) + weights.bias_hh
        return Norms(ih, hh, c, c_bias, bias)


@dataclass
class LayerNormBuffers:
    """The tensors of one layer in one chunk, all of them rows.

    Args:
        xproj: [rows, 4H]: products with the input, before their normalisation.
        hproj: [rows, 4H]: products with the output before; None where the forward pass need not keep them.
        c: [rows, H]: cell states.
        h: [rows, H]: outputs.
        resets: bool [rows, 1], true where the states start anew before the row, or None.
        clip: Bound of the gradients that pass from a step to the one before it, or None.
    """

    xproj: Tensor
    hproj: Tensor | None
    c: Tensor
    h: Tensor
    resets: Tensor | None = None
    clip: float | None = None


@dataclass
class StepBuffers:
    """What the steps of a chunk's backward pass read and write, rows in the dtype of the states but for `dhproj`.

    Args:
        gates: [rows, 4H]: gates i, f, g, o in, gradients of the pre-activations out.
        hproj: Recurrent products.
        c: Cell states.
        da: [rows, H]: receives the gradients of what the output's tanh is taken of.
        dhproj: [rows, 4H], in the layer's dtype: receives the gradients of the recurrent products.
        resets: As in `LayerNormBuffers`.
    """

    gates: Tensor
    hproj: Normalized
    c: Normalized
    da: Tensor
    dhproj: Tensor
    resets: Tensor | None


class LayerNormBackend(SlottedBackend):
    """Base of the layer-normalised LSTM's backends: everything but what is done on the rows of a step."""

    saves: ClassVar[tuple[str, ...]] = LAYER_NORM_LSTM.modes

    # What a backend brings.

    def step_forward(self, pre: Tensor, hproj: Tensor, norms: Norms, c_prev: Tensor, h: Tensor, c: Tensor) -> None:
        """Compute one step: write h [n, H] and c [n, H].

        Args:
            pre: The input's part of the pre-activations [n, 4H], in the dtype of the states; may be overwritten.
            hproj: Recurrent products [n, 4H].
            norms: The layer's parameters.
            c_prev: Cell states before the step [n, H].
            h: Receives the outputs.
            c: Receives the cell states.
        """
        raise NotImplementedError

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """See `FusedBackend.recompute`: gates and cells come from the pre-activations as they do there."""
        raise NotImplementedError

    def begin_backward(self, buffers: StepBuffers, norms: Norms, c0: Tensor, steps: Steps) -> Any:
        """Prepare a chunk's backward pass; the result is handed to every `step_backward`."""

    def step_backward(
        self,
        prepared: Any,
        buffers: StepBuffers,
        norms: Norms,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor,
        dc: Tensor,
    ) -> None:
        """Turn one step's gates into gradients, dc [n, H] into that of c_prev, and write `da` and `dhproj`."""
        raise NotImplementedError

    # The flow of a chunk.

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        return plain_call(call) + unvaried(call)

    def fields(self, task: Task, rows: int, dtype: torch.dtype) -> list[Field]:
        """See `SlottedBackend.fields`: per layer the products, c, and the output where it is not the user's."""
        wanted = []
        for index, weights in enumerate(task.layers):
            H = weights.hidden_size
            if task.save == "gates":
                wanted += [("xproj", index, 4 * H, dtype), ("hproj", index, 4 * H, dtype)]
            if task.save != "hidden":
                wanted.append(("c", index, H, state_dtype(dtype)))
            if index + 1 < len(task.layers):
                wanted.append(("h", index, H, dtype))
        return lay_out(rows, wanted)

    def needs(self, save: str, weights_need_grad: bool) -> tuple[bool, ...]:
        """See `ChunkedBackend.needs`."""
        again = save != "gates" or weights_need_grad
        return again, again

    def forward_chunk(
        self, task: Task, chunk: Chunk, x: Tensor, states: States, out: States, slot: Tensor | None, work: Workspace
    ) -> States:
        """See `ChunkedBackend.forward_chunk`."""
        fields = self.fields(task, chunk.rows, x.dtype)
        after = []
        for index, weights in enumerate(task.layers):
            buffers, norms = _buffers(task, index, chunk, fields, slot, out[0], x.dtype, work), Norms.of(weights)
            project(x, weights.weight_ih, None, buffers.xproj)
            pre, _ = _input_part(buffers, norms)
            h0, c0 = states[0][index], states[1][index]
            for rows, (h_prev, c_prev) in walk(chunk.steps, buffers.resets, (buffers.h, h0), (buffers.c, c0)):
                hproj = (
                    work.get("hproj", (len(h_prev), 4 * weights.hidden_size), x.dtype)
                    if buffers.hproj is None
                    else buffers.hproj[rows]
                )
                project(h_prev, weights.weight_hh, None, hproj)
                self.step_forward(pre[rows], hproj, norms, c_prev, buffers.h[rows], buffers.c[rows])
            after.append((finals(buffers.h, h0, chunk.steps), finals(buffers.c, c0, chunk.steps)))
            x = buffers.h
        h, c = (torch.stack(state) for state in zip(*after, strict=True))
        return h, c

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
        (dh, dc), (dy,) = dstates, dout
        dtype = dh.dtype
        fields = self.fields(task, chunk.rows, dtype)
        for index in reversed(range(len(task.layers))):
            weights, norms = task.layers[index], Norms.of(task.layers[index])
            buffers = _buffers(task, index, chunk, fields, slot, out[0], dtype, work)
            below = x if index == 0 else find(fields, "h", index - 1, slot)
            h0, c0 = states[0][index], states[1][index]
            if buffers.hproj is None:
                assert below is not None
                project(below, weights.weight_ih, None, buffers.xproj)
                buffers.hproj = work.get("hproj", tuple(buffers.xproj.shape), dtype)
                for start, stop, h_prev in linked(chunk.steps, buffers.h, h0, buffers.resets):
                    project(h_prev, weights.weight_hh, None, buffers.hproj[start:stop])
            gates, xproj = _input_part(buffers, norms)
            recurrent, hproj = normalize(buffers.hproj, norms.hh)
            gates.add_(recurrent)
            self.recompute(
                LayerBuffers(gates, buffers.c, buffers.h, buffers.resets),
                c0,
                chunk.steps,
                cells_known=task.save != "hidden",
            )
            c = normalize(buffers.c, norms.c, norms.c_bias)[1]
            dhproj = work.get("dhproj", tuple(gates.shape), dtype)
            inner = StepBuffers(
                gates, hproj, c, work.get("da", tuple(c.raw.shape), c.raw.dtype), dhproj, buffers.resets
            )
            self._steps_backward(weights, norms, buffers, inner, c0, dy, dh[index], dc[index], chunk.steps)
            dxproj = xproj.backward(gates).to(dtype)
            _add_products(grads.layers[index], buffers, inner, xproj, dxproj, below, h0, chunk.steps)
            dy = pass_down(index, dxproj, weights.weight_ih, grads, work)
        return dh, dc

    def _steps_backward(
        self,
        weights: Weights,
        norms: Norms,
        buffers: LayerNormBuffers,
        inner: StepBuffers,
        c0: Tensor,
        dy: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        steps: Steps,
    ) -> None:
        """Run the steps backwards: fill `inner`, and turn dh and dc into those before the chunk."""
        prepared = self.begin_backward(inner, norms, c0, steps)
        for rows, (c_prev,) in walk(steps, buffers.resets, (buffers.c, c0), backward=True):
            n = len(c_prev)
            dy_step = None if dy is None else dy[rows]
            self.step_backward(prepared, inner, norms, rows, c_prev, dy_step, dh[:n], dc[:n])
            torch.mm(inner.dhproj[rows], weights.weight_hh, out=dh[:n])
            for gradient in (dh[:n], dc[:n]):
                pass_back_(gradient, buffers.resets, buffers.clip, rows)


def unvaried(call: Call) -> list[str]:
    """Refusals of what varies the recurrence, but for the clip: no layer-normalised flow has it."""
    varied = str(replace(call.variant, clip=None))
    return [f"with layer_norm it has no {varied}"] if varied else []


def _buffers(
    task: Task,
    index: int,
    chunk: Chunk,
    fields: list[Field],
    slot: Tensor | None,
    y: Tensor | None,
    dtype: torch.dtype,
    work: Workspace,
) -> LayerNormBuffers:
    """Collect a layer's tensors: from the slot where they are saved, else scratch; the last layer's output is y."""
    H, rows = task.layers[index].hidden_size, chunk.rows
    xproj, c = find(fields, "xproj", index, slot), find(fields, "c", index, slot)
    h = y if index + 1 == len(task.layers) else find(fields, "h", index, slot)
    return LayerNormBuffers(
        work.get("xproj", (rows, 4 * H), dtype) if xproj is None else xproj,
        find(fields, "hproj", index, slot),
        work.get("c", (rows, H), state_dtype(dtype)) if c is None else c,
        work.get(f"h{index % 2}", (rows, H), dtype) if h is None else h,
        None if task.resets is None else task.resets[chunk.start : chunk.stop],
        task.variant.clip,
    )


def _input_part(buffers: LayerNormBuffers, norms: Norms) -> tuple[Tensor, Normalized]:
    """Return the input's part of the pre-activations."""
    return normalize(buffers.xproj, norms.ih, norms.bias)


def _add_products(
    sums: list[Tensor | None],
    buffers: LayerNormBuffers,
    inner: StepBuffers,
    xproj: Normalized,
    dxproj: Tensor,
    below: Tensor | None,
    h0: Tensor,
    steps: Steps,
) -> None:
    """Add the chunk's share of the parameters' gradients."""
    total = Weights(*sums)  # type: ignore[arg-type]
    if total.weight_ih is not None and below is not None:
        add_product(total.weight_ih, dxproj, below)
    if total.weight_hh is not None:
        for start, stop, h_prev in linked(steps, buffers.h, h0, buffers.resets):
            add_product(total.weight_hh, inner.dhproj[start:stop], h_prev)
    for normalized, dz, gain, *biases in (
        (xproj, inner.gates, total.norm_ih, total.bias_ih, total.bias_hh),
        (inner.hproj, inner.gates, total.norm_hh),
        (inner.c, inner.da, total.norm_c, total.norm_c_bias),
    ):
        if gain is None and not any(bias is not None for bias in biases):
            continue
        dgain, dbias = normalized.backward_parameters(dz)
        for own, found in ((gain, dgain), *((bias, dbias) for bias in biases)):
            if own is not None:
                own.add_(found)
