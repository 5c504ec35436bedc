"""Offloading for any module: saved-tensor hooks over the same scheduler.

Autograd hands every tensor that it saves to `pack`, and asks `unpack` for it when the backward pass wants it. What is
kept between the two knows nothing of the graph, so that a graph that is dropped takes it along.
"""

import contextlib
import sys
import threading
import warnings
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
from fusedrnn.offloading.saved import Kept, Part, Storage, changed, refusal
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.stack import Offloader, ReservedSlot, adopt
from fusedrnn.offloading.stats import HELD
from fusedrnn.offloading.untraced import untraced

_RECURS = 3
"""Saved this often, a tensor is one that every step uses again."""
_SMALL = 8
"""A tensor is small if so many would not fill a chunk."""
_ALIGNMENT = 256


class _Packer:
    """Packs the tensors of one device.

    A large tensor is adopted by the scheduler as it is. Small ones wait until together they make a copy that is worth
    its while; then those to which nobody else refers are gathered into a slot of the ring.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._chunk = scheduler, scheduler.config.chunk_bytes
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[tuple[int, int], Storage] = weakref.WeakValueDictionary()
        self._small: deque[weakref.ref[Storage]] = deque()
        self._alive = 0
        self._waiting = 0

    def pack(self, tensor: Tensor) -> "Part | Kept":
        """Return what stands for a tensor until the backward pass."""
        reason = refusal(tensor, self._scheduler.config.min_bytes)
        if reason is not None:
            self._scheduler.counters.skip(reason)
            return Kept(tensor)
        with self._lock:
            return Part(self, self._find(tensor) or self._add(tensor), tensor)

    def unpack(self, part: Part) -> Tensor:
        """Return the tensor, on its device and with its layout."""
        storage = part.storage
        with self._lock:
            if storage.is_changed():
                self._scheduler.counters.changed_in_place += 1
                raise RuntimeError(changed(part.size))
            buffer: Tensor = storage.buffer if storage.handle is None else storage.handle.get()
            offset = (buffer.storage_offset() + storage.offset) // part.dtype.itemsize + part.offset
            # Not a view: what the backward pass does with it is no business of others that share the storage.
            tensor = torch.empty(0, dtype=part.dtype, device=buffer.device)
            return tensor.set_(buffer.untyped_storage(), offset, part.size, part.stride)

    def _find(self, tensor: Tensor) -> Storage | None:
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

    def _add(self, tensor: Tensor) -> Storage:
        scheduler, memory = self._scheduler, tensor.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        storage = Storage(tensor.detach(), buffer, scheduler.device.current_stream())
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

    def look_again(self) -> int:
        """Move what may go now that those who computed it have returned; return how many they still hold."""
        with self._lock:
            while len(self._small) > _SMALL and self._scheduler.is_pressed() and self._gather():
                pass
        held = self._scheduler.counters.pinned_by_alias
        self._scheduler.make_room()
        return self._scheduler.counters.pinned_by_alias - held

    def moved(self) -> int:
        """Return how many copies were made or were refused by the host so far."""
        counters = self._scheduler.counters
        return counters.spills + counters.gatherings + counters.host_full

    def _gather(self) -> bool:
        """Copy the oldest small storages to which nobody else refers into one slot, if they fill half of it."""
        stream, total = self._scheduler.device.current_stream(), 0
        chosen: list[Storage] = []
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
            return False
        self._copy(chosen, total)
        return True

    def _copy(self, storages: list[Storage], total: int) -> None:
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


class _Hooks(saved_tensors_hooks):
    """The hooks of one context; when it is left, what could not go before is looked at once more."""

    def __init__(self, owner: "OffloadHooks"):
        pack, unpack = owner._pack, _unpack
        if "torch._dynamo" in sys.modules:
            # Tensors are saved from within compiled code, too, where the compiler would look into what it calls.
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
            pack.__self__ = owner
        super().__init__(pack, unpack)
        self._owner = owner

    def __enter__(self) -> None:
        self._before = self._owner._moved()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not any(error):
            self._owner._look_again(self._before)


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
        self._said = False

    @untraced
    def __enter__(self) -> Self:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooks = self.hooks() if outer is None else None
        entered = self._entered.__dict__.setdefault("hooks", [])
        entered.append(hooks)
        try:
            if hooks is not None:
                hooks.__enter__()
            return self
        except BaseException:
            # Interrupted: `__exit__` will not be called.
            self._leave(entered)
            raise

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered = self._entered.hooks
        try:
            if entered[-1] is not None:
                entered[-1].__exit__(kind, error, traceback)
        finally:
            self._leave(entered)

    def _leave(self, entered: list[_Hooks | None]) -> None:
        """Leave the innermost context, or what is left of it after an interrupt."""
        if entered.pop() is not None and innermost() is self:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which what this thread saves goes through the scheduler, whatever hooks are outside.

        Saved-tensor hooks are a thread's own, so that threads that start within `with offload() as off`, as the
        replicas of `torch.nn.DataParallel` do, save as if it were not there: `with off.hooks()` in each of them.
        """
        return _Hooks(self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is saved within this context on the device."""
        with saved_tensors_hooks(Kept, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> "Part | Kept":
        # A tensor of another kind may have no storage, or not this one's meaning of it.
        if type(tensor) not in (Tensor, Parameter):
            self._own.skip(f"of the class {type(tensor).__name__}")
            return Kept(tensor)
        if tensor.device.type == "cpu" and self._is_beside(tensor):
            return Kept(tensor)
        scheduler = self.scheduler(tensor.device)
        if scheduler is None or scheduler.device.is_capturing():
            return Kept(tensor)
        packer = self._packers.get(tensor.device)
        if packer is None:
            packer = self._packers.setdefault(tensor.device, _Packer(scheduler))
        return packer.pack(tensor)

    def _is_beside(self, tensor: Tensor) -> bool:
        """Return whether a tensor on the CPU is none that a program which computes there would want to be rid of."""
        if any(device.type != "cpu" for device in self._active()):
            self._own.skip("on the CPU beside another device")
            return True
        if tensor.device in self._schedulers or tensor.layout is not torch.strided:
            return False
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor()
        return wrapped or tensor.untyped_storage().nbytes() <= self.config.min_bytes

    def _moved(self) -> int:
        """Return how many copies were made or were refused by the host so far."""
        return sum(packer.moved() for packer in list(self._packers.values()))

    def _look_again(self, before: int) -> None:
        """Move what may go at the end of a context; say so, once, if it all is held by others.

        Args:
            before: What `_moved` returned at the context's beginning.
        """
        held = sum([packer.look_again() for packer in list(self._packers.values())])
        if held > self.config.ring_slots and self._moved() == before and not self._said:
            self._said = True
            warnings.warn(f"offloading moved nothing of what was saved: {HELD}", RuntimeWarning, stacklevel=4)

    def _after_fork(self) -> None:
        super()._after_fork()
        for packer in self._packers.values():
            packer._lock = threading.Lock()
        self._packers = {}


def offload(config: OffloadConfig | None = None) -> OffloadHooks:
    """Return a context in which the tensors that autograd saves move to the host when the device is nearly full.

    Tensors of any dtype move. Parameters, their views and autocast copies, sparse and expanded tensors and those of
    subclasses of Tensor stay where they are, and so does, of a program that saves tensors on another device, all that
    is on the CPU. A storage that is saved several times is copied once; small tensors are gathered into large copies.

        with fusedrnn.offload() as off:
            loss = model(x).sum()
        loss.backward()
        print(off.explain())

    It holds for the thread that enters it: one that starts within, as the replicas of `torch.nn.DataParallel` do, needs
    a `with off.hooks()` of its own. A module compiled as one graph saves all at once when it returns, so that its
    tensors move at the end of the context; compiled block by block, they move as they are made.

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


def _unpack(packed: "Part | Kept") -> Tensor:
    return packed.unpack()


def _aligned(storage: Storage) -> int:
    return -(-storage.buffer.numel() // _ALIGNMENT) * _ALIGNMENT
