"""The backends on Triton kernels, whole layers, against float64."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import tf32_allowed
from fusedrnn.backends.graphs import GraphCache
from fusedrnn.kernels import _device
from fusedrnn.testing import assert_close, assert_no_worse_than_torch, offload_all, poisoned, results, twin

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
    monkeypatch.setattr(BACKENDS["lstm"]["triton_step"], "graphs", cache)
    for before, data in zip(plain, (x, y), strict=True):
        found = results(module, data)
        assert all(torch.equal(found[name], before[name]) for name in before)
    if device.type != "cuda":
        # Chunks of 4 and 2 steps, forward and backward, each recorded once for both layers and both inputs.
        assert len(recorded) == 4


def test_the_gradient_of_a_sum_is_expanded_in_memory(device):
    """All its strides are 0, which no kernel takes."""
    module = fusedrnn.LSTM(3, 5, backend="triton_step", chunk=4, device=device)
    x = torch.randn(6, 2, 3, device=device, requires_grad=True)
    exact = torch.autograd.grad(twin(module).to(device)(x.double())[0].sum(), x)[0]
    assert_close(torch.autograd.grad(module(x)[0].sum(), x)[0], exact, "dx")


@pytest.fixture
def sequence(device, at_once, monkeypatch):
    """A device on which a whole chunk runs in one launch; without a GPU, a stand-in that runs all programs at once."""
    if device.type == "cpu":
        monkeypatch.setattr(_device, "device_info", lambda device: _device.H100)
    return device


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("kind", ["one layer", "two layers, both directions", "no bias"])
def test_triton_sequence(sequence, save, kind):
    module = fusedrnn.LSTM(3, 17, backend="triton_sequence", save=save, chunk=4, device=sequence, **KINDS[kind])
    x = torch.randn(6, 2, 3, device=sequence)
    with poisoned():
        ours = results(module, x)
    exact = results(twin(module).to(sequence), x)
    for name in exact:
        assert_close(ours[name], exact[name], name)


@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_triton_sequence_takes_packed_sequences(sequence, save):
    module = fusedrnn.LSTM(3, 4, bidirectional=True, backend="triton_sequence", save=save, chunk=2, device=sequence)
    x = pack_padded_sequence(torch.randn(5, 4, 3, device=sequence), [2, 5, 1, 5], enforce_sorted=False)
    ours, exact = results(module, x), results(twin(module).to(sequence), x)
    for name in exact:
        assert_close(ours[name], exact[name], name)


def test_triton_sequence_is_preferred_and_refuses_with_its_limits(sequence):
    module = fusedrnn.LSTM(3, 4, device=sequence)
    module(torch.randn(2, 2, 3, device=sequence))
    assert "'triton_sequence'" in module.explain()
    wide = fusedrnn.LSTM(3, 4, proj_size=2, backend="triton_sequence", device=sequence)
    with pytest.raises(RuntimeError, match="triton_sequence: its kernels have no projection"):
        wide(torch.randn(2, 2, 3, device=sequence))
    large = fusedrnn.LSTM(1, 4096, backend="triton_sequence", device=sequence)
    with pytest.raises(RuntimeError, match=r"triton_sequence: .* B=2, H=4096 .* would need at best"):
        large(torch.randn(2, 2, 1, device=sequence))


def test_an_interpreter_that_runs_programs_in_turn_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = fusedrnn.LSTM(3, 4, backend="triton_sequence")
    with pytest.raises(RuntimeError, match="triton_sequence: its programs wait for one another"):
        module(torch.randn(2, 2, 3))


@pytest.mark.parametrize(
    ("general", "own", "expected"),
    [("ieee", "none", "ieee"), ("tf32", "none", "tf32"), ("tf32", "ieee", "ieee"), ("none", "tf32", "tf32")],
)
def test_products_of_float32_follow_the_switches_of_torch(general, own, expected):
    before = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = general, own
        assert tf32_allowed() == (expected == "tf32")
    finally:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("backend", ["triton_step", "triton_sequence"])
@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_resets(sequence, backend, save):
    module = fusedrnn.LSTM(3, 17, bidirectional=True, backend=backend, save=save, chunk=4, device=sequence)
    reference = fusedrnn.LSTM(3, 17, bidirectional=True, backend="reference", dtype=torch.float64, device=sequence)
    reference.load_state_dict(module.state_dict())
    x = torch.randn(6, 3, 3, device=sequence)
    resets = torch.zeros(6, 3, dtype=torch.bool, device=sequence)
    resets[2, 0] = resets[3, 1] = resets[4, 1] = resets[0, 2] = resets[5, 2] = True
    ours, exact = (results(given(m, resets), x) for m in (module, reference))
    for name in exact:
        assert_close(ours[name], exact[name], name)


@pytest.mark.parametrize("backend", ["triton_step", "triton_sequence"])
@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("cells", [False, True], ids=["clip", "clip and cells"])
def test_clip_and_cells(sequence, backend, resets, cells):
    found = []
    torch.manual_seed(0)
    x, resets = torch.randn(6, 2, 3, device=sequence), torch.rand(6, 2, device=sequence) < 0.3 if resets else None
    dtypes = {backend: torch.float32, "reference": torch.float64}
    for name, dtype in dtypes.items():
        torch.manual_seed(1)
        module = fusedrnn.LSTM(3, 17, backend=name, chunk=4, clip_recurrent_grad=0.1, device=sequence).to(dtype)
        y, after, *more = module(x.to(dtype), None, resets, cells)
        outputs = [y, *after, *more]
        generator = torch.Generator().manual_seed(2)
        grads = [3 * torch.randn(t.shape, generator=generator).to(t) for t in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, list(module.parameters()), grads)])
    for k, (ours, exact) in enumerate(zip(*found, strict=True)):
        assert_close(ours, exact, str(k))


@pytest.mark.parametrize("cls", [fusedrnn.LSTM, fusedrnn.GRU])
def test_zoneout(device, cls):
    found = []
    for name, dtype in (("triton_step", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(1)
        module = cls(3, 5, backend=name, chunk=4, zoneout=0.4, device=device).to(dtype)
        y, _ = module(torch.randn(6, 2, 3, device=device).to(dtype))
        found.append([y, *torch.autograd.grad(y.sin().sum(), list(module.parameters()))])
    for k, (ours, exact) in enumerate(zip(*found, strict=True)):
        assert_close(ours, exact, str(k))


def given(module, resets):
    """The module with its resets given."""
    forward = module.forward
    module.forward = lambda x, hx=None: forward(x, hx, resets)
    return module


@pytest.mark.parametrize("backend", ["triton_step", "triton_sequence"])
@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
def test_offloading_changes_no_bit(sequence, backend, save):
    """One result each way: what is on the device in between is spilled, fetched and overwritten."""
    found = []
    for offload in (False, offload_all()):
        torch.manual_seed(0)
        module = fusedrnn.LSTM(
            16, 16, num_layers=2, backend=backend, save=save, chunk=1, device=sequence, offload=offload
        )
        found.append(results(module, torch.randn(5, 2, 16, device=sequence)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert module.offloader.scheduler(sequence).counters.spills > 0
