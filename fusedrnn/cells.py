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
    (H without a projection), the biases [GH], and `weight_hr` [P, H].
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None

    @property
    def hidden_size(self) -> int:
        """Number of hidden units H."""
        return (self.weight_hh if self.weight_hr is None else self.weight_hr).shape[1]

    @property
    def output_size(self) -> int:
        """Width P of the output."""
        return self.weight_hh.shape[1]


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
    """

    name: str
    gates: int
    states: tuple[str, ...]
    saved: tuple[tuple[str, int, int], ...]
    step: Callable[[Tensor, States, Weights], States]

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


LSTM = CellSpec("lstm", 4, ("h", "c"), (("gates", 4, 1), ("cells", 0, 1), ("hidden", 0, 0)), _lstm_step)
GRU = CellSpec("gru", 3, ("h",), (("gates", 4, 0), ("hidden", 0, 0)), _gru_step)
CELLS = {cell.name: cell for cell in (LSTM, GRU)}
