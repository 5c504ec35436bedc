"""Predicted memory of a step against the allocations of a real one."""

import pytest
import torch

import fusedrnn
from fusedrnn import functional
from fusedrnn.bench._measure import allocated_bytes
from fusedrnn.memory import footprint

LSTM, GRU = fusedrnn.LSTM, fusedrnn.GRU
BF16, F64 = torch.bfloat16, torch.float64

# T, B, I, H, layers, then the options of the layer.
SHAPES = [
    (LSTM, (300, 4, 8, 64, 1), {"save": "gates", "backend": "torch_step"}),
    (LSTM, (300, 8, 32, 128, 2), {"save": "cells", "backend": "torch_step"}),
    (LSTM, (300, 4, 8, 64, 1), {"save": "hidden", "backend": "torch_step", "clip_recurrent_grad": 1.0}),
    (LSTM, (1000, 2, 8, 32, 2), {"save": "hidden", "backend": "torch_step", "chunk": 100, "bidirectional": True}),
    (LSTM, (300, 4, 8, 64, 2), {"save": "gates", "backend": "torch_step", "chunk": 100, "dropout": 0.3}),
    (LSTM, (300, 4, 8, 64, 1), {"save": "cells", "chunk": 50, "proj_size": 16}),
    (LSTM, (300, 4, 8, 64, 1), {"save": "hidden", "chunk": 50, "dtype": BF16}),
    (LSTM, (300, 4, 8, 64, 1), {"save": "gates", "chunk": 50, "dtype": F64, "zoneout": 0.1}),
    (LSTM, (300, 4, 8, 64, 1), {"save": "gates", "backend": "torch_step", "bias": False}),
    (LSTM, (300, 4, 8, 64, 1), {"layer_norm": True, "save": "gates"}),
    (LSTM, (300, 4, 8, 64, 2), {"layer_norm": True, "save": "hidden", "chunk": 40}),
    (GRU, (300, 4, 8, 64, 1), {"save": "gates"}),
    (GRU, (300, 4, 8, 64, 2), {"save": "hidden", "chunk": 70, "bidirectional": True}),
    (GRU, (129, 4, 8, 64, 1), {"save": "hidden", "dtype": BF16}),
    (LSTM, (2000, 4, 8, 64, 2), {"save": "gates"}),
    (LSTM, (3000, 1, 1, 32, 1), {"save": "gates"}),
    (LSTM, (700, 4, 64, 128, 1), {"save": "gates", "bidirectional": True}),
    (LSTM, (2000, 4, 8, 64, 1), {"save": "hidden"}),
    (LSTM, (700, 16, 24, 96, 2), {"save": "hidden", "bidirectional": True}),
    (LSTM, (257, 16, 64, 256, 1), {"save": "hidden"}),
]


def chosen(monkeypatch):
    """Return a list that receives every call with what was chosen for it."""
    calls = []
    choose = functional.choose

    def noted(call, *args):
        calls.append((call, choose(call, *args)))
        return calls[-1][1]

    monkeypatch.setattr(functional, "choose", noted)
    return calls


def step_of(module, T, B, dtype=torch.float32):
    """Return a function that runs a layer forward and backward; the gradient of its output is there already."""
    x = torch.randn(T, B, module.input_size, dtype=dtype, requires_grad=True)
    dy = torch.zeros_like(module(x)[0])

    def step():
        torch.autograd.grad(module(x)[0], [x, *module.parameters()], dy)

    step()
    return step


@pytest.mark.parametrize(("make", "sizes", "options"), SHAPES, ids=lambda value: str(value).replace(" ", ""))
def test_predicted_and_counted_bytes_agree_within_two_percent(monkeypatch, make, sizes, options):
    T, B, I, H, layers = sizes
    calls = chosen(monkeypatch)
    module = make(I, H, layers, **options)
    counted = allocated_bytes(step_of(module, T, B, options.get("dtype", torch.float32)))
    predicted = footprint(*calls[0]).peak
    assert 0.98 * counted < predicted < 1.02 * counted, (predicted, counted)
