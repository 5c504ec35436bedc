"""Offloading for any module: saved-tensor hooks over the same scheduler.

Autograd hands every tensor that it saves to `pack`, and asks `unpack` for it when the backward pass wants it. What is
kept between the two knows nothing of the graph, so that a graph that is dropped takes it along.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.device import storage_holders
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.stack import Offloader, OffloadHandle, ReservedSlot, adopt

_RECURS = 3
"""Saved this often, a tensor is one that every step uses again."""
_SMALL = 8
"""A tensor is small if so many would not fill a chunk."""
_ALIGNMENT = 256


class _Kept:
    """A tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # Without its history, which would lead back to the node that saves it.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(_changed(tuple(self.tensor.shape)))
        return self.tensor


class _Storage:
    """All bytes of one storage, which any number of saved tensors share.

    `source` and `buffer` refer to it while it waits to be gathered, and `handle` once the scheduler has it.
    """

    __slots__ = ("__weakref__", "buffer", "handle", "offset", "saves", "source", "stream", "version")

    def __init__(self, source: Tensor, buffer: Tensor, stream: Any):
        self.source, self.buffer, self.stream, self.version = source, buffer, stream, source._version
        self.handle: OffloadHandle | None = None
        self.offset = 0
        self.saves = 1

    def is_changed(self) -> bool:
        """Return whether the user changed it in place since it was saved."""
        return self.source._version != self.version if self.handle is None else self.handle.is_changed()

    def hand_over(self, handle: OffloadHandle, offset: int = 0) -> None:
        """From now on the bytes are those of `handle`, from `offset`."""
        del self.source, self.buffer
        self.handle, self.offset = handle, offset


class _Part:
    """A saved tensor: which elements of a storage it is."""

    __slots__ = ("dtype", "offset", "packer", "size", "storage", "stride", "version")

    def __init__(self, packer: "_Packer", storage: _Storage, tensor: Tensor):
        self.packer, self.storage, self.version = packer, storage, tensor._version
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset()
        self.size, self.stride = tuple(tensor.shape), tensor.stride()

    def unpack(self) -> Tensor:
        return self.packer.unpack(self)


