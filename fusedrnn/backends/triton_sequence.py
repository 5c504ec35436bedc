"""A whole chunk in one launch of a persistent Triton kernel, the recurrent weights resident on the chip."""

from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, Workspace, gpu_of, tf32_allowed
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
        if call.variant.zoneout:
            reasons.append("its kernels have no zoneout")
        if torch.version.hip is not None:
            reasons.append("on ROCm its programs do not wait for each other's stores: they would read old states")
        if reasons:
            return reasons
        if call.gpu is None:
            return ["its programs wait for one another, and Triton's interpreter runs them one after the other"]
        picked = _pick(call.B, call.H, call.dtype, call.gpu, call.tf32)
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

        config, precision = _config(h0)
        return lstm_sequence_forward(
            buffers.gates,
            weights.weight_hh.contiguous(),
            h0,
            c0,
            buffers.h,
            buffers.c,
            _rows(steps, h0.device),
            config,
            store_gates=store,
            precision=precision,
            resets=buffers.resets,
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
        config, precision = _config(dh)
        lstm_sequence_backward(
            buffers.gates,
            weights.weight_hh.contiguous(),
            c0,
            buffers.c,
            dy,
            dh,
            dc,
            _rows(steps, dh.device),
            config,
            precision=precision,
            resets=buffers.resets,
            dcells=buffers.dcells,
            clip=buffers.clip,
        )


def _precision(dtype: torch.dtype, tf32: bool) -> str:
    """Return how products are computed: in float32 as torch's switches for its own products say."""
    return "tf32" if dtype == torch.float32 and tf32 else "ieee"


def _pick(B: int, H: int, dtype: torch.dtype, gpu: DeviceInfo, tf32: bool) -> Union["Config", str]:
    from fusedrnn.kernels._sequence import Config

    return Config.pick(B, H, dtype.itemsize, gpu, _precision(dtype, tf32))


def _config(state: Tensor) -> tuple["Config", str]:
    """Return blocks and precision for a state [B, H]; `refusals` has made sure that there are some."""
    gpu, tf32 = gpu_of(state.device), tf32_allowed()
    assert gpu is not None
    picked = _pick(state.shape[0], state.shape[1], state.dtype, gpu, tf32)
    if isinstance(picked, str):
        raise RuntimeError(f"torch's switch for TF32 was turned between the forward and the backward pass: {picked}")
    return picked, _precision(state.dtype, tf32)


def _rows(steps: Steps, device: torch.device) -> "Rows":
    from fusedrnn.kernels._sequence import Rows

    if steps.row_step is not None:
        return Rows(len(steps), steps.offsets[0], steps.row_step)
    offsets, batches = row_tensors(steps, device)
    return Rows(len(steps), offsets=offsets, batches=batches)
