"""Clipped recurrent gradients, zoneout, and cell states as an output, against plain float64 loops."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.testing import assert_close, full_device

T, B, I, H = 11, 3, 4, 6

LAYERS = {
    "reference": (fusedrnn.LSTM, {"backend": "reference"}),
    "gates": (fusedrnn.LSTM, {"backend": "torch_step", "save": "gates"}),
    "cells": (fusedrnn.LSTM, {"backend": "torch_step", "save": "cells"}),
    "hidden": (fusedrnn.LSTM, {"backend": "torch_step", "save": "hidden"}),
    "two layers": (fusedrnn.LSTM, {"num_layers": 2, "save": "hidden"}),
    "projection": (fusedrnn.LSTM, {"proj_size": 5, "save": "hidden"}),
    "offloaded": (fusedrnn.LSTM, {"backend": "torch_step", "save": "gates", "offload": full_device(min_bytes=16)}),
    "layer norm": (fusedrnn.LSTM, {"layer_norm": True, "save": "hidden"}),
    "layer norm, by itself": (fusedrnn.LSTM, {"layer_norm": True}),
    "gru": (fusedrnn.GRU, {"backend": "torch_step", "save": "hidden"}),
    "gru, gates": (fusedrnn.GRU, {"backend": "torch_step", "save": "gates"}),
}
CELLED = [name for name in LAYERS if "gru" not in name and name != "layer norm"]
ZONED = [name for name in LAYERS if name != "layer norm"]


def make(name, **options):
    torch.manual_seed(0)
    cls, own = LAYERS[name]
    return (
        cls(I, H, chunk=4, **own, **options).double()
        if own.get("backend") == "reference"
        else cls(I, H, chunk=4, **own, **options)
    )


def clamped(tensor, bound):
    if bound is not None and tensor.requires_grad:
        tensor = tensor.clone()
        tensor.register_hook(lambda grad: grad.clamp(-bound, bound))
    return tensor


def loop(module, x, states, bound=None, held=None, resets=None):
    """All layers of one direction in float64, step by step: outputs, final states, and c of the last layer."""
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    finals, cells = [], []
    for layer in range(module.num_layers):
        own = {name.rsplit("_l", 1)[0]: weight for name, weight in weights.items() if name.endswith(f"_l{layer}")}
        state, outputs, cells = [s[layer] for s in states], [], []
        for t in range(len(x)):
            before = [clamped(s, bound) for s in state]
            if resets is not None:
                before = [s.masked_fill(resets[t][:, None], 0) for s in before]
            state = step(module, own, x[t], before)
            if held is not None:
                m = held[layer][t]
                state[0] = m * before[0] + (1 - m) * state[0]
            outputs.append(state[0])
            cells.append(state[-1])
        finals.append(state)
        x = torch.stack(outputs)
    return x, [torch.stack(s) for s in zip(*finals, strict=True)], torch.stack(cells), weights


def normed(raw, gain, bias=0):
    return torch.nn.functional.layer_norm(raw, raw.shape[-1:]) * gain + bias


def step(module, w, x, states):
    xproj, hproj = x @ w["weight_ih"].t(), states[0] @ w["weight_hh"].t()
    if isinstance(module, fusedrnn.GRU):
        (r, z, n), (hr, hz, hn) = (xproj + w["bias_ih"]).chunk(3, -1), (hproj + w["bias_hh"]).chunk(3, -1)
        z = (z + hz).sigmoid()
        return [(1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * states[0]]
    if "norm_ih" in w:
        xproj, hproj = normed(xproj, w["norm_ih"]), normed(hproj, w["norm_hh"])
    i, f, g, o = (xproj + hproj + w["bias_ih"] + w["bias_hh"]).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * (normed(c, w["norm_c"], w["norm_c_bias"]) if "norm_c" in w else c).tanh()
    return [h @ w["weight_hr"].t() if "weight_hr" in w else h, c]


def states_of(module):
    widths = [module.proj_size or H, H][: 1 if isinstance(module, fusedrnn.GRU) else 2]
    return [torch.randn(module.num_layers, B, width) for width in widths]


def differentiated(outputs, inputs, seed=3):
    generator = torch.Generator().manual_seed(seed)
    grads = [3 * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    return torch.autograd.grad(outputs, inputs, grads)


def compare(module, x, states, exact, cells=False, **call):
    """Compare a layer's results and gradients with those of `loop`."""
    dtype = module.weight_hh_l0.dtype
    x = x.to(dtype).requires_grad_()
    states = [s.to(dtype).requires_grad_() for s in states]
    hx = tuple(states) if len(states) > 1 else states[0]
    y, after, *more = module(x, hx, **({"return_cells": True} if cells else {}), **call)
    found = [y, *(after if isinstance(after, tuple) else (after,)), *more]
    parameters = dict(module.named_parameters())
    found_grads = differentiated(found, [x, *states, *parameters.values()])
    own_x = x.detach().double().requires_grad_()
    own_states = [s.detach().double().requires_grad_() for s in states]
    y, after, every, weights = exact(own_x, own_states)
    expected = [y, *after, *([every] if cells else [])]
    expected_grads = differentiated(expected, [own_x, *own_states, *weights.values()])
    names = ["y", "h", "c", "cells"], ["dx", "dh", "dc"][: 1 + len(states)] + [f"d{name}" for name in parameters]
    for kind, ours, theirs in zip(names, (found, found_grads), (expected, expected_grads), strict=True):
        for name, a, b in zip(kind, ours, theirs, strict=False):
            assert_close(a, b, name)


