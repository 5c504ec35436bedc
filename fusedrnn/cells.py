"""The cells: what each computes, which states it carries, and how wide it is.

A cell joins here: its equations as plain, differentiable torch (the meaning that every backend must agree with), and
the numbers from which shapes and memory follow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

States = tuple[Tensor, ...]


class Weights(NamedTuple):
    """Parameters of one layer in one direction, in the order and with the names of `torch.nn.LSTM`.

    With G gates (4 of an LSTM, 3 of a GRU): `weight_ih` is [GH, I], `weight_hh` [GH, P] with P the width of the output
    (H without a projection), the biases [GH], and `weight_hr` [P, H]. The fields from `norm_ih` on are of a
    layer-normalised LSTM: gains `norm_ih` and `norm_hh` [4H] and `norm_c` [H], and the bias `norm_c_bias` [H].
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None
    norm_ih: Tensor | None = None
    norm_hh: Tensor | None = None
    norm_c: Tensor | None = None
    norm_c_bias: Tensor | None = None

    @property
    def hidden_size(self) -> int:
        """Number of hidden units H."""
        return (self.weight_hh if self.weight_hr is None else self.weight_hr).shape[1]

    @property
    def output_size(self) -> int:
        """Width P of the output."""
        return self.weight_hh.shape[1]


def _project(x: Tensor, weights: Weights) -> Tensor:
    """Return W_ih x + b_ih for x [..., I]."""
    return F.linear(x, weights.weight_ih, weights.bias_ih)


@dataclass(frozen=True)
class CellSpec:
    """What the rest of the library needs to know of a cell.

    Args:
        name: The cell's name.
        gates: Width of the pre-activations in units of H.
        states: Names of the carried states; the first is the output, the others are carried in `state_dtype`.
        saved: What each save mode keeps per timestep and hidden unit beyond the output: numbers in the dtype of the
            output, and numbers in `state_dtype`.
        step: `(xproj, states, weights) -> states`, differentiable to any order.
        project: `(x, weights) -> xproj`, what a step takes of the input; x [..., I] may hold any number of steps.
    """

    name: str
    gates: int
    states: tuple[str, ...]
    saved: tuple[tuple[str, int, int], ...]
    step: Callable[[Tensor, States, Weights], States]
    project: Callable[[Tensor, Weights], Tensor] = _project

    @property
    def modes(self) -> tuple[str, ...]:
        """Save modes it has, the one that keeps most first."""
        return tuple(mode for mode, _, _ in self.saved)

    def saved_bytes(self, mode: str, dtype: torch.dtype) -> int:
        """Return the bytes that a save mode keeps per timestep and hidden unit beyond the output."""
        (bytes_per_unit,) = (
            own * dtype.itemsize + wide * state_dtype(dtype).itemsize for name, own, wide in self.saved if name == mode
        )
        return bytes_per_unit


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which c is carried and gradients of weights are summed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lstm_step(xproj: Tensor, states: States, weights: Weights) -> States:
    """One LSTM step (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    i, f, o = sigmoid(pre), g = tanh(pre), c = f * c_prev + i * g, h = W_hr (o * tanh(c)), where
    pre = xproj + W_hh h_prev + b_hh and W_hr is the identity without a projection.
    """
    h, c = states
    pre = (xproj + F.linear(h, weights.weight_hh, weights.bias_hh)).to(c.dtype)
    i, f, g, o = pre.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    out = (torch.sigmoid(o) * torch.tanh(c)).to(h.dtype)
    return (out if weights.weight_hr is None else F.linear(out, weights.weight_hr)), c


def _gru_step(xproj: Tensor, states: States, weights: Weights) -> States:
    """One GRU step (Cho et al. 2014, with the reset gate behind the product as in cuDNN and torch).

    r, z = sigmoid(xproj + W_hh h_prev + b_hh), n = tanh(xproj_n + r (W_hn h_prev + b_hn)), h = (1 - z) n + z h_prev.
    """
    (h,) = states
    wide = state_dtype(h.dtype)
    x_r, x_z, x_n = xproj.to(wide).chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, weights.weight_hh, weights.bias_hh).to(wide).chunk(3, -1)
    z = torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return ((n + z * (h.to(wide) - n)).to(h.dtype),)


NORM_EPS = 1e-5
"""What a layer normalisation adds to the variance: the value of `torch.nn.LayerNorm` and of haste."""


def _normalize(x: Tensor, gain: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * gain + bias over the last dimension, in the dtype of x."""
    gain, bias = (None if part is None else part.to(x.dtype) for part in (gain, bias))
    return F.layer_norm(x, x.shape[-1:], gain, bias, NORM_EPS)


def _layer_norm_lstm_project(x: Tensor, weights: Weights) -> Tensor:
    """Return LN(W_ih x) norm_ih + b_ih in the dtype of the states: the product is normalised without its bias."""
    xproj = _normalize(F.linear(x, weights.weight_ih).to(state_dtype(x.dtype)), weights.norm_ih)
    return xproj if weights.bias_ih is None else xproj + weights.bias_ih


def _layer_norm_lstm_step(xproj: Tensor, states: States, weights: Weights) -> States:
    """One step of a layer-normalised LSTM (Ba, Kiros and Hinton 2016, appendix; no projection).

    pre = xproj + LN(W_hh h_prev) norm_hh + b_hh, i, f, g, o and c as in an LSTM, h = o * tanh(LN(c) norm_c +
    norm_c_bias); LN takes mean and biased variance over all 4H numbers, or over the H of c. c is carried as it was
    before its normalisation. That is haste's LayerNormLSTM (lib/layer_norm_lstm_forward_gpu.cu.cc of lmnt-com/haste),
    but for the order of its gates (i, g, f, o there) and torch's two biases in place of its one.
    """
    h, c = states
    pre = xproj + _normalize(F.linear(h, weights.weight_hh).to(c.dtype), weights.norm_hh)
    if weights.bias_hh is not None:
        pre = pre + weights.bias_hh
    i, f, g, o = pre.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    out = torch.sigmoid(o) * torch.tanh(_normalize(c, weights.norm_c, weights.norm_c_bias))
    return out.to(h.dtype), c


LSTM = CellSpec("lstm", 4, ("h", "c"), (("gates", 4, 1), ("cells", 0, 1), ("hidden", 0, 0)), _lstm_step)
GRU = CellSpec("gru", 3, ("h",), (("gates", 4, 0), ("hidden", 0, 0)), _gru_step)
LAYER_NORM_LSTM = CellSpec(
    "layer_norm_lstm",
    4,
    ("h", "c"),
    (("gates", 8, 1), ("cells", 0, 1), ("hidden", 0, 0)),
    _layer_norm_lstm_step,
    _layer_norm_lstm_project,
)
CELLS = {cell.name: cell for cell in (LSTM, GRU, LAYER_NORM_LSTM)}
