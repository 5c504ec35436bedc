"""Offloading of activations: it knows tensors and bytes, and nothing of what is computed with them."""

from fusedrnn.offloading.config import OffloadConfig, OffloadHostFull
from fusedrnn.offloading.hooks import OffloadHooks, innermost, offload, offloader
from fusedrnn.offloading.stack import ActivationStack, Offloader, OffloadHandle

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
