"""What a user may say about offloading, and how much host memory a process may pin."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fusedrnn._checks import budget_bytes

_LOW = 0.6


class _Following(float):
    """A low mark that nobody named: it follows the limit, also where a configuration is made from another."""


_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


class OffloadHostFull(RuntimeError):
    """Raised where `on_host_full="raise"` and neither the host nor the ring has room for another buffer."""


@dataclass(frozen=True)
class OffloadConfig:
    """Say what is offloaded, when, and into how much memory.

    Args:
        min_bytes: Buffers of more bytes than this may be offloaded; others stay on the device.
        occupancy_limit: Fraction of the device's memory in use above which the oldest buffers go to the host.
        low_watermark: Fraction at or below which the ring may grow again; by default 0.6, or 6/7 of a limit below
            0.7.
        ring_slots: Device buffers that offloading works with when the device is full, at least 2.
        prefetch: How many of the next buffers to be read are fetched ahead.
        chunk_bytes: Size up to which `offload()` gathers small tensors into one copy.
        host_limit: Most pinned host memory of all processes on this machine together, in bytes or as a percentage such
            as "50%" of what they may use. Where torchrun started several (LOCAL_WORLD_SIZE), each has an equal share.
        on_host_full: "keep" lets buffers stay on the device when the host is full, "raise" raises `OffloadHostFull`.
        occupancy: Source of the occupancy, a function that returns a fraction in [0, 1]; None asks the device.
            With a source, offloading also runs on the CPU, where copies are made by threads. To be pickled with its
            layer it must be one that pickle takes, such as a module's function, and no lambda.
        trace: Whether the times of chunks and copies are kept for `export_trace`.
        debug: Whether internal facts are checked at every call (slow).
        spill_dir: A folder on a disk of this machine. Buffers for which the host has no room go on to a file there, and
            on the CPU, where offloading then runs, they go there at once. The file has no name and leaves nothing
            behind.
        disk_limit: Most bytes of such files of all processes on this machine together, or as a percentage of what is
            free there; shared as `host_limit` is.
        memory_budget: Most bytes of device memory that the buffers of layers may take, a number or a string such as
            "2GiB", whatever else the device has; what `offload()` finds saved by others goes when they exceed it. None
            leaves that to the occupancy.

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If `occupancy` cannot be called.
    """

    min_bytes: int = 2048
    occupancy_limit: float = 0.7
    low_watermark: float = _Following(_LOW)
    ring_slots: int = 4
    prefetch: int = 2
    chunk_bytes: int = 4 << 20
    host_limit: int | str = "50%"
    on_host_full: str = "keep"
    occupancy: Callable[[], float] | None = field(default=None, hash=False)
    trace: bool = False
    debug: bool = False
    spill_dir: str | os.PathLike[str] | None = None
    disk_limit: int | str = "50%"
    memory_budget: int | str | None = None

    def __post_init__(self) -> None:
        for name, least in (("min_bytes", 0), ("ring_slots", 2), ("prefetch", 0), ("chunk_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
        if isinstance(self.low_watermark, _Following):
            low = _LOW if self.occupancy_limit >= 0.7 else self.occupancy_limit * 6 / 7
            object.__setattr__(self, "low_watermark", _Following(low))
        if not 0 <= self.low_watermark <= self.occupancy_limit <= 1:
            raise ValueError(
                "`low_watermark` and `occupancy_limit` must satisfy 0 <= low_watermark <= occupancy_limit <= 1, "
                f"got {self.low_watermark} and {self.occupancy_limit}."
            )
        if self.on_host_full not in ("keep", "raise"):
            raise ValueError(f'`on_host_full` must be "keep" or "raise", got {self.on_host_full!r}.')
        if self.occupancy is not None and not callable(self.occupancy):
            raise TypeError(f"`occupancy` must be a function that returns a fraction, got {self.occupancy!r}.")
        self.host_bytes()
        self.disk_bytes()
        self.budget_bytes()

    def budget_bytes(self) -> int | None:
        """Return `memory_budget` in bytes."""
        return budget_bytes(self.memory_budget)

    def host_bytes(self) -> int:
        """Return this process's share of `host_limit` in bytes."""
        return _share("host_limit", self.host_limit, process_memory)

    def disk_bytes(self) -> int:
        """Return this process's share of `disk_limit` in bytes, 0 without `spill_dir`.

        Raises:
            ValueError: If `spill_dir` is no folder in which files can be made, or not any more.
        """
        if self.spill_dir is not None and not (
            isinstance(self.spill_dir, str | os.PathLike)
            and os.path.isdir(self.spill_dir)
            and os.access(self.spill_dir, os.W_OK | os.X_OK)
        ):
            raise ValueError(
                f"`spill_dir` must be a folder in which files can be made, got {self.spill_dir!r}: make it first, or "
                "name another on a disk of this machine."
            )
        folder = self.spill_dir
        return _share("disk_limit", self.disk_limit, lambda: 0 if folder is None else shutil.disk_usage(folder).free)


def _share(name: str, limit: int | str, whole: Callable[[], int]) -> int:
    """Return one process's share of a limit that is given in bytes or as a percentage of `whole()`."""
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if isinstance(limit, int) and limit >= 0:
        return limit // processes
    match = _PERCENTAGE.fullmatch(limit) if isinstance(limit, str) else None
    if match is None or float(match[1]) > 100:
        raise ValueError(f'`{name}` must be a number of bytes or a percentage from "0%" to "100%", got {limit!r}.')
    return int(whole() * float(match[1]) / 100) // processes


def process_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or less where a cgroup says so.

    The limit of locked memory (RLIMIT_MEMLOCK) is no part of it: the driver pins pages itself and does not ask it.

    Args:
        root: Where /proc and /sys are found.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        # Every group above has its say, too. Inside a container the path may not exist while the top does.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
            if folder == top:
                break
    return min(limits)
