"""The backends on Triton kernels, whole layers, against float64."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.backends.graphs import GraphCache
from fusedrnn.testing import assert_close, assert_no_worse_than_torch, poisoned, results, twin

KINDS = {
    "one layer": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "projection": {"proj_size": 2},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_step(device, save, kind):
    module = fusedrnn.LSTM(3, 5, backend="triton_step", save=save, chunk=4, device=device, **KINDS[kind])
    x = torch.randn(6, 2, 3, device=device)
    with poisoned():
        ours = results(module, x)
    exact = results(twin(module).to(device), x)
    for name in exact:
        assert_close(ours[name], exact[name], name)


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
def test_triton_step_takes_packed_sequences(device, save):
    module = fusedrnn.LSTM(3, 4, bidirectional=True, backend="triton_step", save=save, chunk=2, device=device)
    x = pack_padded_sequence(torch.randn(5, 4, 3, device=device), [2, 5, 1, 5], enforce_sorted=False)
    ours, exact = results(module, x), results(twin(module).to(device), x)
    for name in exact:
        assert_close(ours[name], exact[name], name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_near_to_float64_as_torch_is(device, dtype):
    module = fusedrnn.LSTM(8, 16, backend="triton_step", save="hidden", chunk=4, dtype=dtype, device=device)
    x = torch.randn(8, 4, 8).to(device, dtype)
    ours, theirs, exact = (results(m.to(device), x) for m in (module, twin(module, dtype), twin(module)))
    for name in exact:
        factor = 3.0 if name.startswith("d") else 2.0
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, factor)


@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_replayed_chunks_give_the_same_bits(device, save, monkeypatch):
    """The chunks go through the graph cache; without a GPU its graphs are stand-ins that run what was recorded."""
    # With H=16 every view is aligned as a copy of it is; a CPU's products may round otherwise where it is not.
    module = fusedrnn.LSTM(3, 16, num_layers=2, backend="triton_step", save=save, chunk=4, device=device)
    x, y = torch.randn(10, 2, 3, device=device), torch.randn(10, 2, 3, device=device)
    plain = [results(module, x), results(module, y)]
    recorded = []

    class Graph:
        def __init__(self, body):
            self.replay = body
            recorded.append(body)

    cache = GraphCache() if device.type == "cuda" else GraphCache(Graph)
    monkeypatch.setattr(cache, "worthwhile", lambda gates, n_steps: n_steps > 1)
    monkeypatch.setattr(BACKENDS["triton_step"], "graphs", cache)
    for before, data in zip(plain, (x, y), strict=True):
        found = results(module, data)
        assert all(torch.equal(found[name], before[name]) for name in before)
    if device.type != "cuda":
        # Chunks of 4 and 2 steps, forward and backward, each recorded once for both layers and both inputs.
        assert len(recorded) == 4
