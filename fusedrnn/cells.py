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

    `weight_ih` is [4H, I], `weight_hh` [4H, P] with P the width of the output (H without a projection), the biases
    [4H], and `weight_hr` [P, H].
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None

    @property
    def hidden_size(self) -> int:
        """Number of hidden units H."""
        return self.weight_ih.shape[0] // 4

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
        states: Names of the carried states; the first is the output.
        step: `(xproj, states, weights) -> states`, differentiable to any order.
    """

    name: str
    gates: int
    states: tuple[str, ...]
    step: Callable[[Tensor, States, Weights], States]


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


LSTM = CellSpec(name="lstm", gates=4, states=("h", "c"), step=_lstm_step)