@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("name", LAYERS)
def test_clip(name, resets):
    bound = 0.05
    module = make(name, clip_recurrent_grad=bound)
    x, states = torch.randn(T, B, I), states_of(module)
    given = torch.rand(T, B) < 0.2 if resets else None
    compare(module, x, states, lambda x, s: loop(module, x, s, bound, resets=given), resets=given)
    plain = make(name)
    clipped, free = (differentiated([m(x.to(m.weight_hh_l0))[0]], [m.weight_hh_l0])[0] for m in (module, plain))
    assert not torch.allclose(clipped, free)


@pytest.mark.parametrize("name", CELLED)
def test_cells_as_an_output(name):
    module = make(name)
    x, states = torch.randn(T, B, I), states_of(module)
    compare(module, x, states, lambda x, s: loop(module, x, s), cells=True)
    cells = module(x.to(module.weight_hh_l0), return_cells=True)[2]
    assert cells.shape == (T, B, H)


@pytest.mark.parametrize("name", ZONED)
def test_zoneout_in_evaluation(name):
    module = make(name, zoneout=0.3).eval()
    x, states = torch.randn(T, B, I), states_of(module)
    held = torch.full((module.num_layers, T, 1, 1), 0.3, dtype=torch.float64)
    compare(module, x, states, lambda x, s: loop(module, x, s, held=held))


@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("name", [name for name in ZONED if name != "two layers"])
def test_zoneout_in_training(name, resets):
    module = make(name, zoneout=0.4)
    x, states = torch.randn(T, B, I), states_of(module)
    given = torch.rand(T, B) < 0.2 if resets else None
    dtype = module.weight_hh_l0.dtype
    hx = tuple(s.to(dtype) for s in states)
    torch.manual_seed(9)
    y, _ = module(x.to(dtype), hx if len(hx) > 1 else hx[0], given)
    before = (
        torch.cat((hx[0], y[:-1])) if given is None else torch.cat((hx[0], y[:-1])).masked_fill(given[..., None], 0)
    )
    held = (y == before).double()[None]
    assert 0.25 < float(held.mean()) < 0.55
    torch.manual_seed(9)
    compare(module, x, states, lambda x, s: loop(module, x, s, held=held, resets=given), resets=given)


def test_zoneout_depends_on_the_seed_alone():
    x = torch.randn(T, B, I)
    found = []
    by_reference = {"backend": "reference", "save": "auto"}
    for seed, changed in [(1, {}), (1, {"chunk": 3}), (1, {"save": "gates"}), (1, by_reference), (2, {})]:
        options = {"chunk": 4, "backend": "torch_step", "save": "hidden", **changed}
        torch.manual_seed(0)
        module = fusedrnn.LSTM(I, H, 2, zoneout=0.4, **options)
        torch.manual_seed(seed)
        found.append(module(x)[0])
    for other in found[1:4]:
        torch.testing.assert_close(other, found[0])
    assert not torch.allclose(found[4], found[0])


@pytest.mark.parametrize("options", [{"clip_recurrent_grad": 0.05}, {"zoneout": 0.3}, {"return_cells": True}])
@pytest.mark.parametrize("layout", ["packed", "batch_first", "unbatched"])
def test_layouts_and_directions_agree_with_the_reference(options, layout):
    cells = {name: value for name, value in options.items() if name == "return_cells"}
    options = {name: value for name, value in options.items() if name not in cells}
    x = torch.randn((T, I) if layout == "unbatched" else (B, T, I) if layout == "batch_first" else (T, B, I))
    found = []
    for backend in ("torch_step", "reference"):
        torch.manual_seed(0)
        module = fusedrnn.LSTM(
            I, H, 2, bidirectional=True, batch_first=layout == "batch_first", backend=backend, chunk=4, **options
        ).double()
        given = x.double().requires_grad_()
        data = pack_padded_sequence(given, [5, T, 7], enforce_sorted=False) if layout == "packed" else given
        torch.manual_seed(4)
        y, after, *more = module(data, **cells)
        outputs = [t.data if layout == "packed" else t for t in (y, *more)]
        found.append([*outputs, *differentiated([*outputs, *after], [given, *module.parameters()])])
    for k, (ours, exact) in enumerate(zip(*found, strict=True)):
        assert_close(ours, exact, str(k))


