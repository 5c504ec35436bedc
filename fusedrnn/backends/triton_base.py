"""What the backends on Triton kernels share: when they can run, and how gates and cells are computed again."""

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, plain_call
from fusedrnn.backends.fused import FusedBackend, LayerBuffers
from fusedrnn.layout import Steps


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


def row_tensors(steps: Steps, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return first rows [K] int64 and numbers of rows [K] int32 of packed steps on a device, without waiting for it."""
    offsets = torch.tensor(steps.offsets, dtype=torch.int64)
    batches = torch.tensor(steps.batches, dtype=torch.int32)
    if device.type == "cuda":
        offsets, batches = offsets.pin_memory(), batches.pin_memory()
    return offsets.to(device, non_blocking=True), batches.to(device, non_blocking=True)


def triton_refusals(call: Call) -> list[str]:
    """Refusals common to every backend on Triton kernels."""
    reasons = plain_call(call)
    if not _installed():
        reasons.append("Triton is not installed (pip install triton)")
    if call.device != "cuda" and not (call.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        reasons.append(f"its kernels run on CUDA devices, the input is on {call.device}")
    if call.dtype == torch.float64:
        reasons.append("its kernels compute in float32, the input is float64")
    return reasons


class TritonBackend(FusedBackend):
    """Base of the LSTM backends on Triton kernels."""

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        return triton_refusals(call)

    def recompute(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, cells_known: bool) -> None:
        """See `FusedBackend.recompute`."""
        from fusedrnn.kernels.lstm_recompute import lstm_activate, lstm_recompute

        assert buffers.c is not None
        if cells_known:
            lstm_activate(buffers.gates)
        elif steps.row_step is not None:
            lstm_recompute(
                buffers.gates, c0, buffers.c, len(steps), steps.offsets[0], steps.row_step, resets=buffers.resets
            )
        else:
            offsets, batches = row_tensors(steps, buffers.gates.device)
            lstm_recompute(buffers.gates, c0, buffers.c, len(steps), offsets=offsets, batches=batches)
