"""What a scheduler tells the user by itself, once."""

import warnings

from fusedrnn.offloading.transfers import Transfers


class Notices:
    """Warns that the host is full, or that a file cannot be written."""

    def __init__(self) -> None:
        self._said_full = self._said_failed = False

    def warn(self, transfers: Transfers) -> None:
        """Say what has not been said; a warning that is an error leaves everything as it is."""
        if transfers.counters.host_full and not self._said_full:
            self._said_full = True
            warnings.warn(_host_full(transfers), RuntimeWarning, stacklevel=7)
        if transfers.error is not None and not self._said_failed:
            self._said_failed = True
            warnings.warn(
                f"offloading could not write to {transfers.config.spill_dir} (`spill_dir`): {transfers.error}. What "
                "could not be written stays in memory. Make room there, or name a folder on another disk",
                RuntimeWarning,
                stacklevel=7,
            )


def _host_full(transfers: Transfers) -> str:
    pool, direct, folder = transfers.host, transfers.direct, transfers.config.spill_dir
    if direct:
        name, what, calls, room = (
            "disk_limit",
            f"room left in {folder} (`spill_dir`)",
            "requests for a file",
            "disk space",
        )
    else:
        name, what, calls, room = "host_limit", "pinned host memory left", "allocations of pinned memory", "host memory"
    reason = f"{pool.used} bytes of at most {pool.limit} (`{name}`) are in use"
    if others := pool.account.others(pool):
        reason += f", {others} more are held by other offloaders of this process"
    if pool.failures:
        reason += f", and {pool.failures} {calls} failed"
    if transfers.disk is not None and transfers.counters.disk_full:
        reason += f"; so are {transfers.disk.used} of at most {transfers.disk.limit} (`disk_limit`) in files"
    return (
        f"offloading has no {what}: {reason}. What does not fit stays on the device. Raise `{name}`, free {room}, or "
        "use a save mode that keeps less"
    )
