"""`fusedrnn.LSTM` and `fusedrnn.GRU`: torch's own layers that need far less memory."""

from typing import TYPE_CHECKING, Any, Union

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fusedrnn.cells import GRU as GRU_CELL
from fusedrnn.cells import LAYER_NORM_LSTM, CellSpec
from fusedrnn.cells import LSTM as LSTM_CELL
from fusedrnn.recurrent import Recurrent

if TYPE_CHECKING:
    from fusedrnn.streaming import ChunkLoss


class LSTM(Recurrent, nn.LSTM):
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
            less than the memory traffic it saves. "auto" takes the quickest way, or mix of two for the older and the
            newer chunks, that its limit of memory allows, or with `offload` by what the link can move meanwhile;
            `explain()` says which and why.
        chunk: Timesteps per chunk, the unit of computing again; "auto" chooses by bytes.
        backend: "triton_sequence", "triton_step", "onednn", "torch_step" or "reference", or "auto" for the first that
            can run the call. A backend named here is used or refused, never replaced.
        offload: Whether what is saved moves to pinned host memory while the device is nearly full, oldest first, and
            comes back ahead of the backward pass; results stay the same to the last bit. True, or an `OffloadConfig`
            that says when and how; layers with equal configurations share one ring of device buffers and one pool of
            host memory. What `fusedrnn.offload()` returns counts for this layer alone.
        swap_memory: TensorFlow's name for `offload`.
        layer_norm: Whether the layers are normalised (Ba, Kiros and Hinton 2016), the one keyword that changes what is
            computed: the gates are those of LN(W_ih x_t) norm_ih + b_ih + LN(W_hh h_{t-1}) norm_hh + b_hh, and
            h_t = o tanh(LN(c_t) norm_c + norm_c_bias), where LN takes mean and variance over all 4H numbers (over the H
            of c_t) with an epsilon of 1e-5. Each layer and direction gets the parameters `norm_ih_l0`, `norm_hh_l0`
            [4H] and `norm_c_l0` [H], ones at first, and `norm_c_bias_l0` [H], zeros; a checkpoint of `torch.nn.LSTM`
            loads with `strict=False`. Without `proj_size`. In this mode "gates" keeps 9H numbers: the products before
            their normalisation, and cell states.
        clip_recurrent_grad: In the backward pass, the gradients of h and c that pass from a step to the one before it,
            and from the first step to the initial states, are clipped to between minus and plus this value,
            elementwise; those that come from outside the layer are not. NaN stays NaN. None clips nothing. A second
            derivative is that of the clipped gradients.
        zoneout: Probability with which a unit of h keeps its value in a step while training (Krueger et al. 2016):
            h_t = m h_{t-1} + (1 - m) h', where h' is the h_t above and m drawn from torch's default generator of the
            device, anew in each call (a streamed sequence is one call, `stream` makes one per chunk); in evaluation m
            is this probability.
        memory_budget: Most bytes that a training step of this layer may take above what is in use before it, a number
            or a string such as "2GiB": its output, all that is saved, scratch, and the gradients of input and weights,
            but not what the loss takes. What is saved, and in which chunks, is then chosen to keep to it; a call that
            cannot is refused before anything is computed, with the smallest budget that would do. What `offload` would
            move away counts in full. None for the limit that "auto" has by itself. See `fusedrnn.plan`.
        **kwargs: The arguments of `torch.nn.LSTM` by name.

    Raises:
        TypeError: If `layer_norm` is not a bool.
        ValueError: If an argument is not among its choices, or `layer_norm` meets `proj_size`; in a call also if
            nothing keeps to `memory_budget`.

    Shapes are those of `torch.nn.LSTM`, a sequence without batch dimension and `PackedSequence` included. Further to
    it, an input of no timesteps is taken: the states come back as they were.
    """

    layer_norm = False

    def __init__(self, *args: Any, layer_norm: bool = False, **kwargs: Any):
        if not isinstance(layer_norm, bool):
            raise TypeError(f"`layer_norm` must be True or False, got {type(layer_norm).__name__}")
        super().__init__(*args, **kwargs)
        self.layer_norm = layer_norm
        if not layer_norm:
            return
        if self.proj_size:
            raise ValueError(
                f"`proj_size` must be 0 with `layer_norm`, got {self.proj_size}: project the output with a "
                "torch.nn.Linear behind the layer"
            )
        # Not in torch's list of flat weights, which cuDNN would take for its own.
        for name in self._flat_weights_names:
            kind, _, place = name.partition("_l")
            if kind == "weight_hh":
                weight, H = self.get_parameter(name), self.hidden_size
                setattr(self, f"norm_ih_l{place}", nn.Parameter(weight.new_ones(4 * H)))
                setattr(self, f"norm_hh_l{place}", nn.Parameter(weight.new_ones(4 * H)))
                setattr(self, f"norm_c_l{place}", nn.Parameter(weight.new_ones(H)))
                setattr(self, f"norm_c_bias_l{place}", nn.Parameter(weight.new_zeros(H)))

    @property
    def cell(self) -> CellSpec:
        """What each layer computes."""
        return LAYER_NORM_LSTM if self.layer_norm else LSTM_CELL

    def reset_parameters(self) -> None:
        """Set the parameters to fresh initial values, those of the normalisations to ones and zeros."""
        super().reset_parameters()
        for name, weight in self.named_parameters():
            if name.startswith("norm_"):
                nn.init.constant_(weight, 0.0 if name.startswith("norm_c_bias") else 1.0)

    def extra_repr(self) -> str:
        """Return torch's representation with the options that are not the default."""
        return super().extra_repr() + (", layer_norm=True" if self.layer_norm else "")

    def forward(  # type: ignore[override]
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        resets: Tensor | None = None,
        return_cells: bool = False,
        *,
        output: str = "sequence",
        chunk_loss: Union["ChunkLoss", None] = None,
    ) -> (
        tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]
        | tuple[Tensor | PackedSequence, tuple[Tensor, Tensor], Tensor | PackedSequence]
    ):
        """Run the layers.

        With an input that is no tensor, an `output` other than "sequence", or a `chunk_loss`, the sequence is streamed:
        it goes through the layers in segments (of `chunk` timesteps, where that is a number), of which nothing is kept
        but the states before each. The backward pass reads each segment's input again and computes it again, so that
        the peak of memory does not depend on the length. Results and gradients are those of a layer with the same
        `chunk` and `save` that keeps everything, zoneout included: to the last bit where the matrix products of both
        have the same shapes and alignment in memory, else to rounding. Dropout between layers is drawn per segment.

        Args:
            input: [T, B, I], [B, T, I] with `batch_first`, [T, I] for one sequence, or a `PackedSequence`. Or what is
                not on the device as a whole: an array of NumPy (a memory-mapped file), or an iterable of chunks of
                such shapes (one with `__getitem__` and `__len__` is read again in the backward pass; what others
                yield is kept until then; those on the device are used there); and where the sequence is streamed, also
                a tensor on the host. Iterables are read on a thread that works on the caller's device and stream.
            hx: Initial states h0 [num_layers * directions, B, P] and c0 [num_layers * directions, B, H] (without B for
                one sequence); zeros if not given.
            resets: bool, shaped as the input without features: true where the states start anew, at zero, before a
                step, as at the first step of an episode. No gradient passes there, and the pieces are as if run alone:
                in the reverse direction, too, where a piece starts with its last step.
            return_cells: Whether the cell states of all steps are returned, too; not of a streamed sequence.
            output: "sequence" for the whole output on the device; "host" for the whole output in host memory; "last"
                for that of the last step alone, [B, P]. Input and output may each be longer than the device holds,
                and so may their gradients.
            chunk_loss: `(y, steps) -> loss`, a scalar: it is called with the output of each segment and the `slice` of
                timesteps that it is of, and the sum of the losses takes the place of the output. Parameters that it
                uses get their gradients. It runs twice per segment, with the same random numbers.

        Returns:
            The output, shaped as the input with features [directions * P] (or as `output` or `chunk_loss` say), and
            the final states (h_n, c_n), shaped as `hx`. With `return_cells` also c_t of all steps of the last layer,
            shaped as the input with features [directions * H]; in the dtype in which c is carried, which is float32 for
            half-precision layers, since this is the tensor that the backward pass reads, and nothing is kept twice.

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
        (y, *cells), (h, c) = self._run(input, states, resets, output, chunk_loss, return_cells)
        return (y, (h, c), cells[0]) if cells else (y, (h, c))


class GRU(Recurrent, nn.GRU):
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
        memory_budget: Most bytes that a training step may take, or None.
        zoneout: Probability with which a unit keeps its value in a step.
        **kwargs: The arguments of `torch.nn.GRU` by name.

    Raises:
        ValueError: If an argument is not among its choices.
    """

    @property
    def cell(self) -> CellSpec:
        """What each layer computes."""
        return GRU_CELL

    def forward(  # type: ignore[override]
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        resets: Tensor | None = None,
        return_cells: bool = False,
        *,
        output: str = "sequence",
        chunk_loss: Union["ChunkLoss", None] = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the layers.

        Args:
            input: [T, B, I], [B, T, I] with `batch_first`, [T, I] for one sequence, or a `PackedSequence`.
            hx: Initial state h0 [num_layers * directions, B, H] (without B for one sequence); zeros if not given.
            resets: As for `fusedrnn.LSTM`.
            return_cells: False; a GRU has no cell states.
            output: As for `fusedrnn.LSTM`.
            chunk_loss: As for `fusedrnn.LSTM`.

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
        (y,), (h,) = self._run(input, None if hx is None else (hx,), resets, output, chunk_loss)
        return y, h
