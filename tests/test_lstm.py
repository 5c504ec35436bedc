"""`fusedrnn.LSTM` against `torch.nn.LSTM` in float64: every backend and save mode, every kind of layer."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import fusedrnn
from fusedrnn.testing import assert_close, assert_no_worse_than_torch, poisoned, results, twin

MODES = [
    ("reference", "gates", torch.float64),
    ("torch_step", "gates", torch.float64),
    ("torch_step", "cells", torch.float64),
    ("torch_step", "hidden", torch.float64),
    ("onednn", "gates", torch.float32),
    ("onednn", "hidden", torch.float32),
]
LAYERS = {
    "one layer": {},
    "no bias": {"bias": False},
    "three layers": {"num_layers": 3},
    "bidirectional": {"bidirectional": True},
    "two bidirectional layers": {"num_layers": 2, "bidirectional": True},
}


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(map(str, mode[:2])))
def mode(request):
    return request.param


def states(module: nn.LSTM, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = module.num_layers * (2 if module.bidirectional else 1)
    width = module.proj_size or module.hidden_size
    return torch.randn(count, batch, width), torch.randn(count, batch, module.hidden_size)


def compare(module, x, hx=None):
    with poisoned():
        ours = results(module, x, hx)
    exact = results(twin(module), x, hx)
    assert ours.keys() == exact.keys()
    for name, tensor in ours.items():
        assert_close(tensor, exact[name], name)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("with_state", [False, True], ids=["zero state", "state given"])
def test_results_and_all_gradients(mode, kind, with_state):
    backend, save, dtype = mode
    module = fusedrnn.LSTM(3, 5, **LAYERS[kind], dtype=dtype, backend=backend, save=save, chunk=4)
    compare(module, torch.randn(11, 2, 3), states(module, 2) if with_state else None)


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("kind", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one layer", "deep"])
def test_projection(save, kind):
    module = fusedrnn.LSTM(3, 7, proj_size=2, dtype=torch.float64, backend="torch_step", save=save, chunk=3, **kind)
    compare(module, torch.randn(7, 2, 3), states(module, 2))


@pytest.mark.parametrize(("T", "B", "I", "H"), [(1, 1, 1, 1), (1, 3, 2, 17), (9, 1, 33, 3), (8, 17, 5, 33)])
def test_odd_sizes(mode, T, B, I, H):
    backend, save, dtype = mode
    compare(fusedrnn.LSTM(I, H, dtype=dtype, backend=backend, save=save, chunk=4), torch.randn(T, B, I))


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 100])
def test_any_chunk_length_gives_the_same(mode, chunk):
    backend, save, dtype = mode
    compare(
        fusedrnn.LSTM(3, 4, num_layers=2, dtype=dtype, backend=backend, save=save, chunk=chunk), torch.randn(8, 2, 3)
    )


def test_batch_first_and_strided_input(mode):
    backend, save, dtype = mode
    module = fusedrnn.LSTM(3, 4, batch_first=True, dtype=dtype, backend=backend, save=save, chunk=3)
    compare(module, torch.randn(7, 2, 6).permute(1, 0, 2)[:, :, ::2])
    compare(module, torch.randn(2, 1, 3).expand(2, 7, 3))


def test_one_sequence_without_batch_dimension(mode):
    backend, save, dtype = mode
    module = fusedrnn.LSTM(3, 4, num_layers=2, batch_first=True, dtype=dtype, backend=backend, save=save, chunk=3)
    x, hx = torch.randn(7, 3), (torch.randn(2, 4), torch.randn(2, 4))
    compare(module, x, hx)
    assert module(x.to(dtype))[0].shape == (7, 4)


@pytest.mark.parametrize("save", ["gates", "cells", "hidden", "reference"])
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences(save, kind):
    options = {"backend": "reference"} if save == "reference" else {"backend": "torch_step", "save": save, "chunk": 3}
    module = fusedrnn.LSTM(3, 4, dtype=torch.float64, **LAYERS[kind], **options)
    lengths = [3, 7, 1, 5, 7, 2]
    padded = torch.randn(7, 6, 3, dtype=torch.float64)
    compare(module, pack_padded_sequence(padded, lengths, enforce_sorted=False), states(module, 6))
    compare(module, pack_sequence([torch.randn(n, 3, dtype=torch.float64) for n in (6, 4, 4, 1)]))


def test_auto_takes_packed_sequences():
    module = fusedrnn.LSTM(3, 4)
    compare(module, pack_sequence([torch.randn(n, 3) for n in (6, 4, 1)]))


def test_saturated_gates_are_exact_and_their_gradient_is_zero(mode):
    backend, save, dtype = mode
    module = fusedrnn.LSTM(4, 6, dtype=dtype, backend=backend, save=save, chunk=4)
    for size in (100.0, 1e4, 1e30):
        found = results(module, torch.randn(9, 3, 4) * size)
        assert all(torch.isfinite(tensor).all() for tensor in found.values())
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
        module.weight_ih_l0[:, 0] = torch.tensor([1.0] * 6 + [-1.0] * 6 + [1.0] * 3 + [-1.0] * 3 + [1.0] * 6)
        _, (_, c) = module(torch.full((3, 1, 4), 1e6, dtype=dtype))
    assert torch.equal(c[0, 0], torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
def test_half_precision_is_as_near_to_float64_as_torch_is(dtype, save):
    module = fusedrnn.LSTM(8, 16, num_layers=2, dtype=dtype, backend="torch_step", save=save, chunk=8)
    x, hx = torch.randn(24, 4, 8).to(dtype), tuple(state.to(dtype) for state in states(module, 4))
    ours, theirs, exact = (results(m, x, hx) for m in (module, twin(module, dtype), twin(module)))
    for name in exact:
        factor = 3.0 if name.startswith("d") else 2.0
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, factor)


def test_the_cell_state_of_a_bfloat16_layer_keeps_small_additions():
    module = fusedrnn.LSTM(1, 1, dtype=torch.bfloat16, chunk=64)
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
        # f = 1, i = 1, g = tanh(small): each step adds less than bfloat16 resolves next to 1.
        module.bias_ih_l0.copy_(torch.tensor([30.0, 30.0, 0.001, 30.0]))
        _, (_, c) = module(torch.zeros(2000, 1, 1, dtype=torch.bfloat16))
    assert abs(float(c) - 2.0) < 0.02
    assert "torch_step" in module.explain() or "triton" in module.explain()


def test_parameters_are_those_of_torch():
    torch.manual_seed(7)
    ours = fusedrnn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2)
    torch.manual_seed(7)
    theirs = nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2)
    assert isinstance(ours, nn.LSTM)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert repr(fusedrnn.LSTM(3, 5, save="hidden", chunk=8)) == "LSTM(3, 5, save='hidden', chunk=8)"


@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_as_torch_does(training):
    ours = fusedrnn.LSTM(3, 5, num_layers=3, dropout=0.4, save="hidden", backend="torch_step", chunk=4).train(training)
    theirs = twin(ours, torch.float32)
    x = torch.randn(9, 2, 3)
    torch.manual_seed(3)
    found = results(ours, x)
    torch.manual_seed(3)
    expected = results(theirs, x)
    for name, tensor in found.items():
        assert_close(tensor, expected[name], name)


def test_empty_input_keeps_shapes_and_states():
    module = fusedrnn.LSTM(3, 4, num_layers=2, bidirectional=True)
    hx = tuple(state.requires_grad_() for state in states(module, 2))
    y, (h, c) = module(torch.zeros(0, 2, 3), hx)
    assert y.shape == (0, 2, 8) and torch.equal(h, hx[0]) and torch.equal(c, hx[1])
    (h.sum() + 2 * c.sum()).backward()
    assert hx[0].grad.eq(1).all() and hx[1].grad.eq(2).all()
    y, (h, c) = module(torch.zeros(5, 0, 3))
    assert y.shape == (5, 0, 8) and h.shape == c.shape == (4, 0, 4)
    (y.sum() + h.sum() + c.sum()).backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in module.parameters())


def test_functional_form_runs_both_directions():
    module = fusedrnn.LSTM(3, 4, bidirectional=True, dtype=torch.float64)
    x, (h0, c0) = torch.randn(7, 2, 3, dtype=torch.float64), (state.double() for state in states(module, 2))
    expected, (hn, cn) = twin(module)(x, (h0, c0))
    for index, suffix in enumerate(("", "_reverse")):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = [getattr(module, f"{name}_l0{suffix}") for name in names]
        y, (h, c) = fusedrnn.lstm(x, (h0[index], c0[index]), *weights, reverse=bool(index), chunk=3, save="hidden")
        assert_close(y, expected[..., 4 * index : 4 * index + 4], "y")
        assert_close(h, hn[index], "h")
        assert_close(c, cn[index], "c")
    y, _ = fusedrnn.lstm(x, None, *weights[:2])
    assert y.shape == (7, 2, 4)


def test_no_worse_than_torch_sees_a_worse_result():
    exact = torch.randn(100, dtype=torch.float64)
    with pytest.raises(AssertionError, match="times torch's"):
        assert_no_worse_than_torch((exact + 1e-3).float(), exact.float(), exact, "y")
    with pytest.raises(AssertionError, match="more than allowed"):
        assert_close(exact.float() * 1.001, exact, "y")
