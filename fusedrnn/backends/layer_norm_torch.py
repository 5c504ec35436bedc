"""The layer-normalised LSTM step by step in torch's own operators: every device and float dtype."""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.layer_norm import LayerNormBackend, Norms, StepBuffers, normalize
from fusedrnn.backends.rows import linked
from fusedrnn.backends.torch_step import TorchStep, activate
from fusedrnn.layout import Steps


class _Factors(NamedTuple):
    """What turns dh and dc into the gradients of a step; those of the pre-activations stand in the gates' place."""

    da_by_dh: Tensor  # [rows, H] o (1 - tanh(a)^2)
    forget: Tensor  # [rows, H] f


class LayerNormTorchStep(LayerNormBackend):
    """The steps in torch operators."""

    name = "torch_step"

    def step_forward(self, pre: Tensor, hproj: Tensor, norms: Norms, c_prev: Tensor, h: Tensor, c: Tensor) -> None:
        """See `LayerNormBackend.step_forward`."""
        pre.add_(normalize(hproj, norms.hh)[0])
        i, f, g, o = activate(pre)
        torch.mul(f, c_prev, out=c)
        c.addcmul_(i, g)
        h.copy_(normalize(c, norms.c, norms.c_bias)[0].tanh_().mul_(o))

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """See `LayerNormBackend.recompute`."""
        TorchStep().recompute(buffers, c0, steps, cells_known)

    def begin_backward(self, buffers: StepBuffers, norms: Norms, c0: Tensor, steps: Steps) -> _Factors:
        """See `LayerNormBackend.begin_backward`: all factors of a step that are known beforehand."""
        i, f, g, o = buffers.gates.view(len(buffers.gates), 4, -1).unbind(1)
        tanh_a = normalize(buffers.c.raw, norms.c, norms.c_bias)[0].tanh_()
        factors = _Factors(tanh_a.square().neg_().add_(1).mul_(o), f.clone())
        o.mul_(1 - o).mul_(tanh_a)
        f.mul_(1 - f)
        for start, stop, c_prev in linked(steps, buffers.c.raw, c0, buffers.resets):
            f[start:stop].mul_(c_prev)
        by_g = g.square().neg_().add_(1).mul_(i)
        i.mul_(1 - i).mul_(g)
        g.copy_(by_g)
        return factors

    def step_backward(
        self,
        prepared: _Factors,
        buffers: StepBuffers,
        norms: Norms,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor,
        dc: Tensor,
    ) -> None:
        """See `LayerNormBackend.step_backward`."""
        total = (dh if dy is None else dh + dy).to(dc.dtype)
        da = torch.mul(total, prepared.da_by_dh[rows], out=buffers.da[rows])
        dc.add_(buffers.c.backward(da, rows))
        dpre = buffers.gates[rows]
        factors = dpre.view(len(dpre), 4, -1)
        factors[:, :3].mul_(dc[:, None])
        factors[:, 3].mul_(total)
        dc.mul_(prepared.forget[rows])
        buffers.dhproj[rows] = buffers.hproj.backward(dpre, rows)
