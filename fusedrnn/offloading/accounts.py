"""How much pinned memory, and how much of a disk, all offloaders of this process have together."""

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from fusedrnn.offloading.forks import reset_after_fork


class Account:
    """What the pools of one kind hold, so that a limit is the process's and not each pool's."""

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._pools: WeakKeyDictionary[Any, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()
        self.lock = threading.Lock()
        """Held while a pool grows."""

    def join(self, pool: Any, give_back: "WeakMethod[Callable[[], None]]") -> None:
        """Count a pool's `reserved` bytes as long as it lives; `give_back` lets it give back what it does not use."""
        self._pools[pool] = give_back

    def others(self, pool: Any) -> int:
        """Return the bytes that all pools but this one hold."""
        return sum(found.reserved for found in list(self._pools) if found is not pool)

    def reclaim(self, pool: Any) -> None:
        """Let all pools but this one give back what they do not use."""
        if all(found is pool or not found.reserved for found in list(self._pools)):
            return

        def ask() -> None:
            for found, give_back in list(self._pools.items()):
                if found is not pool and (call := give_back()) is not None:
                    call()

        # No interrupt comes to a thread of its own, so the others' locks are given back in any case.
        thread = threading.Thread(target=ask, name="fusedrnn-reclaim", daemon=True)
        thread.start()
        thread.join()


_ACCOUNTS: dict[int | None, Account] = {None: Account()}


def process_account(folder: str | os.PathLike[str] | None = None) -> Account:
    """Return the account of pinned memory, or of the file system that a folder is in."""
    return _ACCOUNTS.setdefault(None if folder is None else os.stat(folder).st_dev, Account())
