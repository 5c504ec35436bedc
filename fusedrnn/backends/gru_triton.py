"""The GRU step by step with Triton: a product by torch, then one fused pointwise kernel."""

from torch import Tensor

from fusedrnn.backends.base import Call
from fusedrnn.backends.gru import GRUBackend
from fusedrnn.backends.triton_base import triton_refusals


class GRUTritonStep(GRUBackend):
    """The elementwise part in Triton kernels."""

    name = "triton_step"

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        return triton_refusals(call)

    def step_forward(self, pre: Tensor, hproj: Tensor, h_prev: Tensor, h: Tensor, hn: Tensor | None) -> None:
        """See `GRUBackend.step_forward`."""
        from fusedrnn.kernels.gru_step import gru_step_forward

        gru_step_forward(pre, hproj, h_prev, h, hn)

    def activate(self, pre: Tensor, hproj: Tensor, hn: Tensor) -> None:
        """See `GRUBackend.activate`."""
        from fusedrnn.kernels.gru_step import gru_step_forward

        gru_step_forward(pre, hproj, None, None, hn)

    def step_backward(self, gates: Tensor, hn: Tensor, h_prev: Tensor, dy: Tensor | None, dh: Tensor) -> None:
        """See `GRUBackend.step_backward`."""
        from fusedrnn.kernels.gru_step import gru_step_backward

        gru_step_backward(gates, hn, h_prev, dy, dh)
