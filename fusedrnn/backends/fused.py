"""The LSTM's data flow in a chunk, for every backend that brings a recurrence of its own between large products.

Forward, per chunk and layer: xproj = x W_ih^T + b goes into the gates buffer (one product), the recurrence turns it
into activated gates in place and writes h and c. Backward: gates are taken from the slot or computed again (one
product, since every h is known), the recurrence turns them into gradients of the pre-activations in place, and every
other gradient is a product over the whole chunk, summed in float32.

`save` says what a slot holds per row beyond the output: "gates" the gates and c, "cells" c, "hidden" nothing. Where the
last layer's c is an output itself, no slot holds it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedrnn.backends.base import Gradients, OptionalStates, Task, Workspace
from fusedrnn.backends.rows import Field, add_product, find, lay_out, linked, project
from fusedrnn.backends.slotted import SlottedBackend, pass_down
from fusedrnn.backends.zoneout import held_units
from fusedrnn.cells import LSTM, States, Weights, state_dtype
from fusedrnn.layout import Chunk, Steps


@dataclass
class LayerBuffers:
    """What one layer in one chunk works on; the tensors are rows.

    Args:
        gates: [rows, 4H]: input projection, then activated gates, then gradients of the pre-activations.
        c: [rows, H]: cell states, or None where nobody reads them again.
        h: [rows, P]: outputs.
        resets: bool [rows, 1], true where the states start anew before the row, or None.
        held: Which outputs keep their values, see `held_units`; None without zoneout.
        dcells: [rows, H]: gradients of c from outside, columns adjacent; None for zero.
        clip: Bound of the gradients that pass from a step to the one before it, or None.
    """

    gates: Tensor
    c: Tensor | None
    h: Tensor
    resets: Tensor | None = None
    held: Tensor | float | None = None
    dcells: Tensor | None = None
    clip: float | None = None


class FusedBackend(SlottedBackend):
    """Base of the LSTM backends that bring their own recurrence."""

    saves: ClassVar[tuple[str, ...]] = LSTM.modes

    # What a backend brings.

    def recurrence_forward(
        self,
        weights: Weights,
        buffers: LayerBuffers,
        h0: Tensor,
        c0: Tensor,
        steps: Steps,
        store: bool,
        work: Workspace,
    ) -> tuple[Tensor, Tensor]:
        """Run the steps: turn xproj into gates (if `store`), write h and c, return the states after the chunk."""
        raise NotImplementedError

    def recurrence_backward(
        self,
        weights: Weights,
        buffers: LayerBuffers,
        c0: Tensor,
        dy: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dproj: Tensor | None,
        steps: Steps,
        work: Workspace,
    ) -> None:
        """Run the steps backwards: turn gates into their gradients, and dh, dc into those before the chunk, in place.

        `dproj` [rows, P] receives the gradients of the projected outputs where the layer has a projection.
        """
        raise NotImplementedError

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """Turn pre-activations into gates in place and, unless they are known, write the cells `buffers.c`."""
        raise NotImplementedError

    # The flow of a chunk.

    def fields(self, task: Task, rows: int, dtype: torch.dtype) -> list[Field]:
        """See `SlottedBackend.fields`: per layer the gates, and c and h where they are not the user's."""
        wanted = []
        for index, weights in enumerate(task.layers):
            if task.save == "gates":
                wanted.append(("gates", index, 4 * weights.hidden_size, dtype))
            if task.save != "hidden" and not _given_cells(task, index):
                wanted.append(("c", index, weights.hidden_size, state_dtype(dtype)))
            if index + 1 < len(task.layers):
                wanted.append(("h", index, weights.output_size, dtype))
        return lay_out(rows, wanted)

    def needs(self, save: str, weights_need_grad: bool) -> tuple[bool, ...]:
        """See `ChunkedBackend.needs`."""
        again = save != "gates" or weights_need_grad
        return again, again, True

    def forward_chunk(
        self, task: Task, chunk: Chunk, x: Tensor, states: States, out: States, slot: Tensor | None, work: Workspace
    ) -> States:
        """See `ChunkedBackend.forward_chunk`."""
        fields = self.fields(task, chunk.rows, x.dtype)
        finals = []
        for index, weights in enumerate(task.layers):
            buffers = _buffers(task, index, chunk, fields, slot, out, x.dtype, work)
            _project(x, weights, buffers.gates)
            finals.append(
                self.recurrence_forward(
                    weights,
                    buffers,
                    states[0][index],
                    states[1][index],
                    chunk.steps,
                    store=slot is not None and task.save == "gates",
                    work=work,
                )
            )
            x = buffers.h
        h, c = (torch.stack(state) for state in zip(*finals, strict=True))
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
        dtype = states[0].dtype
        fields = self.fields(task, chunk.rows, dtype)
        dh, dc = dstates
        dy, *dcells = dout
        for index in reversed(range(len(task.layers))):
            weights, sums = task.layers[index], grads.layers[index]
            given = _given_cells(task, index)
            buffers = _buffers(task, index, chunk, fields, slot, out, dtype, work)
            buffers.dcells = dcells[0] if given else None
            below = x if index == 0 else find(fields, "h", index - 1, slot)
            h0, c0 = states[0][index], states[1][index]
            if task.save != "gates":
                assert below is not None
                self._pre_activations(weights, buffers, below, h0, chunk.steps)
                self.recompute(buffers, c0, chunk.steps, cells_known=given or task.save == "cells")
            elif keep:
                buffers.gates = work.get("dgates", tuple(buffers.gates.shape), dtype).copy_(buffers.gates)
            unprojected = _unprojected(buffers, work) if weights.weight_hr is not None else None
            dproj = work.get("dproj", tuple(buffers.h.shape), dtype) if weights.weight_hr is not None else None
            self.recurrence_backward(weights, buffers, c0, dy, dh[index], dc[index], dproj, chunk.steps, work)
            _add_products(weights, sums, buffers, below, h0, unprojected, dproj, chunk.steps)
            dy = pass_down(index, buffers.gates, weights.weight_ih, grads, work)
        return dh, dc

    def _pre_activations(
        self, weights: Weights, buffers: LayerBuffers, below: Tensor, h0: Tensor, steps: Steps
    ) -> None:
        """Compute the chunk's pre-activations again, with every h known."""
        _project(below, weights, buffers.gates)
        for start, stop, h_prev in linked(steps, buffers.h, h0, buffers.resets):
            buffers.gates[start:stop].addmm_(h_prev, weights.weight_hh.t())


