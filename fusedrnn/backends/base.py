"""What a backend is, what it is asked, and what it is given to work on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import ClassVar

import torch
from torch import Tensor

from fusedrnn.cells import LSTM, CellSpec, States, Weights, state_dtype
from fusedrnn.kernels import _device
from fusedrnn.kernels._device import DeviceInfo
from fusedrnn.layout import Chunk, SequenceLayout


@dataclass(frozen=True)
class Variant:
    """How a recurrence departs from the cell's equations. Hashable.

    Args:
        clip: Bound of the gradients that pass from a step to the one before it, or None.
        zoneout: Probability with which a unit of h keeps its value in a step.
        cells: Whether the cell states of the last layer are an output, too.
    """

    clip: float | None = None
    zoneout: float = 0.0
    cells: bool = False

    def __str__(self) -> str:
        """Describe it in the words of the arguments, "" for the plain recurrence."""
        words = [] if self.clip is None else [f"clip_recurrent_grad={self.clip:g}"]
        words += [f"zoneout={self.zoneout:g}"] if self.zoneout else []
        return ", ".join([*words, *(["return_cells"] if self.cells else [])])


PLAIN = Variant()


@dataclass(frozen=True)
class Call:
    """Everything about a call on which the choice of a backend may depend. Hashable: choices are cached.

    Args:
        T: Number of timesteps.
        B: Batch size.
        I: Width of the input.
        H: Number of hidden units.
        P: Width of the output (H without a projection).
        layers: Number of layers.
        directions: 1, or 2 for a bidirectional layer.
        dtype: Element type of input and weights.
        device: Type of device, such as "cuda".
        packed: Whether sequences of several lengths are packed.
        grad: Whether a backward pass may follow.
        transformed: Whether the call runs under a `torch.func` transform or forward-mode differentiation.
        gpu: Figures of the device, None where it is not a CUDA device.
        onednn: Whether torch may use oneDNN at present.
        tf32: Whether products of float32 may be rounded to TF32 on CUDA devices.
        recorded: Whether autograd can record operations, which it cannot inside an operator of torch.library.
        cell: What each layer computes.
        resets: Whether states start anew within the sequences.
        variant: How the recurrence departs from the cell's equations.
        dropout: Probability of dropout between layers; 0 when evaluating.
    """

    T: int
    B: int
    I: int
    H: int
    P: int
    layers: int
    directions: int
    dtype: torch.dtype
    device: str
    packed: bool = False
    grad: bool = True
    transformed: bool = False
    gpu: DeviceInfo | None = None
    onednn: bool = False
    tf32: bool = False
    recorded: bool = True
    cell: CellSpec = LSTM
    resets: bool = False
    variant: Variant = PLAIN
    dropout: float = 0.0

    @property
    def stages(self) -> int:
        """How many times chunks run over all timesteps; see `stage_depth`."""
        return self.layers // stage_depth(self.layers, self.directions, self.dropout)

    def step_bytes(self, save: str) -> int:
        """Bytes that mode `save` keeps per timestep for the backward pass, beyond the layer's own outputs."""
        inner = (self.layers - 1) * self.P * self.dtype.itemsize
        if self.variant.cells and save != "hidden":
            inner -= self.H * state_dtype(self.dtype).itemsize
        return self.B * self.directions * (self.layers * self.H * self.cell.saved_bytes(save, self.dtype) + inner)

    def __str__(self) -> str:
        """Describe the call in the words of an error message."""
        text = (
            f"T={self.T}, B={self.B}, I={self.I}, H={self.H}, {self.dtype}".replace("torch.", "") + f", {self.device}"
        )
        if self.P != self.H:
            text += f", proj_size={self.P}"
        if self.layers > 1:
            text += f", num_layers={self.layers}"
        text += f", {self.cell.name}" if self.cell is not LSTM else ""
        return (
            text
            + (", bidirectional" if self.directions > 1 else "")
            + (", packed" if self.packed else "")
            + (", resets" if self.resets else "")
            + (f", {self.variant}" if self.variant != PLAIN else "")
        )


_PRETENDED: ContextVar[DeviceInfo | None] = ContextVar("pretended", default=None)


def gpu_of(device: torch.device) -> DeviceInfo | None:
    """Return the figures of a device, or None where it is not a CUDA device."""
    return _PRETENDED.get() if device.type == "meta" else _device.device_info(device)


@contextmanager
def pretended_gpu(gpu: DeviceInfo | None) -> Iterator[None]:
    """Let tensors without content, on torch's meta device, stand for those of a GPU."""
    token = _PRETENDED.set(gpu)
    try:
        yield
    finally:
        _PRETENDED.reset(token)


def tf32_allowed() -> bool:
    """Return whether torch's switches let products of float32 be rounded to TF32 on CUDA devices."""
    asked = torch.backends.cuda.matmul.fp32_precision
    if asked == "none":
        asked = torch.backends.fp32_precision  # type: ignore[attr-defined]  # torch's stubs lack it
    return asked == "tf32"


def stage_depth(layers: int, directions: int, dropout: float) -> int:
    """Return how many layers the chunks of a stage pass through before the next chunk starts.

    A stage ends where a layer must be complete before the next one starts: between bidirectional layers, and where
    dropout is drawn.
    """
    return 1 if directions == 2 or dropout else layers


