"""What is eligible, whom to spill, how many, and how far to fetch ahead: functions without side effects."""

from dataclasses import dataclass
from enum import Enum


class Pressure(Enum):
    """How full the device is."""

    NONE = 0
    """There is room: buffers stay."""
    PACED = 1
    """Above the limit, with memory left: spill what the link can hide and keep the rest."""
    FULL = 2
    """Above the limit: the ring keeps to its bound."""


@dataclass(frozen=True)
class Speeds:
    """Measured seconds, None where not known yet.

    Args:
        compute: Time in which the forward pass fills one byte of buffers.
        consume: Time in which the backward pass is done with one byte.
        spill: Time in which the link takes one byte to the host.
        fetch: Time in which it brings one byte back.
        write: Time in which the disk takes one byte from the host.
        read: Time in which it brings one byte back.
    """

    compute: float | None = None
    consume: float | None = None
    spill: float | None = None
    fetch: float | None = None
    write: float | None = None
    read: float | None = None


def eligible(nbytes: int, min_bytes: int) -> bool:
    """Return whether a buffer may be offloaded: if it has more than `min_bytes`, as in TensorFlow's swap_memory."""
    return nbytes > min_bytes


def hidden_fraction(speeds: Speeds) -> float:
    """Return phi = min(1, compute / spill), the fraction of the buffers that the link can take without a stall."""
    if not speeds.compute or not speeds.spill:
        return 1.0
    return min(1.0, speeds.compute / speeds.spill)


def pressure(occupancy: float, limit: float, low: float, before: Pressure, speeds: Speeds) -> Pressure:
    """Return how full the device is.

    Pressure begins above `limit` and ends at `low`. Where the link is too slow to take everything, half of what is
    left above the limit is used for buffers that would otherwise have to be waited for.
    """
    if occupancy <= low or (occupancy <= limit and before is Pressure.NONE):
        return Pressure.NONE
    if hidden_fraction(speeds) < 1 and occupancy <= (1 + limit) / 2:
        return Pressure.PACED
    return Pressure.FULL


def capacity(held: int, allocated: int, total: int, limit: float, bound: int) -> int:
    """Return the bytes of buffers that may be on the device, at least the ring's `bound`.

    Args:
        held: Bytes of buffers there are, which are part of `allocated`.
        allocated: Bytes of the device's memory in use.
        total: Bytes of the device's memory.
        limit: Fraction of it that may be in use.
        bound: Bytes that the ring may hold in any case.
    """
    return max(bound, held + int(limit * total) - allocated)


def spill_target(full: bool, nbytes: int, missing: int | None, behind: int, excess: int) -> int:
    """Return how many bytes should go to the host now; none, if not positive.

    Args:
        full: Whether the device is full.
        nbytes: Size of the buffer that was pushed last.
        missing: Bytes that will not fit on the device unless they go to the host, if known.
        behind: Bytes of device buffers that are free or can be used again after their copy.
        excess: Bytes that the ring holds above its bound and shall give back.
    """
    if full:
        # Two buffers behind: one whose copy has had the time of a chunk to finish, and one whose copy runs.
        wanted = 2 * nbytes + min(excess, nbytes) - behind
        return wanted if missing is None or excess else min(wanted, missing)
    # The sooner the link starts, the more it hides; what was spilled too early is still on the device.
    return 0 if missing is None else min(missing, nbytes)


def prefetch_depth(prefetch: int, speeds: Speeds) -> int | None:
    """Return how many buffers ahead to fetch; None, all that find a free slot, where the link is the slower one."""
    fetch, consume = speeds.fetch or speeds.spill, speeds.consume or speeds.compute
    return None if prefetch and fetch and consume and fetch > consume else prefetch


def write_target(limit: int, used: int, writing: int, nbytes: int) -> int:
    """Return how many bytes should go from the host to the disk now; none, if not positive.

    Args:
        limit: Bytes that the host may take.
        used: Bytes that it has.
        writing: Those of them that can be used again after their write.
        nbytes: Size of the buffer that was pushed last.
    """
    return max(2 * nbytes, limit // 8) - (limit - used) - writing


def read_depth(prefetch: int, speeds: Speeds) -> int | None:
    """Return how many buffers the host should have to be fetched from; None, all for which it has room.

    The disk must be ahead of the link by at least as much as that is ahead of the computation.
    """
    consume = speeds.consume or speeds.compute
    return None if prefetch and speeds.read and consume and speeds.read > consume / 2 else 2 * prefetch
