"""Passes of a layer, timed forward and backward apart, for `fusedrnn-bench calibrate`."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import fusedrnn
from fusedrnn.backends.base import Call, gpu_of, onednn_allowed, tf32_allowed
from fusedrnn.bench._measure import synchronize
from fusedrnn.cells import CELLS

LAYERS: dict[str, Callable[..., torch.nn.RNNBase]] = {
    "lstm": fusedrnn.LSTM,
    "gru": fusedrnn.GRU,
    "layer_norm_lstm": partial(fusedrnn.LSTM, layer_norm=True),
}
"""Makes a layer, by its cell."""


class Runner:
    """Runs passes of a layer, over random numbers that all of them share."""

    def __init__(self, device: str):
        self._device = device
        self._numbers: dict[torch.dtype, Tensor] = {}

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = shape[0] * shape[1] * shape[2]
        numbers = self._numbers.get(dtype)
        if numbers is None or numbers.numel() < numel:
            numbers = self._numbers[dtype] = torch.randn(numel, device=self._device).to(dtype)
        return numbers[:numel].view(shape)

    def passes(self, call: Call, backend: str, save: str, count: int) -> list[tuple[float, float]]:
        """Return the seconds of some passes, forward and backward."""
        options: dict[str, Any] = {"backend": backend, "save": save, "bidirectional": call.directions == 2}
        layer = LAYERS[call.cell.name](call.I, call.H, call.layers, **options, device=self._device, dtype=call.dtype)
        x = self._random((call.T, call.B, call.I), call.dtype).detach().requires_grad_()
        dy = self._random((call.T, call.B, call.directions * call.H), call.dtype)
        found = []
        for _ in range(count):
            layer.zero_grad()
            x.grad = None
            start = self._now()
            y = layer(x)[0]
            turn = self._now()
            y.backward(dy)
            found.append((turn - start, self._now() - turn))
            del y
        return found

    def _now(self) -> float:
        synchronize(self._device)
        return perf_counter()


def typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def describe(
    device: str,
    dtype: torch.dtype,
    cell: str,
    T: int,
    B: int,
    I: int,
    H: int,
    layers: int = 1,
    directions: int = 1,
) -> Call:
    """Describe a call as a layer would that is called so."""
    where = torch.device(device)
    return Call(
        T,
        B,
        I,
        H,
        H,
        layers,
        directions,
        dtype,
        where.type,
        gpu=gpu_of(where),
        tf32=where.type == "cuda" and tf32_allowed(),
        onednn=onednn_allowed(),
        cell=CELLS[cell],
    )
