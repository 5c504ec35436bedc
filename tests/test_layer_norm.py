"""`fusedrnn.LSTM(layer_norm=True)`: results, gradients, memory modes, parameters, and what leaves such layers alone."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import Call, Variant
from fusedrnn.cells import LAYER_NORM_LSTM
from fusedrnn.kernels._device import H100
from fusedrnn.testing import (
    assert_agrees_with_float64,
    assert_close,
    assert_no_worse_than_torch,
    offload_all,
    poisoned,
    results,
    twin,
)
from fusedrnn.weights import to_keras

MODES = ("gates", "cells", "hidden")
KINDS = {
    "one layer": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
}
NORMS = ["norm_ih_l0", "norm_hh_l0", "norm_c_l0", "norm_c_bias_l0"]


def make(*sizes, **options):
    """A layer whose normalisations have other parameters than at first."""
    module = fusedrnn.LSTM(*sizes, layer_norm=True, **options)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.startswith("norm_"):
                weight.add_(0.3 * torch.randn_like(weight))
    return module


def test_the_equations():
    """The reference against the paper's equations, written out with means and deviations."""
    module = make(3, 5, backend="reference", dtype=torch.float64)
    x, h, c = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 2, 3), (2, 5), (2, 5)))

    def normal(v):
        centred = v - v.sum(-1, keepdim=True) / v.shape[-1]
        return centred / (centred.square().sum(-1, keepdim=True) / v.shape[-1] + 1e-5) ** 0.5

    y, (h_n, c_n) = module(x, (h[None], c[None]))
    for t in range(6):
        pre = normal(x[t] @ module.weight_ih_l0.T) * module.norm_ih_l0 + module.bias_ih_l0 + module.bias_hh_l0
        pre = pre + normal(h @ module.weight_hh_l0.T) * module.norm_hh_l0
        i, f, g, o = pre.split(5, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * (normal(c) * module.norm_c_l0 + module.norm_c_bias_l0).tanh()
        assert_close(y[t], h, f"y at step {t}")
    assert_close(h_n[0], h, "h")
    assert_close(c_n[0], c, "c, which is carried as it is before its normalisation")


@pytest.mark.parametrize("save", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_state", [True, False], ids=["hx", "no hx"])
def test_agrees_with_the_reference_in_float64(save, kind, with_state):
    module = make(3, 5, backend="torch_step", save=save, chunk=4, dtype=torch.float64, **KINDS[kind])
    batch = 7 if module.batch_first else 2
    layers = module.num_layers * (2 if module.bidirectional else 1)
    hx = (torch.randn(layers, batch, 5), torch.randn(layers, batch, 5)) if with_state else None
    assert_agrees_with_float64(module, torch.randn(7, 2, 3), hx)


@pytest.mark.parametrize("save", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_is_as_near_to_float64_as_a_loop_of_torch_is(dtype, save):
    module = make(8, 16, backend="torch_step", save=save, chunk=8, dtype=dtype)
    x = torch.randn(24, 4, 8).to(dtype)
    ours, theirs, exact = (results(m, x) for m in (module, twin(module, dtype), twin(module)))
    for name in exact:
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, 3.0 if name.startswith("d") else 2.0)


@pytest.mark.parametrize("save", MODES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences(save, bidirectional):
    options = {"backend": "torch_step", "save": save, "chunk": 2, "dtype": torch.float64}
    module = make(3, 5, 2, bidirectional=bidirectional, **options)
    x = pack_padded_sequence(torch.randn(6, 4, 3), [2, 6, 1, 5], enforce_sorted=False)
    layers = 4 if bidirectional else 2
    assert_agrees_with_float64(module, x, (torch.randn(layers, 4, 5), torch.randn(layers, 4, 5)))


@pytest.mark.parametrize("save", MODES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_resets(save, bidirectional):
    module = make(3, 5, 2, bidirectional=bidirectional, backend="torch_step", save=save, chunk=4, dtype=torch.float64)
    resets = torch.zeros(9, 3, dtype=torch.bool)
    resets[2, 0] = resets[3, 1] = resets[4, 1] = resets[0, 2] = resets[8, 2] = True
    x = torch.randn(9, 3, 3, dtype=torch.float64, requires_grad=True)
    layers = 4 if bidirectional else 2
    hx = tuple(torch.randn(layers, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = []
    for m in (module, twin(module)):
        with poisoned():
            y, (h, c) = m(x, hx, resets=resets)
            loss = y.pow(2).sum() + h.sin().sum() + c.pow(3).sum()
            found.append([y, h, c, *torch.autograd.grad(loss, [x, *hx, *m.parameters()])])
    for k, (ours, exact) in enumerate(zip(*found, strict=True)):
        assert_close(ours, exact, f"result {k}")
    # No gradient goes to an initial state that is replaced before the first step.
    assert found[0][5][0, 2].eq(0).all() and found[0][5][0, 1].ne(0).any()


@pytest.mark.parametrize("save", MODES)
def test_modes_and_a_chunk_of_one_step_give_the_same_outputs(save):
    x = torch.randn(9, 2, 3)
    module = make(3, 5, 2, backend="torch_step", save=save, chunk=4)
    expected = results(twin(module, torch.float32), x)["y"]
    for options in ({"chunk": 1}, {"chunk": 100}):
        other = fusedrnn.LSTM(3, 5, 2, layer_norm=True, backend="torch_step", save=save, **options)
        other.load_state_dict(module.state_dict())
        assert_close(results(other, x)["y"], expected.double(), str(options))


@pytest.mark.parametrize("save", MODES)
def test_offloading_changes_no_bit(save):
    module = make(16, 32, 2, backend="torch_step", save=save, chunk=4)
    offloading = fusedrnn.LSTM(
        16, 32, 2, layer_norm=True, backend="torch_step", save=save, chunk=4, offload=offload_all()
    )
    offloading.load_state_dict(module.state_dict())
    x = torch.randn(32, 8, 16)
    expected, found = results(module, x), results(offloading, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert offloading.offloader.scheduler(torch.device("cpu")).counters.spills > 0


@pytest.mark.parametrize("save", MODES)
def test_a_kept_graph_gives_the_same_gradients_again(save):
    module = make(3, 4, 2, backend="torch_step", save=save, chunk=2)
    x = torch.randn(5, 2, 3, requires_grad=True)
    y = module(x)[0].square().sum()
    first, second = (torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_second_derivatives():
    module = make(2, 3, backend="torch_step", save="hidden", chunk=2, dtype=torch.float64)
    weights = {name: weight.detach().requires_grad_() for name, weight in module.named_parameters()}
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    hx = tuple(torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run(x, h, c, *values):
        y, (_, c) = functional_call(module, dict(zip(weights, values, strict=True)), (x, (h, c)))
        return y, c

    assert torch.autograd.gradcheck(run, (x, *hx, *weights.values()))
    assert torch.autograd.gradgradcheck(run, (x, *hx, *weights.values()))


def test_transforms():
    module, x = make(3, 4), torch.randn(5, 2, 3)
    weights = dict(module.named_parameters())

    def loss(weights, x):
        return functional_call(module, weights, (x,))[0].pow(2).sum()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 1))(weights, x)
    module(x)[0].pow(2).sum().backward()
    for name, weight in weights.items():
        assert_close(grads[name].sum(0), weight.grad.double(), name)
    _, dy = torch.func.jvp(lambda x: loss(weights, x), (x,), (torch.ones_like(x),))
    leaf = x.clone().requires_grad_()
    loss(weights, leaf).backward()
    assert_close(dy, leaf.grad.double().sum(), "directional derivative")


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True, "bias": False}], ids=str)
@pytest.mark.parametrize("save", MODES)
def test_compiled(options, save):
    module = make(3, 4, backend="torch_step", save=save, chunk=2, dtype=torch.float64, **options)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    exact = results(twin(module), x)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        data = x.clone().requires_grad_()
        y, (h, c) = compiled(data)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (y, h, c)]
    torch.autograd.backward((y, h, c), grads)
    found = {"y": y, "h": h, "c": c, "dx": data.grad}
    found |= {f"d{name}": weight.grad for name, weight in module.named_parameters()}
    for name in exact:
        assert_close(found[name], exact[name], name)


def saved_bytes(run):
    """Bytes that autograd keeps of `run`, each storage once."""
    storages = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: storages.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        run()
    return sum(t.untyped_storage().nbytes() for t in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", MODES)
def test_a_mode_keeps_what_the_cell_says(save, dtype):
    T, B, I, H, chunk = 64, 2, 4, 64, 16
    module = make(I, H, backend="torch_step", save=save, chunk=chunk, dtype=dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    size = dtype.itemsize
    # Input, output, the initial state, the parameters, and the states before each chunk: all multiples of 256 bytes.
    outer = size * (T * B * (I + H) + sum(weight.numel() for weight in module.parameters()))
    outer += (size + 4) * B * H * (1 + T // chunk)
    assert saved_bytes(lambda: module(x)) == outer + T * B * H * LAYER_NORM_LSTM.saved_bytes(save, dtype)


def test_the_choice_counts_what_its_modes_keep():
    call = Call(100, 4, 8, 16, 16, 1, 1, torch.float32, "cpu", cell=LAYER_NORM_LSTM)
    assert [call.step_bytes(save) for save in MODES] == [4 * 16 * 4 * numbers for numbers in (9, 1, 0)]
    small, large = fusedrnn.LSTM(3, 8, layer_norm=True), fusedrnn.LSTM(3, 64, layer_norm=True)
    small(torch.randn(5, 2, 3))
    assert "backend 'torch_step', save='gates'" in small.explain()
    large(torch.randn(2000, 8, 3))
    assert "oldest chunks with" in large.explain()


def test_only_what_needs_a_gradient_gets_one():
    module = make(3, 5, 2, backend="torch_step", save="gates", chunk=2, dtype=torch.float64)
    frozen = ("weight_hh_l0", "bias_ih_l0", "norm_hh_l0", "norm_c_l1", "norm_c_bias_l0", "norm_ih_l1")
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    x = torch.randn(5, 2, 3)
    found, exact = results(module, x), results(twin(module), x)
    assert not found.keys() & {f"d{name}" for name in frozen}
    assert len(found) == len(exact) - len(frozen)
    for name in found:
        assert_close(found[name], exact[name], name)


def test_autocast_and_empty_input():
    module = make(3, 4, backend="torch_step")
    with torch.autocast("cpu", torch.bfloat16):
        y, (h, c) = module(torch.randn(5, 2, 3))
    assert y.dtype == h.dtype == c.dtype == torch.bfloat16
    module = make(3, 4, dtype=torch.bfloat16)
    hx = torch.randn(2, 1, 2, 4).bfloat16()
    y, (h, c) = module(torch.randn(0, 2, 3).bfloat16(), tuple(hx))
    assert y.shape == (0, 2, 4) and y.dtype == torch.bfloat16 and torch.equal(h, hx[0]) and torch.equal(c, hx[1])
    assert module(torch.randn(5, 0, 3).bfloat16())[0].shape == (5, 0, 4)


def test_parameters():
    torch.manual_seed(3)
    ours = fusedrnn.LSTM(3, 4, 2, bidirectional=True, layer_norm=True)
    torch.manual_seed(3)
    theirs = nn.LSTM(3, 4, 2, bidirectional=True)
    state, plain = ours.state_dict(), theirs.state_dict()
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    own = {name: state[name] for name in state if name not in plain}
    places = ("l0", "l0_reverse", "l1", "l1_reverse")
    assert list(own) == [f"{norm[:-3]}_{place}" for place in places for norm in NORMS]
    for name, value in own.items():
        assert value.shape == ((4,) if name.startswith("norm_c") else (16,))
        assert torch.equal(value, torch.full_like(value, float(not name.startswith("norm_c_bias"))))
    assert list(fusedrnn.LSTM(3, 4, 2, bidirectional=True).state_dict()) == list(plain)
    assert repr(ours) == "LSTM(3, 4, num_layers=2, bidirectional=True, layer_norm=True)"


def test_reset_parameters():
    module = make(3, 4)
    before = module.weight_hh_l0.detach().clone()
    module.reset_parameters()
    assert not torch.equal(module.weight_hh_l0, before)
    values = [getattr(module, name).unique().tolist() for name in NORMS]
    assert values == [[1.0], [1.0], [1.0], [0.0]]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_whole_and_their_own(again):
    module, x = make(3, 4, save="hidden", chunk=2), torch.randn(5, 2, 3)
    other = again(module)
    assert other.layer_norm and other.cell is LAYER_NORM_LSTM
    found, expected = results(other, x), results(module, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    before = module(x)[0]
    with torch.no_grad():
        other.norm_c_l0.mul_(2)
    assert torch.equal(module(x)[0], before) and not torch.equal(other(x)[0], before)


def test_loading():
    module, plain = make(3, 4), nn.LSTM(3, 4)
    report = module.load_state_dict(plain.state_dict(), strict=False)
    assert report.missing_keys == NORMS and not report.unexpected_keys
    assert torch.equal(module.weight_ih_l0, plain.weight_ih_l0)
    with pytest.raises(RuntimeError, match="norm_ih_l0"):
        module.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="norm_ih_l0"):
        plain.load_state_dict(module.state_dict())
    with torch.device("meta"):
        empty = fusedrnn.LSTM(3, 4, layer_norm=True)
    assert empty.norm_hh_l0.is_meta
    empty.load_state_dict(module.double().state_dict(), assign=True)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    assert torch.equal(empty(x)[0], module(x)[0]) and empty.norm_c_l0.dtype == torch.float64
    fresh = fusedrnn.LSTM(3, 4, layer_norm=True, device="meta").to_empty(device="cpu")
    fresh.reset_parameters()
    assert torch.equal(fresh.norm_c_l0, torch.ones(4)) and torch.equal(fresh.norm_c_bias_l0, torch.zeros(4))


def test_functional_call_uses_what_it_is_given():
    module, x = make(3, 4, backend="torch_step"), torch.randn(5, 2, 3)
    given = {name: torch.rand_like(weight).requires_grad_() for name, weight in module.named_parameters()}
    other = make(3, 4, backend="torch_step")
    other.load_state_dict(given)
    y = functional_call(module, given, (x,))[0]
    assert torch.equal(y, other(x)[0])
    y.sum().backward()
    other(x)[0].sum().backward()
    assert all(weight.grad is None for weight in module.parameters())
    for name, weight in other.named_parameters():
        assert torch.equal(given[name].grad, weight.grad), name


def test_convert_leaves_such_layers_alone():
    model = nn.Sequential(make(3, 4))
    state = copy.deepcopy(model.state_dict())
    assert fusedrnn.convert(model).skipped == {"0": "it is a fusedrnn.LSTM already"}
    assert fusedrnn.convert_back(model).skipped == {"0": "it has `layer_norm`, which torch's layer has not"}
    assert type(model[0]) is fusedrnn.LSTM and model[0].layer_norm
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    plain = nn.Sequential(nn.LSTM(3, 4))
    fusedrnn.convert(plain)
    assert not plain[0].layer_norm and not fusedrnn.convert_back(plain).skipped
    assert "layer_norm" not in vars(plain[0])


def test_errors():
    with pytest.raises(TypeError, match="`layer_norm` must be True or False, got int"):
        fusedrnn.LSTM(3, 4, layer_norm=1)
    with pytest.raises(ValueError, match=r"`proj_size` must be 0 with `layer_norm`, got 2: project the output"):
        fusedrnn.LSTM(3, 4, proj_size=2, layer_norm=True)
    x = torch.randn(5, 2, 3)
    with pytest.raises(RuntimeError, match="backend='onednn' has no layer_norm_lstm: take one of 'triton_step'"):
        fusedrnn.LSTM(3, 4, layer_norm=True, backend="onednn")(x)
    with pytest.raises(RuntimeError, match=r"H=4, float32, cpu, layer_norm_lstm\)"):
        fusedrnn.LSTM(3, 4, layer_norm=True, backend="triton_step")(x)
    wide = Call(5, 2, 3, 5000, 5000, 1, 1, torch.float32, "cuda", cell=LAYER_NORM_LSTM)
    (reason,) = BACKENDS["layer_norm_lstm"]["triton_step"].refusals(wide)
    assert reason == "its kernels hold whole rows in registers, up to H=4096"
    with pytest.raises(ValueError, match="`lstm` must be without `layer_norm`, got a layer that has it"):
        to_keras(fusedrnn.LSTM(3, 4, layer_norm=True))


@pytest.mark.parametrize("backend", ["torch_step", "triton_step"])
@pytest.mark.parametrize(
    ("variant", "name"), [(Variant(zoneout=0.1), "zoneout=0.1"), (Variant(cells=True), "return_cells")]
)
def test_no_chunked_backend_leaves_out_what_varies_the_recurrence(backend, variant, name):
    sizes = {"T": 9, "B": 2, "I": 3, "H": 4, "P": 4, "layers": 1, "directions": 1, "dtype": torch.float32}
    on = {"device": "cuda", "gpu": H100} if backend == "triton_step" else {"device": "cpu"}
    call = Call(**sizes, **on, cell=LAYER_NORM_LSTM, variant=variant)
    refusals = BACKENDS["layer_norm_lstm"][backend].refusals
    assert refusals(call) == [f"with layer_norm it has no {name}"]
    assert not refusals(replace(call, variant=Variant(clip=0.1)))
