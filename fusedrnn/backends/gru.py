"""The GRU's data flow in a chunk: large products around a recurrence, and that recurrence step by step.

Forward, per chunk and layer: xproj = x W_ih^T + b_ih goes into the gates buffer (one product); each step multiplies
h_prev by W_hh and does the rest elementwise. The reset gate acts behind that product, so its part for n, here `hn`, is
kept beside the gates. Backward: with dh the gradient of h,

    dn = dh (1 - z) (1 - n^2), dz = dh (h_prev - n) z (1 - z), dr = dn hn r (1 - r), dhn = dn r,

and dh_prev = dh z + (dr, dz, dhn) W_hh. The gradients of input and weights are products over the whole chunk.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Gradients, OptionalStates, Task, Workspace, plain_call
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
from fusedrnn.backends.zoneout import held_units, hold, of_rows, split
from fusedrnn.cells import GRU, States, Weights, state_dtype
from fusedrnn.layout import Chunk, Steps


@dataclass
class GRUBuffers:
    """What one layer in one chunk works on; the tensors are rows.

    Args:
        gates: [rows, 3H]: input projection, then r, z, n, then the gradients of the input projection.
        hn: [rows, H]: recurrent product of n with its bias, then its gradient.
        h: [rows, H]: outputs.
        resets: bool [rows, 1], true where the state starts anew before the row, or None.
        held: Which outputs keep their values, see `held_units`; None without zoneout.
        clip: Bound of the gradients that pass from a step to the one before it, or None.
    """

    gates: Tensor
    hn: Tensor
    h: Tensor
    resets: Tensor | None = None
    held: Tensor | float | None = None
    clip: float | None = None


class GRUBackend(SlottedBackend):
    """Base of the GRU backends: everything but what is elementwise."""

    saves: ClassVar[tuple[str, ...]] = GRU.modes

    # What a backend brings.

    def step_forward(self, pre: Tensor, hproj: Tensor, h_prev: Tensor, h: Tensor, hn: Tensor | None) -> None:
        """Compute one step: write h [n, H]; unless `hn` is None, also hn [n, H] and r, z, n over `pre` [n, 3H].

        Args:
            pre: Input projection [n, 3H].
            hproj: Recurrent product with its bias [n, 3H], may be overwritten.
            h_prev: Outputs before the step [n, H].
            h: Receives the outputs.
            hn: Receives the recurrent product of n, or None.
        """
        raise NotImplementedError

    def activate(self, pre: Tensor, hproj: Tensor, hn: Tensor) -> None:
        """Write r, z, n over `pre` and the recurrent product of n to `hn`, as `step_forward` does, for any rows."""
        raise NotImplementedError

    def begin_backward(self, buffers: GRUBuffers, h0: Tensor, steps: Steps) -> Any:
        """Prepare a chunk's backward pass; the result is handed to every `step_backward`."""

    def step_backward(
        self, prepared: Any, buffers: GRUBuffers, rows: slice, h_prev: Tensor, dy: Tensor | None, dh: Tensor
    ) -> None:
        """Turn one step's gates and hn into gradients, and dh [n, H] into dh z, all in place; dh includes no dy yet."""
        raise NotImplementedError

    # The flow of a chunk.

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        return plain_call(call)

    def fields(self, task: Task, rows: int, dtype: torch.dtype) -> list[Field]:
        """See `SlottedBackend.fields`: per layer the gates and hn, and the output where it is not the user's."""
        wanted = []
        for index, weights in enumerate(task.layers):
            if task.save == "gates":
                wanted += [("gates", index, 3 * weights.hidden_size, dtype), ("hn", index, weights.hidden_size, dtype)]
            if index + 1 < len(task.layers):
                wanted.append(("h", index, weights.hidden_size, dtype))
        return lay_out(rows, wanted)

    def needs(self, save: str, weights_need_grad: bool) -> tuple[bool, ...]:
        """See `ChunkedBackend.needs`: dz needs h_prev, whatever is saved."""
        return save != "gates" or weights_need_grad, True

    def forward_chunk(
        self, task: Task, chunk: Chunk, x: Tensor, states: States, out: States, slot: Tensor | None, work: Workspace
    ) -> States:
        """See `ChunkedBackend.forward_chunk`."""
        fields = self.fields(task, chunk.rows, x.dtype)
        after = []
        for index, weights in enumerate(task.layers):
            buffers = _buffers(task, index, chunk, fields, slot, out[0], x.dtype, work)
            project(x, weights.weight_ih, weights.bias_ih, buffers.gates)
            h0 = states[0][index]
            store = slot is not None and task.save == "gates"
            self.launch_forward(weights, buffers, h0, chunk.steps, store, work)
            after.append(finals(buffers.h, h0, chunk.steps))
            x = buffers.h
        return (torch.stack(after),)

    def launch_forward(
        self, weights: Weights, buffers: GRUBuffers, h0: Tensor, steps: Steps, store: bool, work: Workspace
    ) -> None:
        """Run the steps of the forward pass over the chunk's buffers, and keep gates and hn if `store`."""
        for rows, (h_prev,) in walk(steps, buffers.resets, (buffers.h, h0)):
            hproj = work.get("hproj", (len(h_prev), 3 * weights.hidden_size), h0.dtype)
            project(h_prev, weights.weight_hh, weights.bias_hh, hproj)
            h = buffers.h[rows]
            self.step_forward(buffers.gates[rows], hproj, h_prev, h, buffers.hn[rows] if store else None)
            held = of_rows(buffers.held, rows)
            if held is not None:
                h.copy_(hold(h, h_prev, held))

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
        (dh,), (dy,) = dstates, dout
        dtype = dh.dtype
        fields = self.fields(task, chunk.rows, dtype)
        for index in reversed(range(len(task.layers))):
            weights = task.layers[index]
            buffers = _buffers(task, index, chunk, fields, slot, out[0], dtype, work)
            below = x if index == 0 else find(fields, "h", index - 1, slot)
            h0 = states[0][index]
            if task.save != "gates":
                assert below is not None
                project(below, weights.weight_ih, weights.bias_ih, buffers.gates)
                hproj = work.get("hproj", tuple(buffers.gates.shape), dtype)
                for start, stop, h_prev in linked(chunk.steps, buffers.h, h0, buffers.resets):
                    project(h_prev, weights.weight_hh, weights.bias_hh, hproj[start:stop])
                self.activate(buffers.gates, hproj, buffers.hn)
            elif keep:
                buffers.gates = work.get("dgates", tuple(buffers.gates.shape), dtype).copy_(buffers.gates)
                buffers.hn = work.get("dhn", tuple(buffers.hn.shape), dtype).copy_(buffers.hn)
            self.recurrence_backward(weights, buffers, h0, dy, dh[index], chunk.steps)
            _add_products(grads.layers[index], buffers, below, h0, chunk.steps)
            dy = pass_down(index, buffers.gates, weights.weight_ih, grads, work)
        return (dh,)

    def recurrence_backward(
        self, weights: Weights, buffers: GRUBuffers, h0: Tensor, dy: Tensor | None, dh: Tensor, steps: Steps
    ) -> None:
        """Run the steps backwards: turn gates and hn into their gradients and dh into that before the chunk."""
        H = weights.hidden_size
        weight_rz, weight_n = weights.weight_hh[: 2 * H], weights.weight_hh[2 * H :]
        prepared = self.begin_backward(buffers, h0, steps)
        for rows, (h_prev,) in walk(steps, buffers.resets, (buffers.h, h0), backward=True):
            dy_step, dh_step, passed = None if dy is None else dy[rows], dh[: len(h_prev)], None
            held = of_rows(buffers.held, rows)
            if held is not None:
                own, passed = split(dh_step if dy_step is None else dh_step + dy_step, held)
                dy_step = None
                dh_step.copy_(own)
            self.step_backward(prepared, buffers, rows, h_prev, dy_step, dh_step)
            dh_step.addmm_(buffers.gates[rows, : 2 * H], weight_rz).addmm_(buffers.hn[rows], weight_n)
            if passed is not None:
                dh_step.add_(passed)
            pass_back_(dh_step, buffers.resets, buffers.clip, rows)


