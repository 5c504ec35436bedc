"""Running something again as it ran: its surroundings, and which tensors with gradients it takes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states


class Surroundings:
    """What results depend on beyond the arguments: random numbers, autocast, default device.

    Args:
        x: A tensor of the device on which is computed.
    """

    def __init__(self, x: Tensor) -> None:
        self.type, self.device = x.device.type, torch.get_default_device()
        self.rng = torch.get_rng_state(), *get_device_states(x)
        self.autocast: dict[str, Any] | None = None
        if torch.amp.is_autocast_available(self.type):
            self.autocast = {
                "dtype": torch.get_autocast_dtype(self.type),
                "enabled": torch.is_autocast_enabled(self.type),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }

    def __eq__(self, other: object) -> bool:
        """Return whether what runs in one gives what it gives in the other; many runs in a row share one object."""
        if not isinstance(other, Surroundings):
            return NotImplemented
        (host, devices, states), (host_, devices_, states_) = self.rng, other.rng
        mine, theirs = (self.type, self.device, self.autocast), (other.type, other.device, other.autocast)
        return mine == theirs and devices == devices_ and all(map(torch.equal, [host, *states], [host_, *states_]))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run what is inside as it would have run then, recorded by autograd; nothing of this remains afterwards."""
        host, devices, states = self.rng
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=self.type))
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.type, **self.autocast))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            torch.set_rng_state(host)
            set_device_states(devices, states, device_type=self.type)
            # A cast remembered from elsewhere would hide which tensor it is a copy of.
            torch.clear_autocast_cache()
            try:
                yield
            finally:
                torch.clear_autocast_cache()


def unhooked() -> saved_tensors_hooks:
    """Return a context whose saved tensors the caller's hooks do not see, since they are dropped right away."""
    # An output that was saved as it is would refer to itself, and live until garbage is collected.
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def as_leaf(tensor: Tensor, needed: bool = True) -> Tensor:
    """Return the tensor without its history, as one whose gradient is wanted if it is needed and can exist."""
    return tensor.detach().requires_grad_(needed and differentiable(tensor))


def differentiable(tensor: Tensor) -> bool:
    """Return whether a tensor of this dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def now() -> int:
    """Return the number that autograd, which counts the operations of a thread, gave to the last one."""
    node = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    assert node is not None
    return node._sequence_nr()


def reached(tensors: list[Tensor], start: int) -> tuple[dict[int, Tensor], bool]:
    """Return the leaves (by id) on which tensors depend, and whether operations numbered `start` or less are among it.

    Nothing before those operations is visited.
    """
    leaves = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None}
    seen = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    todo, history = list(seen), False
    while todo:
        node = todo.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            leaves[id(node.variable)] = node.variable
        elif node._sequence_nr() <= start:
            history = True
        else:
            for other, _ in node.next_functions:
                if other is not None and other not in seen:
                    seen.add(other)
                    todo.append(other)
    return leaves, history


def gradients(outputs: Iterable[Tensor], grads: Iterable[Tensor | None], inputs: Sequence[Tensor]) -> list[Any]:
    """Return the gradient of each input, None where there is none.

    Args:
        outputs: What is differentiated. An input among them adds its gradient to what is found: put before all others,
            the sum of gradients so far keeps the order of summation of one graph, and so the rounding.
        grads: Their gradients, None for zero.
        inputs: Leaves, of which those with `requires_grad` get one.
    """
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    differentiated, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(differentiated, wanted, given, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def require_unchanged(versions: Iterable[tuple[Tensor, int]], user: str) -> None:
    """Raise RuntimeError if a tensor was changed in place since its version was noted; `user` says who reads it."""
    for tensor, version in versions:
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that {user} uses must stay as it was until the backward "
                f"pass, got version {tensor._version} after {version}: it was modified by an inplace operation"
            )