class _Packer:
    """Packs the tensors of one device.

    A large tensor is adopted by the scheduler as it is. Small ones wait until together they make a copy that is worth
    its while; then those to which nobody else refers are gathered into a slot of the ring.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._chunk = scheduler, scheduler.config.chunk_bytes
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[tuple[int, int], _Storage] = weakref.WeakValueDictionary()
        self._small: deque[weakref.ref[_Storage]] = deque()
        self._alive = 0
        self._waiting = 0

    def pack(self, tensor: Tensor) -> "_Part | _Kept":
        """Return what stands for a tensor until the backward pass."""
        reason = _refusal(tensor, self._scheduler.config.min_bytes)
        if reason is not None:
            self._scheduler.counters.skip(reason)
            return _Kept(tensor)
        with self._lock, torch.no_grad():
            return _Part(self, self._find(tensor) or self._add(tensor), tensor)

    def unpack(self, part: _Part) -> Tensor:
        """Return the tensor, on its device and with its layout."""
        storage = part.storage
        with self._lock, torch.no_grad():
            if storage.is_changed():
                self._scheduler.counters.changed_in_place += 1
                raise RuntimeError(_changed(part.size))
            buffer: Tensor = storage.buffer if storage.handle is None else storage.handle.get()
            offset = (buffer.storage_offset() + storage.offset) // part.dtype.itemsize + part.offset
            # Not a view: what the backward pass does with it is no business of others that share the storage.
            tensor = torch.empty(0, dtype=part.dtype, device=buffer.device)
            return tensor.set_(buffer.untyped_storage(), offset, part.size, part.stride)

    def _find(self, tensor: Tensor) -> _Storage | None:
        """Return the storage of a tensor if it was saved before and is still the same."""
        # While a storage is its original self it is referred to, so that no other can have its address.
        storage = self._shared.get((tensor.untyped_storage()._cdata, tensor._version))
        if storage is None or not (storage.handle is None or storage.handle.is_adopted()) or storage.is_changed():
            return None
        storage.saves += 1
        self._scheduler.counters.shared += 1
        if storage.saves == _RECURS and storage.handle is not None:
            storage.handle.keep()
        return storage

    def _add(self, tensor: Tensor) -> _Storage:
        scheduler, memory = self._scheduler, tensor.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        storage = _Storage(tensor.detach(), buffer, scheduler.device.current_stream())
        self._shared[memory._cdata, tensor._version] = storage
        if buffer.numel() >= self._chunk // _SMALL:
            storage.hand_over(adopt(scheduler, storage.source, buffer))
            return storage
        self._small.append(weakref.ref(storage))
        self._waiting += buffer.numel()
        # The allocator is asked once for as many as make a chunk.
        if self._waiting >= self._chunk:
            self._waiting = 0
            if scheduler.is_pressed():
                self._gather()
            elif len(self._small) > 2 * self._alive + _SMALL:
                self._small = deque(found for found in self._small if found() is not None)
                self._alive = len(self._small)
        return storage

    def _gather(self) -> None:
        """Copy the oldest small storages to which nobody else refers into one slot, if they fill half of it."""
        stream, total = self._scheduler.device.current_stream(), 0
        chosen: list[_Storage] = []
        for _ in range(len(self._small)):
            storage = self._small[0]()
            if storage is not None and total + _aligned(storage) > self._chunk:
                break
            self._small.popleft()
            if storage is None:
                continue
            # The source refers to it besides the buffer. What every step uses again would be back at once.
            alone = storage_holders(storage.buffer) == 1 and storage.saves < _RECURS
            if alone and storage.stream == stream and not storage.is_changed():
                chosen.append(storage)
                total += _aligned(storage)
            else:
                self._small.append(weakref.ref(storage))
        if 2 * total < self._chunk:
            self._small.extendleft(weakref.ref(storage) for storage in reversed(chosen))
        else:
            self._copy(chosen, total)

    def _copy(self, storages: list[_Storage], total: int) -> None:
        scheduler, offset, places = self._scheduler, 0, []
        slot = ReservedSlot(scheduler, total)
        for storage in storages:
            slot.buffer[offset : offset + storage.buffer.numel()].copy_(storage.buffer)
            # Somebody else may have allocated it, on whichever stream.
            scheduler.device.record_stream(storage.buffer, storage.stream)
            places.append((storage, offset))
            offset += _aligned(storage)
        handle = slot.push()
        for storage, offset in places:
            storage.hand_over(handle, offset)
        scheduler.counters.gathered += len(places)
        scheduler.counters.gatherings += 1


class OffloadHooks(Offloader):
    """The context that `offload` returns: what is saved within it may go to the host.

    It may be entered any number of times, and the backward pass may run after it has been left. Within other
    saved-tensor hooks, such as those of checkpointing or `save_on_cpu`, or within another `offload()`, the outer ones
    stay in force and this does nothing.
    """

    def __init__(self, config: OffloadConfig | None = None):
        super().__init__(config)
        self._packers: dict[torch.device, _Packer] = {}
        self._entered = threading.local()

    def __enter__(self) -> Self:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooks = self.hooks() if outer is None else None
        if hooks is not None:
            hooks.__enter__()
        self._entered.__dict__.setdefault("hooks", []).append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hooks = self._entered.hooks.pop()
        if hooks is not None:
            hooks.__exit__()

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which what this thread saves goes through the scheduler, whatever hooks are outside."""
        return saved_tensors_hooks(self._pack, _unpack)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is saved within this context on the device."""
        with saved_tensors_hooks(_Kept, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> "_Part | _Kept":
        # A tensor of another kind may have no storage, or not this one's meaning of it.
        scheduler = self.scheduler(tensor.device) if type(tensor) in (Tensor, Parameter) else None
        if scheduler is None or scheduler.device.is_capturing():
            return _Kept(tensor)
        packer = self._packers.get(tensor.device)
        if packer is None:
            packer = self._packers.setdefault(tensor.device, _Packer(scheduler))
        return packer.pack(tensor)


def offload(config: OffloadConfig | None = None) -> OffloadHooks:
    """Return a context in which the tensors that autograd saves move to the host when the device is nearly full.

    Parameters, their views and autocast copies, integers, sparse and expanded tensors stay where they are. A storage
    that is saved several times is copied once; small tensors are gathered into large copies.

        with fusedrnn.offload() as off:
            loss = model(x).sum()
        loss.backward()
        print(off.explain())

    Args:
        config: When and into how much memory; None for the defaults.
    """
    return OffloadHooks(config)


def innermost() -> OffloadHooks | None:
    """Return the offloader in whose context the calling thread is, None if there is none or other hooks are inside."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, OffloadHooks) else None


class _SharedHooks(OffloadHooks):
    """The one offloader of all that are given equal configurations; a copy of such a layer has it, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadHooks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self.config,)


@lru_cache(maxsize=16)
def _shared(config: OffloadConfig) -> OffloadHooks:
    return _SharedHooks(config)


def offloader(name: str, value: object) -> OffloadHooks | None:
    """Return the offloader that an argument stands for, or None for False.

    Equal configurations share one: one ring, one pool of host memory, one order of what is oldest.

    Args:
        name: The argument's name.
        value: True, False, an `OffloadConfig`, or what `offload()` returned.

    Raises:
        TypeError: If it is something else.
    """
    if value is False:
        return None
    if value is True:
        value = OffloadConfig()
    if isinstance(value, OffloadConfig):
        return _shared(value)
    if isinstance(value, OffloadHooks):
        return value
    raise TypeError(
        f"`{name}` must be True, False, an OffloadConfig or what `fusedrnn.offload()` returns, got "
        f"{type(value).__name__}"
    )


def _unpack(packed: "_Part | _Kept") -> Tensor:
    return packed.unpack()


def _refusal(tensor: Tensor, min_bytes: int) -> str | None:
    """Return why a tensor stays where it is, None if it may go."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return "without memory of its own"
    if tensor.layout is not torch.strided:
        return "sparse"
    if not tensor.is_floating_point():
        return "not floating"
    if tensor.is_neg():
        return "negated view"
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


def _aligned(storage: _Storage) -> int:
    return -(-storage.buffer.numel() // _ALIGNMENT) * _ALIGNMENT


def _changed(shape: tuple[int, ...]) -> str:
    return (
        f"a tensor of shape {shape} saved for the backward pass was changed by an in-place operation afterwards: "
        "work on a clone of it, or change it before it is used"
    )
