"""A whole chunk in one launch of a persistent Triton kernel, the recurrent weights resident on the chip."""

from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Workspace, gpu_of
from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.triton_base import TritonBackend, row_tensors
from fusedrnn.cells import Weights
from fusedrnn.kernels._device import DeviceInfo
from fusedrnn.layout import Steps

if TYPE_CHECKING:
    from fusedrnn.kernels._sequence import Config, Rows


class TritonSequence(TritonBackend):
    """A chunk's recurrence in one launch each way, where all its programs fit on the device at once."""

    name = "triton_sequence"

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        reasons = super().refusals(call)
        if call.P != call.H:
            reasons.append("its kernels have no projection (proj_size)")
        if reasons:
            return reasons
        if call.gpu is None:
            return ["its programs wait for one another, and Triton's interpreter runs them one after the other"]
        picked = _pick(call.B, call.H, call.dtype, call.gpu)
        return [picked] if isinstance(picked, str) else []

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
        from fusedrnn.kernels.lstm_sequence_forward import lstm_sequence_forward

        return lstm_sequence_forward(
            buffers.gates,
            weights.weight_hh.contiguous(),
            h0,
            c0,
            buffers.h,
            buffers.c,
            _rows(steps, h0.device),
            _config(h0),
            store_gates=store,
            precision=_precision(h0.dtype),
        )

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
        from fusedrnn.kernels.lstm_sequence_backward import lstm_sequence_backward

        assert buffers.c is not None
        lstm_sequence_backward(
            buffers.gates,
            weights.weight_hh.contiguous(),
            c0,
            buffers.c,
            dy,
            dh,
            dc,
            _rows(steps, dh.device),
            _config(dh),
            precision=_precision(dh.dtype),
        )


def _precision(dtype: torch.dtype) -> str:
    """Return how products of float32 are computed, as torch's switches for its own products say."""
    if dtype != torch.float32:
        return "ieee"
    asked = torch.backends.cuda.matmul.fp32_precision
    if asked == "none":
        asked = torch.backends.fp32_precision  # type: ignore[attr-defined]  # torch's stubs lack it
    return "tf32" if asked == "tf32" else "ieee"


def _pick(B: int, H: int, dtype: torch.dtype, gpu: DeviceInfo) -> Union["Config", str]:
    from fusedrnn.kernels._sequence import Config

    return Config.pick(B, H, dtype.itemsize, gpu)


def _config(state: Tensor) -> "Config":
    """Return the blocks for a state [B, H]; `refusals` has made sure that there are some."""
    gpu = gpu_of(state.device)
    assert gpu is not None
    picked = _pick(state.shape[0], state.shape[1], state.dtype, gpu)
    assert not isinstance(picked, str), picked
    return picked


def _rows(steps: Steps, device: torch.device) -> "Rows":
    from fusedrnn.kernels._sequence import Rows

    if steps.row_step is not None:
        return Rows(len(steps), steps.offsets[0], steps.row_step)
    offsets, batches = row_tensors(steps, device)
    return Rows(len(steps), offsets=offsets, batches=batches)
