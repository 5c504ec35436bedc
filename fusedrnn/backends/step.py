"""The recurrence as a loop over the steps: a product by torch, then whatever a backend does elementwise."""

from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends.base import Workspace
from fusedrnn.backends.fused import FusedBackend, LayerBuffers
from fusedrnn.backends.rows import finals, pass_back_, walk
from fusedrnn.backends.zoneout import hold, of_rows, split
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
        for rows, (h_prev, c_prev) in walk(steps, buffers.resets, (buffers.h, h0), (buffers.c, c0)):
            pre, y, c = buffers.gates[rows], buffers.h[rows], buffers.c[rows]
            pre.addmm_(h_prev, hh)
            h = y if hr is None else work.get("h", tuple(c.shape), y.dtype)
            self.step_forward(pre, c_prev, h, c, store)
            if hr is not None:
                torch.mm(h, hr, out=y)
            held = of_rows(buffers.held, rows)
            if held is not None:
                y.copy_(hold(y, h_prev, held))

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
        for rows, (c_prev,) in walk(steps, buffers.resets, (buffers.c, c0), backward=True):
            n = len(c_prev)
            dy_step, dh_step, dc_step, passed = None if dy is None else dy[rows], dh[:n], dc[:n], None
            held = of_rows(buffers.held, rows)
            if held is not None:
                total = dh_step if dy_step is None else dh_step + dy_step
                (dh_step, passed), dy_step = split(total, held), None
            if dproj is not None and weights.weight_hr is not None:
                torch.add(dh_step, 0 if dy_step is None else dy_step, out=dproj[rows])
                dy_step, dh_step = None, torch.mm(dproj[rows], weights.weight_hr)
            if buffers.dcells is not None:
                dc_step.add_(buffers.dcells[rows])
            self.step_backward(prepared, buffers, rows, c_prev, dy_step, dh_step, dc_step)
            torch.mm(buffers.gates[rows], weights.weight_hh, out=dh[:n])
            if passed is not None:
                dh[:n].add_(passed)
            for gradient in (dh[:n], dc_step):
                pass_back_(gradient, buffers.resets, buffers.clip, rows)
