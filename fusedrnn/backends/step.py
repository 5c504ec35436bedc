"""The recurrence as a loop over the steps: a product by torch, then whatever a backend does elementwise."""

from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.base import Workspace
from fusedrnn.backends.fused import FusedBackend, LayerBuffers
from fusedrnn.backends.rows import anew, finals, previous
from fusedrnn.cells import Weights
from fusedrnn.layout import Steps


class StepBackend(FusedBackend):
    """Base of the backends that launch step by step."""

    def step_forward(self, pre: Tensor, c_prev: Tensor, h: Tensor, c: Tensor, store: bool) -> None:
        """Compute one step from its pre-activations [n, 4H]: write h and c, and the gates over `pre` if `store`."""
        raise NotImplementedError

    def begin_backward(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, work: Workspace) -> Any:
        """Prepare a chunk's backward pass; the result is handed to every `step_backward`."""

    def step_backward(
        self,
        prepared: Any,
        buffers: LayerBuffers,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor | None,
        dc: Tensor,
    ) -> None:
        """Turn one step's gates into gradients and `dc` [n, H] into the gradient one step earlier, in place."""
        raise NotImplementedError

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
        """See `FusedBackend.recurrence_forward`."""
        assert buffers.c is not None
        self.launch_forward(weights, buffers, h0, c0, steps, store, work)
        return finals(buffers.h, h0, steps), finals(buffers.c, c0, steps)

    def launch_forward(
        self,
        weights: Weights,
        buffers: LayerBuffers,
        h0: Tensor,
        c0: Tensor,
        steps: Steps,
        store: bool,
        work: Workspace,
    ) -> None:
        """Run the steps of the forward pass over the chunk's buffers."""
        assert buffers.c is not None
        hh, hr = weights.weight_hh.t(), None if weights.weight_hr is None else weights.weight_hr.t()
        before, n_before = 0, 0
        for offset, n in steps.spans():
            rows = slice(offset, offset + n)
            pre, y, c = buffers.gates[rows], buffers.h[rows], buffers.c[rows]
            h_prev = previous(buffers.h, h0, before, n_before, n)
            pre.addmm_(anew(h_prev, buffers.resets, offset, offset + n), hh)
            h = y if hr is None else work.get("h", tuple(c.shape), y.dtype)
            self.step_forward(pre, previous(buffers.c, c0, before, n_before, n), h, c, store)
            if hr is not None:
                torch.mm(h, hr, out=y)
            before, n_before = offset, n

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
        """See `FusedBackend.recurrence_backward`."""
        assert buffers.c is not None
        prepared = self.begin_backward(buffers, c0, steps, work)
        spans = list(steps.spans())
        for index in reversed(range(len(spans))):
            offset, n = spans[index]
            before, n_before = spans[index - 1] if index else (0, 0)
            rows = slice(offset, offset + n)
            c_prev = previous(buffers.c, c0, before, n_before, n)
            dy_step, dh_step = None if dy is None else dy[rows], dh[:n]
            if dproj is not None and weights.weight_hr is not None:
                torch.add(dh_step, 0 if dy_step is None else dy_step, out=dproj[rows])
                dy_step, dh_step = None, torch.mm(dproj[rows], weights.weight_hr)
            self.step_backward(prepared, buffers, rows, c_prev, dy_step, dh_step, dc[:n])
            torch.mm(buffers.gates[rows], weights.weight_hh, out=dh[:n])
            if buffers.resets is not None:
                dh[:n].masked_fill_(buffers.resets[rows], 0)
