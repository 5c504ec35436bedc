"""Which chunks to save in which mode, so that a sequence takes the least time within a limit of memory.

Memory and time are sums over the chunks, and there is one limit: a linear programme whose best solution needs no more
than two modes. The newer chunks get the one that keeps more. They are read first, and are the last to be spilled.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple


class Mode(NamedTuple):
    """A save mode, with the bytes and the seconds of a timestep in it."""

    save: str
    nbytes: float
    seconds: float


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
            nbytes, seconds = (left * a + kept * b for a, b in zip(small[1:], large[1:], strict=True))
            found.append(Mix(large.save, (older, small.save), nbytes, seconds))
    return min(found, key=lambda mix: (mix.seconds, mix.nbytes), default=None)