def _given_cells(task: Task, index: int) -> bool:
    """Whether a layer's cell states are an output."""
    return task.variant.cells and index + 1 == len(task.layers)


def _buffers(
    task: Task,
    index: int,
    chunk: Chunk,
    fields: list[Field],
    slot: Tensor | None,
    out: OptionalStates,
    dtype: torch.dtype,
    work: Workspace,
) -> LayerBuffers:
    """Collect a layer's tensors: from the slot where they are saved, else scratch; the last layer's are the outputs."""
    H, P, rows = task.layers[index].hidden_size, task.layers[index].output_size, chunk.rows
    gates = find(fields, "gates", index, slot)
    c = out[1] if _given_cells(task, index) else find(fields, "c", index, slot)
    h = out[0] if index + 1 == len(task.layers) else find(fields, "h", index, slot)
    return LayerBuffers(
        work.get("gates", (rows, 4 * H), dtype) if gates is None else gates,
        work.get("c", (rows, H), state_dtype(dtype)) if c is None else c,
        work.get(f"h{index % 2}", (rows, P), dtype) if h is None else h,
        None if task.resets is None else task.resets[chunk.start : chunk.stop],
        held_units(task, index, chunk.start, chunk.stop),
        clip=task.variant.clip,
    )


def _project(x: Tensor, weights: Weights, gates: Tensor) -> None:
    """Write the input projection with both biases to `gates`."""
    bias = None if weights.bias_ih is None or weights.bias_hh is None else weights.bias_ih + weights.bias_hh
    project(x, weights.weight_ih, bias, gates)


def _unprojected(buffers: LayerBuffers, work: Workspace) -> Tensor:
    """Return o * tanh(c) [rows, H], the outputs before the projection."""
    assert buffers.c is not None
    out_gate = buffers.gates[:, -buffers.c.shape[1] :]
    hidden = work.get("unprojected", tuple(buffers.c.shape), buffers.gates.dtype)
    return hidden.copy_(torch.tanh(buffers.c).mul_(out_gate))


def _add_products(
    weights: Weights,
    sums: list[Tensor | None],
    buffers: LayerBuffers,
    below: Tensor | None,
    h0: Tensor,
    unprojected: Tensor | None,
    dproj: Tensor | None,
    steps: Steps,
) -> None:
    """Add the chunk's share of the weights' gradients: products of the gates' gradients with what came in."""
    total = Weights(*sums)  # type: ignore[arg-type]
    dgates = buffers.gates
    if total.weight_ih is not None and below is not None:
        add_product(total.weight_ih, dgates, below)
    if total.weight_hh is not None:
        for start, stop, h_prev in linked(steps, buffers.h, h0, buffers.resets):
            add_product(total.weight_hh, dgates[start:stop], h_prev)
    if total.bias_ih is not None or total.bias_hh is not None:
        db = dgates.sum(0, dtype=state_dtype(dgates.dtype))
        for bias in (total.bias_ih, total.bias_hh):
            if bias is not None:
                bias.add_(db)
    if total.weight_hr is not None and unprojected is not None and dproj is not None:
        add_product(total.weight_hr, dproj, unprojected)
