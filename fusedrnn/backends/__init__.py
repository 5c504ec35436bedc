"""The backends, and what can be chosen of them."""

from itertools import pairwise
from typing import NamedTuple

from fusedrnn.backends.base import Backend, Call, ChunkedBackend, RecordingBackend
from fusedrnn.backends.gru import GRUTorchStep
from fusedrnn.backends.gru_triton import GRUTritonStep
from fusedrnn.backends.layer_norm_torch import LayerNormTorchStep
from fusedrnn.backends.layer_norm_triton import LayerNormTritonStep
from fusedrnn.backends.onednn import OneDNN
from fusedrnn.backends.reference import Reference
from fusedrnn.backends.torch_step import TorchStep
from fusedrnn.backends.triton_sequence import TritonSequence
from fusedrnn.backends.triton_step import TritonStep
from fusedrnn.layout import SequenceLayout

_BY_CELL: dict[str, tuple[Backend, ...]] = {
    "lstm": (TritonSequence(), TritonStep(), OneDNN(), TorchStep(), Reference()),
    "gru": (GRUTritonStep(), GRUTorchStep(), Reference()),
    "layer_norm_lstm": (LayerNormTritonStep(), LayerNormTorchStep(), Reference()),
}
BACKENDS: dict[str, dict[str, Backend]] = {
    cell: {backend.name: backend for backend in backends} for cell, backends in _BY_CELL.items()
}
"""The backends of each cell by name, in the order in which "auto" prefers them."""

NAMES = tuple(dict.fromkeys(name for backends in BACKENDS.values() for name in backends))
"""All names."""


class Choice(NamedTuple):
    """Who runs a call, what is saved, how many steps a chunk has, and why.

    `older` says how many chunks of each stage, the first to be computed, are saved in another mode, and in which.
    """

    backend: Backend
    save: str
    chunk: int
    reason: str
    older: tuple[int, str] = (0, "hidden")

    @property
    def name(self) -> str:
        """What is saved, in words."""
        count, save = self.older
        return f"{self.save}, {count} oldest chunks {save}" if count else self.save

    def __str__(self) -> str:
        """Describe it in the words of the arguments."""
        mode = f"save={self.save!r}"
        if self.older[0]:
            mode += f" but for the {self.older[0]} oldest chunks with {self.older[1]!r}"
        return f"backend {self.backend.name!r}, {mode}, chunk={self.chunk}: {self.reason}"


def steps_of(backend: Backend, call: Call, chunk: int | str) -> int:
    """Return how many steps a chunk has."""
    if isinstance(chunk, int):
        return chunk
    return backend.chunk_steps(call) if isinstance(backend, ChunkedBackend) else max(1, call.T)


def mixes(backend: Backend) -> bool:
    """Return whether the chunks of a sequence may be saved in different modes."""
    return isinstance(backend, ChunkedBackend) and not isinstance(backend, RecordingBackend)


def lengths_of(call: Call, steps: int) -> list[int]:
    """Return the timesteps of the chunks of one stage, in the order in which they are computed."""
    forward = [stop - start for start, stop in pairwise(SequenceLayout(call.T, call.B).borders(steps, halve_tail=True))]
    return forward if call.directions == 1 else forward + forward[::-1]
