"""A sequence whose older chunks are saved in another mode than the newer ones."""

import pytest
import torch

import fusedrnn
from fusedrnn import functional
from fusedrnn.backends import BACKENDS, Choice
from fusedrnn.testing import assert_agrees_with_float64, full_device, results

CELLS = {
    "lstm": (fusedrnn.LSTM, {}),
    "projection": (fusedrnn.LSTM, {"proj_size": 3}),
    "gru": (fusedrnn.GRU, {}),
    "layer_norm_lstm": (fusedrnn.LSTM, {"layer_norm": True}),
}
KINDS = {"one": {}, "deep": {"num_layers": 2}, "both": {"num_layers": 2, "bidirectional": True}}


def mixed(monkeypatch, module, save, older, chunk=3):
    """Let every call of the module be saved as said; return the slots' sizes of the calls to come."""
    backend = BACKENDS[module.cell.name]["torch_step"]
    assert {save, older[1]} <= set(backend.saves)
    monkeypatch.setattr(functional, "choose", lambda *_: Choice(backend, save, chunk, "tested", older))
    return module


@pytest.mark.parametrize("older", [1, 2, 100])
@pytest.mark.parametrize("modes", [("gates", "hidden"), ("gates", "cells"), ("cells", "hidden"), ("hidden", "gates")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", CELLS)
def test_results_agree_with_float64(monkeypatch, cell, kind, modes, older):
    make, options = CELLS[cell]
    if "cells" in modes and make is fusedrnn.GRU:
        pytest.skip("a GRU has no cells")
    torch.manual_seed(older)
    module = mixed(monkeypatch, make(4, 5, **options, **KINDS[kind], dtype=torch.float64), modes[0], (older, modes[1]))
    assert_agrees_with_float64(module, torch.randn(10, 2, 4))


def slots(module, x):
    """Return the sizes of the buffers that a call saves, in the order of the chunks."""
    sizes = []

    def pack(tensor):
        if tensor.dtype == torch.uint8:
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)[0].sum().backward()
    return sizes


def test_only_the_newer_chunks_keep_their_gates(monkeypatch):
    x = torch.randn(12, 2, 4)
    sizes = {
        older: slots(mixed(monkeypatch, fusedrnn.LSTM(4, 64), "gates", (older, "hidden")), x) for older in (0, 3, 4)
    }
    small, large = sizes[4][0], sizes[0][0]
    assert small < large
    assert sizes == {0: [large] * 4, 3: [small] * 3 + [large], 4: [small] * 4}


def test_offloading_changes_no_bit(monkeypatch):
    torch.manual_seed(0)
    plain = mixed(monkeypatch, fusedrnn.LSTM(4, 40, 2, dropout=0.5, bidirectional=True), "gates", (2, "hidden"))
    spilled = fusedrnn.LSTM(4, 40, 2, dropout=0.5, bidirectional=True, offload=full_device())
    spilled.load_state_dict(plain.state_dict())
    x = torch.randn(13, 2, 4)
    found = []
    for module in (plain, spilled):
        torch.manual_seed(1)
        found.append(results(module, x))
    assert spilled.offloader.stats().spills > 4
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
