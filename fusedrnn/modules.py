"""`fusedrnn.LSTM` and `fusedrnn.GRU`: torch's own layers that need far less memory."""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fusedrnn import _checks
from fusedrnn.cells import GRU as GRU_CELL
from fusedrnn.cells import LSTM as LSTM_CELL
from fusedrnn.cells import CellSpec, States, Weights
from fusedrnn.functional import Options, check_resets, check_states, run_layers
from fusedrnn.layout import SequenceLayout
from fusedrnn.offload import OffloadConfig, OffloadHooks, offloader


class _Recurrent(nn.RNNBase):
    """What the layers share, between them and torch's class of the same name."""

    cell: ClassVar[CellSpec]

    def __init__(
        self,
        *args: Any,
        save: str = "auto",
        chunk: int | str = "auto",
        backend: str = "auto",
        offload: bool | OffloadConfig | OffloadHooks = False,
        swap_memory: bool | OffloadConfig | OffloadHooks = False,
        clip_recurrent_grad: float | None = None,
        zoneout: float = 0.0,
        **kwargs: Any,
    ):
        if offload is not False and swap_memory is not False:
            raise ValueError("`offload` and `swap_memory` are two names of one argument, got both: give one of them")
        name, value = ("swap_memory", swap_memory) if offload is False else ("offload", offload)
        options = Options(save, chunk, backend, offloader(name, value), clip_recurrent_grad, zoneout)
        super().__init__(*args, **kwargs)
        self.options = options
        self._choice = "it has not run yet"

    def extra_repr(self) -> str:
        """Return torch's representation with the options that are not the default."""
        default = Options()
        changed = [f"{name}={value!r}" for name, value in vars(self.options).items() if value != getattr(default, name)]
        return ", ".join([super().extra_repr(), *changed])

    @property
    def offloader(self) -> OffloadHooks | None:
        """What offloads for this layer, with `stats()`, `explain()` and `export_trace()`; None without `offload`."""
        return self.options.offload

    def explain(self) -> str:
        """Say who ran the last call, what it saved, and why, and what offloading did."""
        if self.offloader is None:
            return self._choice
        return f"{self._choice}\n{self.offloader.explain()}"

    def _run(self, input: Any, states: Any, resets: Any, cells: bool = False) -> tuple[list[Any], States]:
        """Run the layers; see `forward`. The states are a tuple, checked here, or None.

        Returns:
            The output, with `cells` the cell states of the last layer, and the final states as a tuple.
        """
        packed = input if isinstance(input, PackedSequence) else None
        x = input.data if isinstance(input, PackedSequence) else input
        layers = self._layers()
        self._check_input(x, packed is not None, layers[0].weight_ih)
        batched = packed is not None or x.dim() == 3
        if packed is not None:
            sizes = tuple(packed.batch_sizes.tolist())
            layout = SequenceLayout(len(sizes), sizes[0], sizes)
        else:
            x = x if batched else x.unsqueeze(1)
            x = x.transpose(0, 1) if self.batch_first and batched else x
            layout = SequenceLayout(x.shape[0], x.shape[1])
        if states is not None:
            states = self._check_states(states, x, layout.batch, batched)
            states = _select(states, None if packed is None else packed.sorted_indices)
        if resets is not None:
            resets = self._check_resets(resets, x, layout, packed is not None, batched)
        out, states, choice = run_layers(
            self.cell,
            x,
            states,
            layers,
            layout,
            self.options,
            directions=2 if self.bidirectional else 1,
            dropout=self.dropout if self.training and self.num_layers > 1 else 0.0,
            resets=resets,
            training=self.training,
            cells=cells,
        )
        if choice is not None:
            self._choice = (
                f"backend {choice.backend.name!r}, save={choice.save!r}, chunk={choice.chunk}: {choice.reason}"
            )
        if packed is not None:
            places = packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
            return [PackedSequence(rows, *places) for rows in out], _select(states, packed.unsorted_indices)
        if not batched:
            return [rows.squeeze(1) for rows in out], tuple(state.squeeze(1) for state in states)
        return [rows.transpose(0, 1) if self.batch_first else rows for rows in out], states

    def _layers(self) -> list[Weights]:
        """Return the weights of the moment: parametrized, pruned and swapped ones included."""
        layers = []
        for layer in range(self.num_layers):
            for suffix in ("", "_reverse") if self.bidirectional else ("",):
                names = Weights(
                    *(f"{name}_l{layer}{suffix}" for name in Weights._fields)  # type: ignore[arg-type]
                )
                weights = [getattr(self, str(name), None) for name in names]
                layers.append(Weights(*weights))  # type: ignore[arg-type]
        return layers

    def _check_input(self, x: Any, packed: bool, weight: Tensor) -> None:
        _checks.require_tensor("input", x)
        _checks.require_floating("input", x)
        if x.dim() not in ((2,) if packed else (2, 3)):
            order = "(B, T, I)" if self.batch_first else "(T, B, I)"
            raise ValueError(f"`input` must have shape {order}, or (T, I) for one sequence, got {tuple(x.shape)}")
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"`input` must have a last dimension of `input_size` = {self.input_size}, got {x.shape[-1]} in shape "
                f"{tuple(x.shape)}"
            )
        _checks.require_like(
            "input", x, x.dtype if _checks.under_autocast(x) else weight.dtype, weight.device, "the weights"
        )

    def _check_states(self, states: tuple[Any, ...], x: Tensor, batch: int, batched: bool) -> States:
        """Check the initial states and return them with a batch dimension."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        shape = (count, batch) if batched else (count,)
        word = "num_layers * directions, B" if batched else "num_layers * directions"
        letters = [f"({word}, {'P' if self.proj_size else 'H'})", f"({word}, H)"]
        shapes = [(*shape, self.proj_size or self.hidden_size), (*shape, self.hidden_size)]
        checked = check_states(states, self.cell.states, letters, shapes, x)
        return checked if batched else tuple(state.unsqueeze(1) for state in checked)

    def _check_resets(self, resets: Any, x: Tensor, layout: SequenceLayout, packed: bool, batched: bool) -> Tensor:
        """Check the resets and return them as [T, B]."""
        if packed:
            raise ValueError(
                "`resets` must be None for a PackedSequence, got resets: pack each piece as a sequence of its own"
            )
        _checks.require_tensor("resets", resets)
        if not batched:
            _checks.require_shape("resets", resets, "(T,)", (layout.steps,))
            resets = resets.unsqueeze(1)
        elif self.batch_first:
            _checks.require_shape("resets", resets, "(B, T)", (layout.batch, layout.steps))
            resets = resets.transpose(0, 1)
        checked = check_resets(resets, layout, x)
        assert checked is not None
        return checked


def _select(states: States, indices: Tensor | None) -> States:
    """Return the states of the sequences in another order."""
    return states if indices is None else tuple(state.index_select(1, indices) for state in states)


class LSTM(_Recurrent, nn.LSTM):
    """Apply a long short-term memory network to sequences, as `torch.nn.LSTM` does, in a fraction of its memory.

    i, f, o = sigmoid(.), g = tanh(.) of W_ih x_t + b_ih + W_hh h_{t-1} + b_hh; c_t = f c_{t-1} + i g;
    h_t = o tanh(c_t), or W_hr (o tanh(c_t)) with `proj_size`.

    It is a `torch.nn.LSTM`: the same arguments, parameters, initial values from the same seed and `state_dict`, so that
    checkpoints go both ways. Of the keywords after these, the last two change what is learned; the others say how it
    runs, never what it computes.

    Args:
        *args: `input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0, bidirectional=False,
            proj_size=0, device=None, dtype=None`, by position or by name, as in `torch.nn.LSTM`.
        save: What is kept of each timestep for the backward pass, beyond input and output. "gates": gates and cell
            states (5H numbers), nothing is computed again. "cells": cell states (H). "hidden": nothing but the states
            between chunks; gates and cells are computed again chunk by chunk, which is not sequential and often costs
            less than the memory traffic it saves. "auto" chooses by size and memory; `explain()` says why.
        chunk: Timesteps per chunk, the unit of computing again; "auto" chooses by bytes.
        backend: "triton_sequence", "triton_step", "onednn", "torch_step" or "reference", or "auto" for the first that
            can run the call. A backend named here is used or refused, never replaced.
        offload: Whether what is saved moves to pinned host memory while the device is nearly full, oldest first, and
            comes back ahead of the backward pass; results stay the same to the last bit. True, or an `OffloadConfig`
            that says when and how; layers with equal configurations share one ring of device buffers and one pool of
            host memory. What `fusedrnn.offload()` returns counts for this layer alone.
        swap_memory: TensorFlow's name for `offload`.
        clip_recurrent_grad: In the backward pass, the gradients of h and c that pass from a step to the one before it,
            and from the first step to the initial states, are clipped to between minus and plus this value,
            elementwise; those that come from outside the layer are not. NaN stays NaN. None clips nothing. A second
            derivative is that of the clipped gradients.
        zoneout: Probability with which a unit of h keeps its value in a step while training (Krueger et al. 2016):
            h_t = m h_{t-1} + (1 - m) h', where h' is the h_t above and m drawn from torch's default generator of the
            device, anew in each call; in evaluation m is this probability.
        **kwargs: The arguments of `torch.nn.LSTM` by name.

    Raises:
        ValueError: If an argument is not among its choices.

    Shapes are those of `torch.nn.LSTM`, a sequence without batch dimension and `PackedSequence` included. Further to
    it, an input of no timesteps is taken: the states come back as they were.
    """

    cell = LSTM_CELL

    def forward(  # type: ignore[override]
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        resets: Tensor | None = None,
        return_cells: bool = False,
    ) -> (
        tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]
        | tuple[Tensor | PackedSequence, tuple[Tensor, Tensor], Tensor | PackedSequence]
    ):
        """Run the layers.

        Args:
            input: [T, B, I], [B, T, I] with `batch_first`, [T, I] for one sequence, or a `PackedSequence`.
            hx: Initial states h0 [num_layers * directions, B, P] and c0 [num_layers * directions, B, H] (without B for
                one sequence); zeros if not given.
            resets: bool, shaped as the input without features: true where the states start anew, at zero, before a
                step, as at the first step of an episode. No gradient passes there, and the pieces are as if run alone:
                in the reverse direction, too, where a piece starts with its last step.
            return_cells: Whether the cell states of all steps are returned, too.

        Returns:
            The output, shaped as the input with features [directions * P], and the final states (h_n, c_n), shaped as
            `hx`. With `return_cells` also c_t of all steps of the last layer, shaped as the input with features
            [directions * H]; in the dtype in which c is carried, which is float32 for half-precision layers, since
            this is the tensor that the backward pass reads, and nothing is kept twice.

        Raises:
            TypeError: If an argument is not a tensor.
            ValueError: If shapes, dtypes or devices do not agree.
            RuntimeError: If no backend can run the call; the message has every backend's reasons.
        """
        states = None
        if hx is not None:
            if not isinstance(hx, (tuple, list)) or len(hx) != 2:
                raise TypeError(f"`hx` must be a tuple (`h0`, `c0`), got {type(hx).__name__}")
            states = tuple(hx)
        (y, *cells), (h, c) = self._run(input, states, resets, return_cells)
        return y, (h, c), *cells


class GRU(_Recurrent, nn.GRU):
    """Apply a gated recurrent unit to sequences, as `torch.nn.GRU` does, in a fraction of its memory.

    r, z = sigmoid(.) of W_ih x_t + b_ih + W_hh h_{t-1} + b_hh; n = tanh(W_in x_t + b_in + r (W_hn h_{t-1} + b_hn));
    h_t = (1 - z) n + z h_{t-1}.

    It is a `torch.nn.GRU`, as `fusedrnn.LSTM` is a `torch.nn.LSTM`; see there for the keywords.

    Args:
        *args: `input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0, bidirectional=False,
            device=None, dtype=None`, by position or by name, as in `torch.nn.GRU`.
        save: "gates": gates and the recurrent product of n are kept (4H numbers). "hidden": nothing but the states
            between chunks. "auto" chooses by size and memory.
        chunk: Timesteps per chunk.
        backend: "triton_step", "torch_step" or "reference", or "auto".
        offload: Whether what is saved moves to the host while the device is nearly full.
        swap_memory: TensorFlow's name for `offload`.
        clip_recurrent_grad: Bound of the gradients between steps, or None.
        zoneout: Probability with which a unit keeps its value in a step.
        **kwargs: The arguments of `torch.nn.GRU` by name.

    Raises:
        ValueError: If an argument is not among its choices.
    """

    cell = GRU_CELL

    def forward(  # type: ignore[override]
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        resets: Tensor | None = None,
        return_cells: bool = False,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the layers.

        Args:
            input: [T, B, I], [B, T, I] with `batch_first`, [T, I] for one sequence, or a `PackedSequence`.
            hx: Initial state h0 [num_layers * directions, B, H] (without B for one sequence); zeros if not given.
            resets: As for `fusedrnn.LSTM`.
            return_cells: False; a GRU has no cell states.

        Returns:
            The output, shaped as the input with features [directions * H], and the final state h_n, shaped as `hx`.

        Raises:
            TypeError: If an argument is not a tensor.
            ValueError: If shapes, dtypes or devices do not agree.
            RuntimeError: If no backend can run the call; the message has every backend's reasons.
        """
        if return_cells:
            raise ValueError(
                f"`return_cells` must be False for a GRU, got {return_cells!r}: its output is its only state"
            )
        (y,), (h,) = self._run(input, None if hx is None else (hx,), resets)
        return y, h
