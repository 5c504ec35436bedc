"""What a step takes of the device's memory, counted rather than estimated.

The layers run forward and backward on tensors without content (torch's meta device) while every allocation is counted.
Only a few short chunks are run: all sizes are linear in the steps per chunk and in the number of chunks, so that four
runs determine them for any length.
"""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedrnn.backends import Choice
from fusedrnn.backends.base import Call, ChunkedBackend, RecordingBackend, pretended_gpu
from fusedrnn.backends.onednn import OneDNN, scratch_bytes
from fusedrnn.cells import LAYER_NORM_LSTM, States, Weights, state_dtype
from fusedrnn.layout import SequenceLayout
from fusedrnn.stages import plan_stage, run_choice, run_stages

_STAGE = "_SequenceBackward"
"""The autograd node of a stage."""
_STEPS = 8
"""Steps per chunk in the runs that are counted, and twice as many."""
_ONEDNN_UNITS = 1 << 16
"""Hidden units of all steps and sequences in a chunk of oneDNN's, at least: it rounds its workspace to pages."""


class Counter(TorchDispatchMode):
    """Count the bytes of storages that come into being while it is active, and that live at once.

    Args:
        given: Tensors that exist already, which do not count.
    """

    def __init__(self, given: Iterable[Tensor]):
        super().__init__()
        self.live = 0
        self.peaks: dict[tuple[int, bool], int] = {}
        """Most bytes alive, by the number of stages whose backward pass has begun, and whether one is under way."""
        self._begun: list[Any] = []
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it allocates."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._add(tensor.untyped_storage())
        node = torch._C._current_autograd_node()
        inside = node is not None and node.name() == _STAGE
        if inside and (not self._begun or self._begun[-1] is not node):
            self._begun.append(node)
        key = len(self._begun), inside
        self.peaks[key] = max(self.peaks.get(key, 0), self.live + scratch_bytes(func, args))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += nbytes
        weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class Footprint(NamedTuple):
    """Most bytes in use at once by a step: forward and backward, above what was in use before.

    Args:
        peak: Everything that the layers allocate: outputs, what is saved, scratch, and the gradients of the input, the
            states and the weights. What the loss allocates, the gradient of the output among it, is not part of it.
        saved: That part of it which waits for the backward pass in chunks' buffers.
    """

    peak: int
    saved: int