class _Factors(NamedTuple):
    """What turns dh into the gradients of a step."""

    by_h: Tensor  # [rows, H] z
    gates: Tensor  # [rows, 3, H] d pre / dh, in float32 or wider
    by_hn: Tensor  # [rows, H] d hn / dh, likewise


class GRUTorchStep(GRUBackend):
    """The elementwise part in torch operators."""

    name = "torch_step"

    def step_forward(self, pre: Tensor, hproj: Tensor, h_prev: Tensor, h: Tensor, hn: Tensor | None) -> None:
        """See `GRUBackend.step_forward`."""
        gates = pre if hn is not None else pre.clone()
        self.activate(gates, hproj, hproj[:, -h.shape[1] :] if hn is None else hn)
        _, z, n = gates.view(len(gates), 3, -1).unbind(1)
        torch.lerp(n, h_prev, z, out=h)

    def activate(self, pre: Tensor, hproj: Tensor, hn: Tensor) -> None:
        """See `GRUBackend.activate`."""
        rows, H = hn.shape
        wide = state_dtype(pre.dtype)
        gates, products = pre.view(rows, 3, H).to(wide), hproj.view(rows, 3, H)
        gates[:, :2].add_(products[:, :2]).sigmoid_()
        gates[:, 2].addcmul_(gates[:, 0], products[:, 2].to(wide)).tanh_()
        hn.copy_(products[:, 2])
        if wide != pre.dtype:
            pre.copy_(gates.view(rows, 3 * H))

    def begin_backward(self, buffers: GRUBuffers, h0: Tensor, steps: Steps) -> _Factors:
        """See `GRUBackend.begin_backward`: all gradients of a step are dh times what is known beforehand."""
        rows, H = buffers.hn.shape
        wide = state_dtype(buffers.hn.dtype)
        factors, by_hn = buffers.gates.view(rows, 3, H).to(wide), buffers.hn.to(wide)
        r, z, n = factors.unbind(1)
        by_h = z.clone()
        by_n = (1 - z) * (1 - n * n)
        z.mul_(1 - z)
        for start, stop, h_prev in linked(steps, buffers.h, h0, buffers.resets):
            z[start:stop].mul_(h_prev - n[start:stop])
        n.copy_(by_n)
        reset = by_n * r
        torch.mul(reset, 1 - r, out=r).mul_(by_hn)
        by_hn.copy_(reset)
        return _Factors(by_h, factors, by_hn)

    def step_backward(
        self, prepared: _Factors, buffers: GRUBuffers, rows: slice, h_prev: Tensor, dy: Tensor | None, dh: Tensor
    ) -> None:
        """See `GRUBackend.step_backward`."""
        by_h, dgates, dhn = (factor[rows] for factor in prepared)
        total = (dh if dy is None else dh + dy).to(by_h.dtype)
        dgates.mul_(total[:, None])
        dhn.mul_(total)
        if dhn.dtype != buffers.hn.dtype:
            buffers.gates[rows] = dgates.flatten(1)
            buffers.hn[rows] = dhn
        dh.copy_(by_h.mul_(total))