def onednn_allowed() -> bool:
    """Return whether torch may use oneDNN at present."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


class Workspace:
    """Scratch buffers of one pass, each allocated once and used again by every chunk."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer of this shape with undefined content; the same name gives the same memory."""
        numel = reduce(mul, shape, 1)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return buffer[:numel].view(shape)


@dataclass(frozen=True)
class Task:
    """A stack of layers over one sequence in one direction, as a backend is given it.

    Args:
        cell: What each layer computes.
        layers: Weights of the layers; the output of one is the input of the next.
        layout: Where the rows lie.
        reverse: Whether time runs backwards.
        save: One of the cell's modes.
        resets: bool [rows, 1], true where the states start anew, at zero, before the row; None where they nowhere do.
        variant: How the recurrence departs from the cell's equations.
        seeds: int64 [layers], from which zoneout is drawn; None where it is not drawn, as in evaluation.
    """

    cell: CellSpec
    layers: tuple[Weights, ...]
    layout: SequenceLayout
    reverse: bool = False
    save: str = "gates"
    resets: Tensor | None = None
    variant: Variant = PLAIN
    seeds: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Number of states whose rows are an output, the first ones."""
        return 2 if self.variant.cells else 1


@dataclass
class Gradients:
    """Where a backend puts the gradients of one chunk.

    Args:
        layers: Per layer, the sums of the weights' gradients (float32, float64 for float64) to be added to; None for
            a weight that needs none.
        dx: Rows [rows, I] for the gradient of the input, or None where it needs none.
        add: Whether `dx` is to be added to, since another direction has written it.
    """

    layers: list[list[Tensor | None]]
    dx: Tensor | None
    add: bool


OptionalStates = tuple[Tensor | None, ...]


class Backend:
    """One way to compute the layers."""

    name: ClassVar[str]
    saves: ClassVar[tuple[str, ...]]
    """Save modes it has."""

    def refusals(self, call: Call) -> list[str]:
        """Return why this backend cannot run `call`, in words; empty where it can."""
        raise NotImplementedError


class RecordingBackend(Backend):
    """A backend whose pass autograd records by itself; nothing of it is cut into chunks."""

    def run(self, task: Task, x: Tensor, states: States) -> tuple[States, States]:
        """Compute the whole sequence.

        Args:
            task: The layers.
            x: Input [T, B, I] or rows [rows, I].
            states: Initial states, each [layers, B, ...].

        Returns:
            The last layer's states over time, those that are an output, and the final states.
        """
        raise NotImplementedError


class ChunkedBackend(Backend):
    """A backend that computes chunk by chunk and writes its own backward pass."""

    def slot_bytes(self, task: Task, rows: int, dtype: torch.dtype) -> int:
        """Return the bytes that a chunk of `rows` rows saves for the backward pass."""
        return 0

    def chunk_steps(self, call: Call) -> int:
        """Return how many steps a chunk has where the user does not say."""
        raise NotImplementedError

    def forward_chunk(
        self, task: Task, chunk: Chunk, x: Tensor, states: States, out: States, slot: Tensor | None, work: Workspace
    ) -> States:
        """Compute one chunk.

        Args:
            task: The layers.
            chunk: Which steps.
            x: Input rows [rows, I].
            states: States before the chunk, each [layers, B, ...].
            out: Rows of the last layer's states that are an output, [rows, P] and so on, to be written.
            slot: uint8 [slot_bytes], to be filled with what `backward_chunk` needs; None where no backward pass
                follows.
            work: Scratch buffers.

        Returns:
            The states after the chunk (new tensors).
        """
        raise NotImplementedError

    def backward_chunk(
        self,
        task: Task,
        chunk: Chunk,
        x: Tensor | None,
        out: OptionalStates,
        states: States,
        slot: Tensor,
        dout: OptionalStates,
        dstates: States,
        grads: Gradients,
        keep: bool,
        work: Workspace,
    ) -> States:
        """Compute the gradients of one chunk.

        Args:
            task: As in the forward pass.
            chunk: Which steps.
            x: Input rows [rows, I]; None where `needs` said that they are not read.
            out: Output rows as in the forward pass, each None where not read.
            states: States before the chunk.
            slot: uint8 [slot_bytes], as `forward_chunk` filled it.
            dout: Gradients of `out`, columns adjacent, each None for zero.
            dstates: Gradients of the states after the chunk, which may be overwritten.
            grads: Where the results go.
            keep: Whether the graph is kept for another backward pass, so that the slot may not be changed.
            work: Scratch buffers.

        Returns:
            The gradients of the states before the chunk.
        """
        raise NotImplementedError

    def needs(self, save: str, weights_need_grad: bool) -> tuple[bool, ...]:
        """Return whether the backward pass reads x and the rows of each state that may be an output again."""
        raise NotImplementedError


RECORDS = "it lets autograd record, which a compiled operator does not allow"


def plain_call(call: Call) -> list[str]:
    """Refusals common to every backend but the reference."""
    reasons = []
    if call.transformed:
        reasons.append("it has no rule for torch.func transforms and forward-mode differentiation")
    if call.T == 0 or call.B == 0:
        reasons.append("the input is empty")
    return reasons
