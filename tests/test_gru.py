"""`fusedrnn.GRU`: results, gradients, memory modes, and what it shares with the LSTM."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import Call
from fusedrnn.cells import GRU
from fusedrnn.choice import choose
from fusedrnn.testing import (
    assert_agrees_with_float64,
    assert_close,
    assert_no_worse_than_torch,
    offload_all,
    results,
    twin,
)

KINDS = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
}


@pytest.mark.parametrize("save", ["gates", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_state", [True, False], ids=["hx", "no hx"])
def test_agrees_with_float64(save, kind, with_state):
    module = fusedrnn.GRU(3, 5, backend="torch_step", save=save, chunk=4, **KINDS[kind])
    x = torch.randn(7, 2, 3)
    batch = 7 if KINDS[kind].get("batch_first") else 2
    layers = module.num_layers * (2 if module.bidirectional else 1)
    assert_agrees_with_float64(module, x, torch.randn(layers, batch, 5) if with_state else None)


@pytest.mark.parametrize("save", ["gates", "hidden"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences(save, bidirectional):
    module = fusedrnn.GRU(3, 5, 2, bidirectional=bidirectional, backend="torch_step", save=save, chunk=2)
    x = pack_padded_sequence(torch.randn(6, 4, 3), [2, 6, 1, 5], enforce_sorted=False)
    assert_agrees_with_float64(module, x, torch.randn(4 if bidirectional else 2, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_half_precision_is_as_near_to_float64_as_torch_is(dtype, save):
    module = fusedrnn.GRU(8, 16, backend="torch_step", save=save, chunk=8, dtype=dtype)
    x = torch.randn(24, 4, 8).to(dtype)
    ours, theirs, exact = (results(m, x) for m in (module, twin(module, dtype), twin(module)))
    for name in exact:
        factor = 3.0 if name.startswith("d") else 2.0
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, factor)


def test_is_a_torch_gru_with_the_same_start_and_checkpoints():
    torch.manual_seed(3)
    ours = fusedrnn.GRU(3, 4, num_layers=2, bidirectional=True)
    torch.manual_seed(3)
    theirs = nn.GRU(3, 4, num_layers=2, bidirectional=True)
    assert isinstance(ours, nn.GRU)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert repr(ours) == repr(theirs)
    x = torch.randn(5, 3)
    y, h = ours(x)
    expected, expected_h = theirs(x)
    assert_close(y, expected.double(), "y of one sequence")
    assert_close(h, expected_h.double(), "h of one sequence")


def test_only_what_needs_a_gradient_gets_one():
    module = fusedrnn.GRU(3, 5, backend="torch_step", save="gates", chunk=2)
    module.weight_hh_l0.requires_grad_(False)
    module.bias_ih_l0.requires_grad_(False)
    x = torch.randn(5, 2, 3)
    module(x)[0].sum().backward()
    assert module.weight_hh_l0.grad is None and module.bias_ih_l0.grad is None
    other = twin(module)
    other(x.double())[0].sum().backward()
    assert_close(module.weight_ih_l0.grad, other.weight_ih_l0.grad, "dweight_ih")
    assert_close(module.bias_hh_l0.grad, other.bias_hh_l0.grad, "dbias_hh")


@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_offloading_changes_no_bit(save):
    torch.manual_seed(0)
    plain = fusedrnn.GRU(16, 32, 2, backend="torch_step", save=save, chunk=4)
    offloading = fusedrnn.GRU(16, 32, 2, backend="torch_step", save=save, chunk=4, offload=offload_all())
    offloading.load_state_dict(plain.state_dict())
    x = torch.randn(32, 8, 16)
    expected = results(plain, x)
    found = results(offloading, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert offloading.offloader.scheduler(torch.device("cpu")).counters.spills > 0


def test_a_kept_graph_and_second_derivatives():
    module = fusedrnn.GRU(3, 4, backend="torch_step", save="gates", chunk=2, dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    y = module(x)[0].square().sum()
    first, second = (torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert torch.autograd.gradcheck(lambda x: module(x), (x,))
    assert torch.autograd.gradgradcheck(lambda x: module(x)[0], (x,))


def test_transforms_and_compile():
    module = fusedrnn.GRU(3, 4)
    x = torch.randn(5, 2, 3)
    expected = twin(module, torch.float32)(x)[0]
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x)[0], expected.double(), "compiled")
    weights = dict(module.named_parameters())
    grads = torch.func.vmap(
        torch.func.grad(lambda w, x: torch.func.functional_call(module, w, (x,))[0].sum()), (None, 1)
    )(weights, x)
    module(x)[0].sum().backward()
    for name, weight in module.named_parameters():
        assert_close(grads[name].sum(0), weight.grad.double(), name)


def test_autocast():
    module = fusedrnn.GRU(3, 4, backend="torch_step")
    with torch.autocast("cpu", torch.bfloat16):
        y, h = module(torch.randn(5, 2, 3))
    assert y.dtype == h.dtype == torch.bfloat16


def test_empty_input_returns_the_state():
    h0 = torch.randn(1, 2, 4)
    y, h = fusedrnn.GRU(3, 4)(torch.randn(0, 2, 3), h0)
    assert y.shape == (0, 2, 4) and torch.equal(h, h0)


def test_errors():
    module = fusedrnn.GRU(3, 4, num_layers=2)
    x = torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match=r"`h0` must have shape \(num_layers \* directions, B, H\) = \(2, 2, 4\), got"):
        module(x, torch.zeros(1, 2, 4))
    with pytest.raises(TypeError, match=r"`h0` must be a torch.Tensor, got tuple"):
        module(x, (torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)))
    with pytest.raises(RuntimeError, match="it has save='gates' and 'hidden' only"):
        fusedrnn.GRU(3, 4, save="cells")(x)
    with pytest.raises(RuntimeError, match="backend='onednn' has no gru: take one of 'triton_step', 'torch_step'"):
        fusedrnn.GRU(3, 4, backend="onednn")(x)
    with pytest.raises(RuntimeError, match=r"no backend can run this call \(T=5, B=2, I=3, H=4, float32, cpu, gru\)"):
        fusedrnn.GRU(3, 4, backend="triton_step")(x)


def test_choice_follows_the_memory_of_its_own_gates():
    call = Call(T=100, B=4, I=8, H=16, P=16, layers=1, directions=1, dtype=torch.float32, device="cpu", cell=GRU)
    assert call.step_bytes("gates") == 4 * 4 * 16 * 4 and call.step_bytes("hidden") == 0
    assert choose(call).backend is BACKENDS["gru"]["torch_step"] and choose(call).save == "gates"


def test_needs_less_memory_than_torch_keeps():
    module = fusedrnn.GRU(3, 8, backend="torch_step", save="hidden", chunk=4)
    x = torch.randn(64, 4, 3)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        module(x)
    # x, y, weights, the initial state, and 16 chunks with the state before each.
    assert sum(sizes) <= 4 * (x.numel() + 64 * 4 * 8 + sum(w.numel() for w in module.parameters()) + 32) + 16 * 256
