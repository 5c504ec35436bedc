"""Offloading of activations: it knows tensors and bytes, and nothing of what is computed with them."""

from fusedrnn.offload.config import OffloadConfig, OffloadHostFull
from fusedrnn.offload.stack import ActivationStack, Offloader, OffloadHandle

__all__ = ["ActivationStack", "OffloadConfig", "OffloadHandle", "OffloadHostFull", "Offloader"]
