"""What autograd keeps in place of a tensor that it saves."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedrnn.offloading.stack import OffloadHandle


class Unpacker(Protocol):
    """Who gives parts back."""

    def unpack(self, part: "Part") -> Tensor:
        """Return the tensor that a part stands for."""


class Kept:
    """A tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # Without its history, which would lead back to the node that saves it.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor."""
        if self.tensor._version != self.version:
            raise RuntimeError(changed(tuple(self.tensor.shape)))
        return self.tensor


class Storage:
    """All bytes of one storage, which any number of saved tensors share.

    `source` and `buffer` refer to it while it waits to be gathered, and `handle` once the scheduler has it.
    """

    __slots__ = ("__weakref__", "_place", "saves", "stream", "version")

    def __init__(self, source: Tensor, buffer: Tensor, stream: Any):
        # One attribute, so that an interrupt finds either all of one place or all of the other.
        self._place: tuple[Tensor, Tensor] | tuple[OffloadHandle, int] = source, buffer
        self.stream, self.version = stream, source._version
        self.saves = 1

    @property
    def source(self) -> Tensor:
        """The tensor that was saved, without its history, before `hand_over`."""
        assert isinstance(self._place[0], Tensor)
        return self._place[0]

    @property
    def buffer(self) -> Tensor:
        """All its storage, uint8 [nbytes], before `hand_over`."""
        assert isinstance(self._place[1], Tensor)
        return self._place[1]

    @property
    def handle(self) -> OffloadHandle | None:
        """Whose buffer has the bytes after `hand_over`."""
        return None if isinstance(self._place[0], Tensor) else self._place[0]

    @property
    def offset(self) -> int:
        """Where in that buffer they begin."""
        return 0 if isinstance(self._place[1], Tensor) else self._place[1]

    def is_changed(self) -> bool:
        """Return whether the user changed it in place since it was saved."""
        place = self._place[0]
        return place._version != self.version if isinstance(place, Tensor) else place.is_changed()

    def hand_over(self, handle: OffloadHandle, offset: int = 0) -> None:
        """From now on the bytes are those of `handle`, from `offset`."""
        self._place = handle, offset


class Part:
    """A saved tensor: which elements of a storage it is."""

    __slots__ = ("dtype", "offset", "packer", "size", "storage", "stride", "version")

    def __init__(self, packer: Unpacker, storage: Storage, tensor: Tensor):
        self.packer, self.storage, self.version = packer, storage, tensor._version
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset()
        self.size, self.stride = tuple(tensor.shape), tensor.stride()

    def unpack(self) -> Tensor:
        """Return the tensor, on its device and with its layout."""
        return self.packer.unpack(self)


def refusal(tensor: Tensor, min_bytes: int) -> str | None:
    """Return why a tensor stays where it is, None if it may go."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return "without memory of its own"
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_neg() or tensor.is_conj():
        # Its elements are not what its bytes say.
        return "negated or conjugated view"
    if tensor.is_quantized:
        return "quantized"
    if tensor.untyped_storage().nbytes() <= min_bytes:
        return "small"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "expanded"
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, Parameter):
        return "parameter"
    # Autocast casts a parameter once and keeps the copy: ToCopyBackward, with the parameter's node before it.
    node = base.grad_fn
    if node is not None and node.name().startswith("ToCopyBackward"):
        before = node.next_functions[0][0]
        if isinstance(getattr(before, "variable", None), Parameter):
            return "copy of a parameter"
    return None


def changed(shape: tuple[int, ...]) -> str:
    """Return what is wrong with a tensor of that shape."""
    return (
        f"a tensor of shape {shape} saved for the backward pass was changed by an in-place operation afterwards: "
        "work on a clone of it, or change it before it is used"
    )