def saved_bytes(cells):
    sizes = []
    module = fusedrnn.LSTM(I, H, backend="torch_step", save="cells", chunk=T)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        module(torch.randn(T, B, I), return_cells=cells)
    return sum(sizes)


def test_cells_are_kept_once():
    # The slot's part goes, the output comes in its place; a slot's parts are aligned to 256 bytes.
    assert abs(saved_bytes(False) - saved_bytes(True)) <= 256


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_passes_a_reset(name, bad):
    module = make(name)
    dtype = module.weight_hh_l0.dtype
    x = torch.randn(T, B, I, dtype=dtype)
    x[2] = bad
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[5] = True
    given = x.clone().requires_grad_()
    y, _ = module(given, resets=resets)
    alone = x[5:].clone().requires_grad_()
    expected, _ = module(alone)
    torch.testing.assert_close(y[5:], expected)
    (dx,) = torch.autograd.grad(y[5:].sin().sum(), given)
    (exact,) = torch.autograd.grad(expected.sin().sum(), alone)
    torch.testing.assert_close(dx[5:], exact)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: fusedrnn.LSTM(I, H, clip_recurrent_grad=0),
            "`clip_recurrent_grad` must be .* above 0, got 0",
        ),
        (lambda: fusedrnn.GRU(I, H, clip_recurrent_grad="1"), "`clip_recurrent_grad` must be .* got '1'"),
        (lambda: fusedrnn.LSTM(I, H, zoneout=1.0), "`zoneout` must be a probability .* below 1, got 1.0"),
        (lambda: fusedrnn.GRU(I, H, zoneout=-0.1), "`zoneout` must be a probability"),
        (lambda: fusedrnn.GRU(I, H)(torch.ones(2, 1, I), return_cells=True), "`return_cells` must be False for a GRU"),
        (
            lambda: fusedrnn.LSTM(I, H)(torch.ones(2, 1, I), return_cells=True, output="host"),
            "`return_cells` must be False for a streamed sequence",
        ),
    ],
)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    ("options", "reason"), [({"clip_recurrent_grad": 1.0}, "does not clip"), ({"zoneout": 0.1}, "zoneout")]
)
def test_onednn_refuses(options, reason):
    module = fusedrnn.LSTM(I, H, backend="onednn", **options)
    with pytest.raises(RuntimeError, match=f"onednn: .*{reason}"):
        module(torch.ones(2, 1, I))


def test_the_functional_form_has_clip_and_cells():
    module = make("hidden", clip_recurrent_grad=0.05)
    x = torch.randn(T, B, I)
    weights = list(module.parameters())
    y, (h, c), cells = fusedrnn.lstm(
        x, None, *weights, return_cells=True, clip_recurrent_grad=0.05, backend="torch_step"
    )
    assert torch.equal(cells[-1], c) and torch.equal(y[-1], h)
    (found,) = differentiated([y], weights[1:2])
    torch.testing.assert_close(found, differentiated([module(x)[0]], weights[1:2])[0])


@pytest.mark.parametrize("options", [{"zoneout": 0.4}, {"clip_recurrent_grad": 0.05}])
def test_streamed(options):
    torch.manual_seed(0)
    module = fusedrnn.LSTM(I, H, backend="torch_step", save="hidden", chunk=T, **options)
    x = torch.randn(T, B, I)
    torch.manual_seed(5)
    (expected,) = differentiated([module(x)[0]], [module.weight_hh_l0])
    torch.manual_seed(5)
    (found,) = differentiated([module(x, output="host")[0]], [module.weight_hh_l0])
    assert torch.equal(found, expected)


def test_zoneout_under_checkpoint_draws_the_same():
    module = make("hidden", zoneout=0.4)
    x = torch.randn(T, B, I, requires_grad=True)
    found = []
    for run in (module, lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)):
        torch.manual_seed(6)
        found.append(differentiated([run(x)[0]], [x, *module.parameters()]))
    assert all(map(torch.equal, *found))
