"""Step by step with Triton: a product by torch, then one fused pointwise kernel."""

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Workspace, plain_call
from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.step import StepBackend
from fusedrnn.layout import Steps


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


class TritonStep(StepBackend):
    """A chunk's recurrence with one product and one kernel launch per step."""

    name = "triton_step"

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        reasons = plain_call(call)
        if not _installed():
            reasons.append("Triton is not installed (pip install triton)")
        if call.device != "cuda" and not (call.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
            reasons.append(f"its kernels run on CUDA devices, the input is on {call.device}")
        if call.dtype == torch.float64:
            reasons.append("its kernels compute in float32, the input is float64")
        return reasons

    def step_forward(self, pre: Tensor, c_prev: Tensor, h: Tensor, c: Tensor, store: bool) -> None:
        """See `StepBackend.step_forward`."""
        from fusedrnn.kernels.lstm_step import lstm_step_forward

        lstm_step_forward(pre, c_prev, h, c, store_gates=store)

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """See `FusedBackend.recompute`."""
        raise NotImplementedError

    def begin_backward(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, work: Workspace) -> None:
        """See `StepBackend.begin_backward`: there is nothing to prepare."""

    def step_backward(
        self,
        prepared: None,
        buffers: LayerBuffers,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor | None,
        dc: Tensor,
    ) -> None:
        """See `StepBackend.step_backward`."""
        from fusedrnn.kernels.lstm_step import lstm_step_backward

        assert buffers.c is not None
        gates = buffers.gates[rows]
        lstm_step_backward(gates, c_prev, buffers.c[rows], dy, dh, dc, gates)
