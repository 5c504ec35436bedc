"""The layer-normalised LSTM step by step with Triton: a product by torch, then one kernel over the rows."""

from torch import Tensor

from fusedrnn.backends.base import Call
from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.layer_norm import LayerNormBackend, Norms, StepBuffers, unvaried
from fusedrnn.backends.triton_base import triton_refusals
from fusedrnn.backends.triton_step import TritonStep
from fusedrnn.cells import NORM_EPS
from fusedrnn.layout import Steps

_WIDEST = 4096
"""Up to this H a program holds its row of all four gates in registers; see `Config` of the kernels."""


class LayerNormTritonStep(LayerNormBackend):
    """The steps in Triton kernels."""

    name = "triton_step"

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        reasons = triton_refusals(call) + unvaried(call)
        if call.H > _WIDEST:
            reasons.append(f"its kernels hold whole rows in registers, up to H={_WIDEST}")
        return reasons

    def step_forward(self, pre: Tensor, hproj: Tensor, norms: Norms, c_prev: Tensor, h: Tensor, c: Tensor) -> None:
        """See `LayerNormBackend.step_forward`."""
        from fusedrnn.kernels.lstm_layer_norm_step import lstm_layer_norm_step_forward

        lstm_layer_norm_step_forward(pre, hproj, c_prev, norms.hh, norms.c, norms.c_bias, h, c, NORM_EPS)

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """See `LayerNormBackend.recompute`."""
        TritonStep().recompute(buffers, c0, steps, cells_known)

    def step_backward(
        self,
        prepared: None,
        buffers: StepBuffers,
        norms: Norms,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor,
        dc: Tensor,
    ) -> None:
        """See `LayerNormBackend.step_backward`."""
        from fusedrnn.kernels.lstm_layer_norm_step import lstm_layer_norm_step_backward

        lstm_layer_norm_step_backward(
            buffers.gates[rows],
            buffers.hproj.raw[rows],
            buffers.hproj.mean[rows],
            buffers.hproj.rstd[rows],
            buffers.c.raw[rows],
            buffers.c.mean[rows],
            buffers.c.rstd[rows],
            c_prev,
            norms.hh,
            norms.c,
            norms.c_bias,
            dy,
            dh,
            dc,
            buffers.da[rows],
            buffers.dhproj[rows],
        )
