"""Offloading of activations: it knows tensors and bytes, and nothing of what is computed with them."""

from fusedrnn.offload.config import OffloadConfig, OffloadHostFull
from fusedrnn.offload.hooks import OffloadHooks, innermost, offload, offloader
from fusedrnn.offload.stack import ActivationStack, Offloader, OffloadHandle

__all__ = [
    "ActivationStack",
    "OffloadConfig",
    "OffloadHandle",
    "OffloadHooks",
    "OffloadHostFull",
    "Offloader",
    "innermost",
    "offload",
    "offloader",
]
