"""The backends, and how one is chosen."""

from functools import lru_cache
from typing import NamedTuple

from fusedrnn.backends.base import Backend, Call, ChunkedBackend
from fusedrnn.backends.gru import GRUTorchStep
from fusedrnn.backends.gru_triton import GRUTritonStep
from fusedrnn.backends.layer_norm_torch import LayerNormTorchStep
from fusedrnn.backends.layer_norm_triton import LayerNormTritonStep
from fusedrnn.backends.onednn import OneDNN
from fusedrnn.backends.reference import Reference
from fusedrnn.backends.torch_step import TorchStep
from fusedrnn.backends.triton_sequence import TritonSequence
from fusedrnn.backends.triton_step import TritonStep

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

_CPU_GATES_BYTES = 32 << 20
"""On the CPU, larger activations are faster computed again than kept: a larger block is mapped and zeroed by the kernel
at every step (glibc's limit for keeping freed blocks is 32 MiB)."""
_GPU_GATES_FRACTION = 1 / 16


class NoBackendError(RuntimeError):
    """No backend can run a call; the message lists every backend with its reasons."""


class Choice(NamedTuple):
    """Who runs a call, what is saved, how many steps a chunk has, and why.

    `older` says how many chunks of each stage, the first to be computed, are saved in another mode, and in which.
    """

    backend: Backend
    save: str
    chunk: int
    reason: str
    older: tuple[int, str] = (0, "hidden")

    def __str__(self) -> str:
        """Describe it in the words of the arguments."""
        mode = f"save={self.save!r}"
        if self.older[0]:
            mode += f" but for the {self.older[0]} oldest chunks with {self.older[1]!r}"
        return f"backend {self.backend.name!r}, {mode}, chunk={self.chunk}: {self.reason}"


@lru_cache(maxsize=1024)
def choose(call: Call, backend: str = "auto", save: str = "auto", chunk: int | str = "auto") -> Choice:
    """Choose backend and save mode for a call.

    A named backend or mode is taken or refused, never replaced; "auto" takes the first that fits.

    Raises:
        NoBackendError: If nothing fits; the message lists every backend with its reasons.
    """
    order, why = _save_order(call, save)
    known = BACKENDS[call.cell.name]
    if backend != "auto" and backend not in known:
        raise RuntimeError(f"backend={backend!r} has no {call.cell.name}: take one of {', '.join(map(repr, known))}")
    candidates = list(known.values()) if backend == "auto" else [known[backend]]
    reasons = {candidate.name: candidate.refusals(call) for candidate in candidates}
    for mode in order:
        for candidate in candidates:
            if not reasons[candidate.name] and mode in candidate.saves:
                steps = chunk if isinstance(chunk, int) else max(1, call.T)
                if chunk == "auto" and isinstance(candidate, ChunkedBackend):
                    steps = candidate.chunk_steps(call)
                return Choice(candidate, mode, steps, why)
    lines = [
        f"  {candidate.name}: "
        + "; ".join(reasons[candidate.name] or [f"it has save={' and '.join(map(repr, candidate.saves))} only"])
        for candidate in candidates
    ]
    raise NoBackendError(
        f"no backend can run this call ({call}) with backend={backend!r}, save={save!r}:\n"
        + "\n".join(lines)
        + '\nuse backend="auto" and save="auto", or change what is named above'
    )


def _save_order(call: Call, save: str) -> tuple[tuple[str, ...], str]:
    """Return the save modes to try, and the reason in words."""
    if save != "auto":
        return (save,), f"save={save!r} was asked for"
    kept = call.T * call.step_bytes("gates")
    limit = int(call.gpu.memory * _GPU_GATES_FRACTION) if call.gpu else _CPU_GATES_BYTES
    sizes = f"gates and cells take {kept / 2**20:.1f} MiB, the limit is {limit / 2**20:.1f} MiB"
    if not call.grad:
        return call.cell.modes, "no backward pass follows, so nothing is saved"
    if kept <= limit:
        return call.cell.modes, f"{sizes}: they are kept"
    return call.cell.modes[::-1], f"{sizes}: they are computed again"