@lru_cache(maxsize=1024)
def footprint(call: Call, choice: Choice) -> Footprint:
    """Return what a call takes, the gradient of its input included.

    Args:
        call: The call. Packed sequences count as if all were as long as the longest.
        choice: Who runs it, and how it is saved. For the reference, which autograd records, the count is too high.
    """
    saved = _saved(call, choice)
    # The longest chunk: what remains after the full ones is cut into powers of two.
    longest = min(choice.chunk, 1 << (call.T.bit_length() - 1))
    low = max(_STEPS, _ONEDNN_UNITS // max(1, call.B * call.H) if isinstance(choice.backend, OneDNN) else 0)
    older = min(choice.older[0], 1), choice.older[1]
    rests = _rest(replace(call, T=0), choice._replace(chunk=0, reason="", older=older), low)
    peaks = []
    for key in rests[0][0]:
        # Linear in the number of chunks, then in their steps.
        short, long = (two[key] + (call.T / longest - 2) * (three[key] - two[key]) for two, three in rests)
        peaks.append(short + (long - short) * (longest - low) / low + _waiting(saved, key))
    return Footprint(round(max(peaks)), sum(saved))


def _waiting(saved: list[int], key: tuple[int, bool]) -> int:
    """Return the bytes of the buffers that still wait: those of the stages whose backward pass is not over."""
    begun, inside = key
    return sum(saved[: len(saved) - begun + inside])


@lru_cache(maxsize=256)
def _rest(call: Call, choice: Choice, low: int) -> list[list[dict[tuple[int, bool], int]]]:
    """Return the bytes outside of the chunks' buffers, for two and three chunks of `low` and of twice as many steps.

    For n chunks of k steps they are a + b n + c k + d k n at every point of the step, which are told apart since not
    the same one is the highest for all sizes.
    """
    found = []
    for k in (low, 2 * low):
        parts = [(replace(call, T=k * n), choice._replace(chunk=k)) for n in (2, 3)]
        sizes = [(_count(*part), _saved(*part)) for part in parts]
        found.append([{key: peak - _waiting(saved, key) for key, peak in peaks.items()} for peaks, saved in sizes])
    return found


def _count(call: Call, choice: Choice) -> dict[tuple[int, bool], int]:
    """Run a call forward and backward while its allocations are counted, and return their peaks."""
    device = torch.device("cpu" if isinstance(choice.backend, OneDNN) else "meta")
    layers, x, states = _tensors(call, device)
    flat = [weight for weights in layers for weight in weights if weight is not None]
    layout = SequenceLayout(call.T, call.B)
    resets = torch.zeros(call.T, call.B, dtype=torch.bool, device=device) if call.resets else None
    seeds = torch.zeros(len(layers), dtype=torch.int64, device=device) if call.variant.zoneout else None
    grads = [x.new_zeros(call.T, call.B, call.directions * call.P)]
    grads += [states[1].new_zeros(call.T, call.B, call.directions * call.H)] if call.variant.cells else []
    given = [x, *states, *flat, *grads, *(tensor for tensor in (resets, seeds) if tensor is not None)]
    with pretended_gpu(call.gpu), torch.enable_grad(), Counter(given) as counter:
        out, finals = run_choice(
            call.cell,
            choice,
            x,
            states,
            layers,
            layout,
            directions=call.directions,
            dropout=call.dropout,
            resets=resets,
            variant=call.variant,
            seeds=seeds,
        )
        found = torch.autograd.grad(out, [x, *flat], grads)
        del out, finals, found
    return counter.peaks


def _tensors(call: Call, device: torch.device) -> tuple[list[Weights], Tensor, tuple[Tensor, ...]]:
    """Return weights, input and initial states as the layers of a call have them, all zero."""

    def zeros(*shape: int, dtype: torch.dtype = call.dtype, grad: bool = True) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)

    layers, rows = [], call.cell.gates * call.H
    norms = (rows, rows, call.H, call.H) if call.cell is LAYER_NORM_LSTM else ()
    for index in range(call.layers):
        width = call.I if index == 0 else call.P * call.directions
        for _ in range(call.directions):
            projection = zeros(call.P, call.H) if call.P != call.H else None
            layers.append(
                Weights(
                    zeros(rows, width), zeros(rows, call.P), zeros(rows), zeros(rows), projection, *map(zeros, norms)
                )
            )
    widths = [call.P, *[call.H] * (len(call.cell.states) - 1)]
    dtypes = [call.dtype, *[state_dtype(call.dtype)] * (len(call.cell.states) - 1)]
    states = [zeros(len(layers), call.B, w, dtype=dtype, grad=False) for w, dtype in zip(widths, dtypes, strict=True)]
    return layers, zeros(call.T, call.B, call.I), tuple(states)


def _saved(call: Call, choice: Choice) -> list[int]:
    """Return the bytes of all chunks' buffers of each stage."""
    backend = choice.backend
    if not isinstance(backend, ChunkedBackend) or (isinstance(backend, RecordingBackend) and choice.save == "gates"):
        return []
    layers, x, states = _tensors(replace(call, T=1), torch.device("meta"))
    found = []

    def note(parts: Any, reverses: Any, variant: Any, seeds: Any, x: Tensor, states: States) -> tuple[States, States]:
        plan = plan_stage(call.cell, choice, SequenceLayout(call.T, call.B), None, parts, reverses, variant, seeds)
        found.append(plan.expected_bytes(states))
        return (x,), states

    run_stages(x, states, layers, call.directions, call.dropout, False, call.variant, None, note)
    return found
