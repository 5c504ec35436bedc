"""What a forked process must not use: it starts anew, without its parent's threads, copies and buffers."""

import os
from typing import Any, Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Something with state that a forked process must not use."""

    def _after_fork(self) -> None:
        """Start anew; called in the child, which has one thread."""


_REGISTERED: WeakSet[Any] = WeakSet()


def reset_after_fork(item: Forked) -> None:
    """Let `item._after_fork()` be called in every child that this process forks while the item lives."""
    _REGISTERED.add(item)


def _reset() -> None:
    for item in list(_REGISTERED):
        item._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
