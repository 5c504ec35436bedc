"""One operation at a time over a state, and what becomes of it if one is interrupted.

An interrupt (Ctrl-C, or whatever else a signal handler raises) may come between any two instructions. What it leaves
behind is not mended but replaced, before the next operation. Finalizers, which may run in the midst of anything and on
any thread, only queue what has lost its owner; whoever leaves the lock ends it.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from fusedrnn.offloading.entry import Owner
from fusedrnn.offloading.threads import is_copy_thread

R = TypeVar("R")

ORDERLY = (RuntimeError, Warning)
"""What operations raise on purpose, and devices when they fail: the state is then as it should be. After anything else
it may not be."""
_ALL: WeakSet["Exclusive"] = WeakSet()


class Guarded(Protocol):
    """The state that is guarded."""

    def require_usable(self) -> None:
        """Raise RuntimeError if nothing may be done now; called before anything else."""

    def is_usable(self) -> bool:
        """Return whether something may be done now."""

    def start_anew(self) -> None:
        """Replace the state."""

    def end(self, owner: Owner) -> None:
        """End what has lost its owner; called again if that fails."""

    def tidy(self) -> None:
        """Do what is to be done before every operation."""


class Exclusive:
    """Runs operations one at a time, from any thread.

    Args:
        state: What they work on.
    """

    def __init__(self, state: Guarded):
        self._state = state
        # Only `with` takes it: CPython lets no interrupt come between taking a lock and the block.
        self._lock = threading.Lock()
        self._holder = 0
        """Thread that took the lock last."""
        self._busy = False
        """Whether an operation is under way, or was when it was interrupted."""
        self.ownerless: deque[Owner] = deque()
        _ALL.add(self)

    def after_fork(self) -> None:
        """Start anew in a forked process: a lock may be held by a thread that does not exist there."""
        self._lock, self._busy, self.ownerless = threading.Lock(), True, deque()

    def run(self, operation: Callable[..., R], *args: Any) -> R:
        """Return what an operation returns."""
        with self._lock:
            self._holder = threading.get_ident()
            self._state.require_usable()
            if self._busy:
                self._state.start_anew()
            self._busy = True
            try:
                self._end_ownerless()
                result = operation(*args)
            except ORDERLY:
                self._busy = False
                raise
            self._busy = False
        if self.ownerless:
            self.collect()
        return result

    def peek(self, operation: Callable[[], R]) -> R:
        """Return what an operation returns that changes nothing, and is possible at any time."""
        with self._lock:
            return operation()

    def collect(self) -> None:
        """End what has lost its owner, unless somebody is at work here, who will do it."""
        # A copy thread must wait for nobody, and a thread that is at work in another scheduler not for this one.
        while self.ownerless and not self._lock.locked() and not is_copy_thread() and not _is_inside():
            with self._lock:
                self._holder = threading.get_ident()
                if self._busy or not self._state.is_usable():
                    return
                self._busy = True
                try:
                    self._end_ownerless()
                except ORDERLY:
                    # The next operation tries it again, and raises.
                    self._busy = False
                    return
                self._busy = False

    def try_to(self, operation: Callable[[], None]) -> None:
        """Run an operation if nobody is at work here. Only for threads to which no interrupt comes."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    operation()
            finally:
                self._lock.release()

    def _end_ownerless(self) -> None:
        while self.ownerless:
            # Only removed when it is done, so that nothing is lost if a device operation fails.
            self._state.end(self.ownerless[0])
            self.ownerless.popleft()
        self._state.tidy()


def _is_inside() -> bool:
    """Return whether this thread is at work in any scheduler."""
    me = threading.get_ident()
    return any(found._holder == me and found._lock.locked() for found in list(_ALL))
