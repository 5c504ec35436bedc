"""Which chunks to save in which mode, so that a sequence takes the least time within a limit of memory.

Memory and time are sums over the chunks, and there is one limit: a linear programme whose best solution needs no more
than two modes. The newer chunks get the one that keeps more. They are read first, and are the last to be spilled.
"""

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

_PARTS = 16
"""Parts into which a sequence is cut in search of the chunks from which on it is worth moving more."""
_UNEVEN = 1.05
"""What moving buffers of two sizes may cost beyond that: those of one size wait while the ring has the other."""


class Mode(NamedTuple):
    """A save mode, with the bytes and the seconds of a timestep in it, and what of these the forward pass takes."""

    save: str
    nbytes: float
    seconds: float
    forward: float = 0.0


class Mix(NamedTuple):
    """The mode of the newer chunks, how many older ones have another and which, and what all take together."""

    save: str
    older: tuple[int, str]
    nbytes: float
    seconds: float


def best_mix(modes: Sequence[Mode], lengths: Sequence[int], limit: float, mixed: bool = True) -> Mix | None:
    """Return the quickest way to save a sequence within a limit, or None where none fits.

    Args:
        modes: The modes there are.
        lengths: Timesteps of each chunk, the oldest first.
        limit: Bytes that may be saved.
        mixed: Whether chunks may have different modes.
    """
    steps = sum(lengths)
    found = [
        Mix(mode.save, (0, mode.save), steps * mode.nbytes, steps * mode.seconds)
        for mode in modes
        if steps * mode.nbytes <= limit
    ]
    for small, large in combinations(sorted(modes, key=lambda mode: mode.nbytes), 2) if mixed else ():
        if steps * small.nbytes > limit or small.nbytes == large.nbytes:
            continue
        room, kept, older = (limit - steps * small.nbytes) / (large.nbytes - small.nbytes), 0, len(lengths)
        while older and kept + lengths[older - 1] <= room:
            older -= 1
            kept += lengths[older]
        if 0 < older < len(lengths):
            left = steps - kept
            nbytes, seconds = (left * a + kept * b for a, b in zip(small[1:3], large[1:3], strict=True))
            found.append(Mix(large.save, (older, small.save), nbytes, seconds))
    return min(found, key=lambda mix: (mix.seconds, mix.nbytes), default=None)


def best_moving_mix(
    modes: Sequence[Mode], lengths: Sequence[int], limit: float, most: float, bytes_per_second: float
) -> Mix | None:
    """Return the quickest way to save a sequence of which what exceeds a limit moves to the host and back.

    It moves beside the computation, the oldest first, which waits where that is the faster of the two.

    Args:
        modes: The modes there are.
        lengths: Timesteps of each chunk, the oldest first.
        limit: Bytes that stay on the device.
        most: Bytes that the host has room for; None fits where all modes exceed both.
        bytes_per_second: Speed of the link, each way.
    """
    borders = sorted({len(lengths) * part // _PARTS for part in range(1, _PARTS)} - {0})
    found = []
    for small, large in combinations_with_replacement(sorted(modes, key=lambda mode: mode.nbytes), 2):
        for older in borders if small != large else [0]:
            chosen = [small] * older + [large] * (len(lengths) - older)
            sizes = [n * mode.nbytes for n, mode in zip(lengths, chosen, strict=True)]
            if sum(sizes) > limit + most:
                continue
            forward = [n * mode.forward for n, mode in zip(lengths, chosen, strict=True)]
            backward = [n * (mode.seconds - mode.forward) for n, mode in zip(lengths, chosen, strict=True)]
            # The backward pass fetches what the forward pass moved, in the order that is its reverse.
            seconds = sum(_moving(part, sizes, limit, bytes_per_second) for part in (forward, backward))
            found.append(Mix(large.save, (older, small.save), sum(sizes), seconds))

    def rank(mix: Mix) -> tuple[float, float]:
        return mix.seconds * (_UNEVEN if mix.older[0] and mix.nbytes > limit else 1), mix.nbytes

    return min(found, key=rank, default=None)


def _moving(seconds: Sequence[float], sizes: Sequence[float], room: float, bytes_per_second: float) -> float:
    """Return how long chunks take of which all but `room` bytes must have moved when the last is there."""
    now = made = moved = 0.0
    target = max(0.0, sum(sizes) - room)
    for duration, nbytes in zip(seconds, sizes, strict=True):
        now += duration
        moved = min(moved + duration * bytes_per_second, made, target)
        made += nbytes
        waited = max(0.0, made - moved - room)
        now, moved = now + waited / bytes_per_second, moved + waited
    return now
