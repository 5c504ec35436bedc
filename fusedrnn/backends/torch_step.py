"""Step by step in torch's own operators: every device and float dtype, all save modes, no kernel of ours.

On the CPU the backward pass is arranged so that a step costs few operators: all factors that do not depend on the
recurrence are computed for the whole chunk at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Workspace, plain_call
from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.rows import linked, walk
from fusedrnn.backends.step import StepBackend
from fusedrnn.layout import Steps


class _Factors(NamedTuple):
    """What turns dh and dc into the gradients of a step."""

    dc_by_dh: Tensor  # [rows, H] o (1 - tanh(c)^2)
    forget: Tensor  # [rows, H] f
    dgates: Tensor  # [rows, 4, H] d pre / d(c, c, c, h), in the dtype of the states


class TorchStep(StepBackend):
    """A chunk's recurrence in torch operators."""

    name = "torch_step"

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        return plain_call(call)

    def step_forward(self, pre: Tensor, c_prev: Tensor, h: Tensor, c: Tensor, store: bool) -> None:
        """See `StepBackend.step_forward`."""
        work = pre.to(c.dtype)
        i, f, g, o = activate(work)
        torch.mul(f, c_prev, out=c)
        c.addcmul_(i, g)
        if h.dtype == c.dtype:
            torch.tanh(c, out=h).mul_(o)
        else:
            h.copy_(torch.tanh(c).mul_(o))
        if store and work is not pre:
            pre.copy_(work)

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """See `FusedBackend.recompute`."""
        assert buffers.c is not None
        work = buffers.gates.to(buffers.c.dtype)
        i, f, g, _ = activate(work)
        if not cells_known:
            torch.mul(i, g, out=buffers.c)
            for rows, (c_prev,) in walk(steps, buffers.resets, (buffers.c, c0)):
                buffers.c[rows].addcmul_(f[rows], c_prev)
        if work is not buffers.gates:
            buffers.gates.copy_(work)

    def begin_backward(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, work: Workspace) -> _Factors:
        """See `StepBackend.begin_backward`."""
        c = buffers.c
        assert c is not None
        rows, H = c.shape
        dgates = buffers.gates
        if dgates.dtype != c.dtype:
            dgates = work.get("factors", tuple(dgates.shape), c.dtype).copy_(dgates)
        i, f, g, o = dgates.view(rows, 4, H).unbind(1)
        tanh_c = torch.tanh(c, out=work.get("tanh_c", (rows, H), c.dtype))
        forget = work.get("forget", (rows, H), c.dtype).copy_(f)
        dc_by_dh = torch.mul(tanh_c, tanh_c, out=work.get("dc_by_dh", (rows, H), c.dtype))
        dc_by_dh.neg_().add_(1).mul_(o)
        one = work.get("one", (rows, H), c.dtype)
        torch.mul(o, torch.sub(1, o, out=one), out=o).mul_(tanh_c)
        torch.mul(f, torch.sub(1, f, out=one), out=f)
        for start, stop, c_prev in linked(steps, c, c0, buffers.resets):
            f[start:stop].mul_(c_prev)
        ig = torch.mul(i, g, out=tanh_c)
        torch.mul(g, g, out=one).neg_().add_(1).mul_(i)
        torch.mul(ig, torch.sub(1, i, out=i), out=i)
        g.copy_(one)
        return _Factors(dc_by_dh, forget, dgates.view(rows, 4, H))

    def step_backward(
        self,
        prepared: _Factors,
        buffers: LayerBuffers,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor | None,
        dc: Tensor,
    ) -> None:
        """See `StepBackend.step_backward`."""
        if dh is None or dy is None:
            total = dh if dy is None else dy
        else:
            total = torch.add(dh, dy)
        assert total is not None
        total = total.to(dc.dtype)
        dc.addcmul_(total, prepared.dc_by_dh[rows])
        dgates = prepared.dgates[rows]
        dgates[:, :3].mul_(dc[:, None])
        dgates[:, 3].mul_(total)
        dc.mul_(prepared.forget[rows])
        if buffers.gates.dtype != dc.dtype:
            buffers.gates[rows] = dgates.flatten(1)


def activate(pre: Tensor) -> tuple[Tensor, ...]:
    """Turn pre-activations [rows, 4H] into gates in place and return i, f, g, o, each [rows, H]."""
    gates = pre.view(pre.shape[0], 4, -1)
    gates[:, :2].sigmoid_()
    gates[:, 2].tanh_()
    gates[:, 3].sigmoid_()
    return gates.unbind(1)