def _buffers(
    task: Task,
    index: int,
    chunk: Chunk,
    fields: list[Field],
    slot: Tensor | None,
    y: Tensor | None,
    dtype: torch.dtype,
    work: Workspace,
) -> GRUBuffers:
    """Collect a layer's tensors: from the slot where they are saved, else scratch; the last layer's output is y."""
    H, rows = task.layers[index].hidden_size, chunk.rows
    gates, hn = find(fields, "gates", index, slot), find(fields, "hn", index, slot)
    h = y if index + 1 == len(task.layers) else find(fields, "h", index, slot)
    return GRUBuffers(
        work.get("gates", (rows, 3 * H), dtype) if gates is None else gates,
        work.get("hn", (rows, H), dtype) if hn is None else hn,
        work.get(f"h{index % 2}", (rows, H), dtype) if h is None else h,
        None if task.resets is None else task.resets[chunk.start : chunk.stop],
        held_units(task, index, chunk.start, chunk.stop),
        task.variant.clip,
    )


def _add_products(
    sums: list[Tensor | None], buffers: GRUBuffers, below: Tensor | None, h0: Tensor, steps: Steps
) -> None:
    """Add the chunk's share of the weights' gradients."""
    total = Weights(*sums)  # type: ignore[arg-type]
    dgates, dhn = buffers.gates, buffers.hn
    both = 2 * dhn.shape[1]
    if total.weight_ih is not None and below is not None:
        add_product(total.weight_ih, dgates, below)
    if total.weight_hh is not None:
        for start, stop, h_prev in linked(steps, buffers.h, h0, buffers.resets):
            add_product(total.weight_hh[:both], dgates[start:stop, :both], h_prev)
            add_product(total.weight_hh[both:], dhn[start:stop], h_prev)
    wide = state_dtype(dgates.dtype)
    if total.bias_ih is not None:
        total.bias_ih.add_(dgates.sum(0, dtype=wide))
    if total.bias_hh is not None:
        total.bias_hh[:both].add_(dgates[:, :both].sum(0, dtype=wide))
        total.bias_hh[both:].add_(dhn.sum(0, dtype=wide))
