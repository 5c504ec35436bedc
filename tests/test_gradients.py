"""What autograd may ask of the layer beyond one plain backward pass, and what is kept for it."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedrnn
from fusedrnn.backends.torch_step import TorchStep
from fusedrnn.testing import assert_close, results, twin

MODES = [
    ("torch_step", "gates", torch.float64),
    ("torch_step", "cells", torch.float64),
    ("torch_step", "hidden", torch.float64),
    ("onednn", "gates", torch.float32),
    ("onednn", "hidden", torch.float32),
]


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(map(str, mode[:2])))
def make(request):
    backend, save, dtype = request.param
    return lambda *args, **kwargs: fusedrnn.LSTM(*args, dtype=dtype, backend=backend, save=save, chunk=4, **kwargs)


def gradients(module, x, loss):
    """Gradients of x and the weights that need one, by name."""
    x = x.detach().to(next(module.parameters()).dtype).requires_grad_()
    module.zero_grad()
    loss(*module(x)).backward()
    return {"dx": x.grad} | {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}


LOSSES = {
    "sum": lambda y, s: y.sum(),
    "transposed": lambda y, s: (y.transpose(0, 1) * torch.arange(9, dtype=y.dtype)[:, None]).sum(),
    "one step": lambda y, s: y[-1].pow(2).sum(),
    "h only": lambda y, s: s[0].pow(2).sum(),
    "c only": lambda y, s: s[1].sum(),
    "everything": lambda y, s: y.pow(2).sum() + s[0].sum() + 2 * s[1].sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layers", [1, 2])
def test_any_loss(make, loss, layers):
    module, x = make(3, 5, num_layers=layers), torch.randn(9, 2, 3)
    exact = gradients(twin(module), x, LOSSES[loss])
    for name, gradient in gradients(module, x, LOSSES[loss]).items():
        assert_close(gradient, exact[name], name)


@pytest.mark.parametrize(
    "frozen", [("weight_ih_l0",), ("weight_hh",), ("bias",), ("weight", "bias"), ("_l0",), ("_l1",)]
)
def test_frozen_weights_get_no_gradient_and_the_rest_stay_exact(make, frozen):
    module = make(3, 5, num_layers=2)
    for name, weight in module.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    other = twin(module)
    for name, weight in other.named_parameters():
        weight.requires_grad_(module.get_parameter(name).requires_grad)
    x = torch.randn(9, 2, 3)
    exact = gradients(other, x, LOSSES["everything"])
    found = gradients(module, x, LOSSES["everything"])
    assert found.keys() == exact.keys()
    for name, gradient in found.items():
        assert_close(gradient, exact[name], name)
    assert all(weight.grad is None for weight in module.parameters() if not weight.requires_grad)


def test_only_the_initial_state_needs_a_gradient(make):
    module = make(3, 5).requires_grad_(False)
    dtype = module.weight_ih_l0.dtype
    x = torch.randn(9, 2, 3, dtype=dtype)
    found, exact = [], []
    for m, into in ((module, found), (twin(module).requires_grad_(False), exact)):
        h0, c0 = (torch.full((1, 2, 5), v, dtype=m.weight_ih_l0.dtype, requires_grad=True) for v in (0.1, 0.2))
        m(x.to(h0.dtype), (h0, c0))[0].pow(2).sum().backward()
        into += [h0.grad, c0.grad]
    for a, b in zip(found, exact, strict=True):
        assert_close(a, b, "state")


def test_a_kept_graph_gives_the_same_gradients_twice_and_a_dropped_one_says_so(make):
    module = make(3, 5, num_layers=2)
    x = torch.randn(9, 2, 3, dtype=module.weight_ih_l0.dtype, requires_grad=True)
    loss = module(x)[0].pow(2).sum()
    inputs = [x, *module.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_are_the_same_bit_by_bit_in_every_run(make):
    module, x = make(3, 5, num_layers=2), torch.randn(9, 2, 3)
    first, second = results(module, x), results(module, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
def test_gradcheck_and_second_derivatives(save):
    module = fusedrnn.LSTM(2, 3, num_layers=2, dtype=torch.float64, backend="torch_step", save=save, chunk=2)
    x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    # The state depends on the input as well, which must not be counted twice.
    weight = module.weight_hh_l0

    def f(x, h0, weight):
        y, (h, c) = torch.func.functional_call(module, {"weight_hh_l0": weight}, (x, (h0 * x.mean(), h0.sin())))
        return y, h, c

    assert torch.autograd.gradcheck(f, (x, h0, weight))
    assert torch.autograd.gradgradcheck(f, (x, h0, weight))


def test_gradient_penalty_equals_torch(make):
    module = make(3, 4, num_layers=2)
    found = {}
    for name, m in (("ours", module), ("exact", twin(module))):
        x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1)).to(m.weight_ih_l0.dtype).requires_grad_()
        (dx,) = torch.autograd.grad(m(x)[0].sum(), x, create_graph=True)
        (dx.flatten(1).norm(dim=1) - 1).pow(2).mean().backward()
        found[name] = [weight.grad for weight in m.parameters() if weight.grad is not None]
    for ours, exact in zip(found["ours"], found["exact"], strict=True):
        assert_close(ours, exact, "second derivative")


def test_second_derivative_without_the_input_says_what_to_do():
    module = fusedrnn.LSTM(2, 3, backend="torch_step", save="gates").requires_grad_(False)
    x = torch.randn(4, 2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match='use save="hidden"'):
        torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)


def test_function_transforms_and_forward_mode_go_through_the_reference():
    module = fusedrnn.LSTM(3, 4, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    x = torch.randn(5, 4, 3, dtype=torch.float64)

    def loss(weights, sample):
        return torch.func.functional_call(module, weights, (sample[:, None],))[0].pow(2).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(weights, x)
    for n in range(4):
        alone = results(twin(module), x[:, n : n + 1])["y"]
        assert alone.shape == (5, 1, 4)
        expected = torch.autograd.grad(twin_loss(module, x[:, n : n + 1]), list(module.parameters()))
        for gradient, name in zip(expected, weights, strict=True):
            assert_close(each[name][n], gradient, name)
    direction = torch.randn_like(x)
    _, tangent = torch.func.jvp(lambda x: module(x)[0], (x,), (direction,))
    step = 1e-6
    finite = (module(x + step * direction)[0] - module(x - step * direction)[0]) / (2 * step)
    assert (tangent - finite).abs().max() < 1e-7
    assert "reference" not in module.explain()


def twin_loss(module, x):
    return module(x)[0].pow(2).sum()


def test_named_backend_refuses_transforms():
    module = fusedrnn.LSTM(3, 4, backend="torch_step")
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        torch.func.jvp(lambda x: module(x)[0], (torch.randn(5, 2, 3),), (torch.randn(5, 2, 3),))


def saved_bytes(run):
    """Bytes that autograd keeps of `run`, each storage once."""
    storages = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: storages.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        out = run()
    return sum(t.untyped_storage().nbytes() for t in storages.values()), out


def test_each_mode_keeps_what_it_says_and_no_more():
    T, B, I, H = 64, 2, 3, 32
    x = torch.randn(T, B, I)
    kept = {}
    for save in ("gates", "cells", "hidden"):
        module = fusedrnn.LSTM(I, H, backend="torch_step", save=save, chunk=16)
        outer = sum(w.untyped_storage().nbytes() for w in module.parameters()) + x.nbytes
        kept[save] = saved_bytes(lambda module=module: module(x))[0] - outer
    output, borders = T * B * H * 4, 5 * 2 * B * H * 4
    assert kept["hidden"] <= output + borders
    assert kept["cells"] <= 2 * output + borders
    assert 5 * output <= kept["gates"] <= 6 * output + borders


def test_what_backward_does_not_need_is_not_kept():
    module = fusedrnn.LSTM(3, 32, backend="torch_step", save="gates", chunk=16)
    x = torch.randn(64, 2, 3, requires_grad=True)
    everything = saved_bytes(lambda: module(x))[0]
    module.requires_grad_(False)
    without_weights = saved_bytes(lambda: module(x))[0]
    assert without_weights <= everything - 64 * 2 * 32 * 4 - x.nbytes
    assert saved_bytes(lambda: module(x.detach()))[0] == 0
    with torch.no_grad():
        assert saved_bytes(lambda: module(x))[0] == 0


def test_everything_is_freed_at_once(make):
    module = make(3, 4, num_layers=2)
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            x = torch.randn(20, 2, 3, dtype=module.weight_ih_l0.dtype, requires_grad=True) * 1.0
            y, (h, c) = module(x)
            seen = [weakref.ref(tensor) for tensor in (x, y, h, c)]
            if backward:
                (y.sum() + c.sum()).backward()
            del x, y, h, c
            assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()


def test_saved_tensor_hooks_and_checkpointing_see_what_is_kept(make):
    module, x = make(3, 5, num_layers=2), torch.randn(9, 2, 3)
    plain = results(module, x)
    with torch.autograd.graph.save_on_cpu():
        hooked = results(module, x)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)
    for reentrant in (False, True):
        module.zero_grad()
        data = x.to(module.weight_ih_l0.dtype).requires_grad_()
        inside, y = saved_bytes(lambda data=data, r=reentrant: checkpoint(module, data, use_reentrant=r)[0])
        assert inside <= data.nbytes
        y.sum().backward()
        exact = gradients(twin(module), x, LOSSES["sum"])
        for name, weight in module.named_parameters():
            assert_close(weight.grad, exact[name], name)


def test_changing_a_saved_output_in_place_raises():
    module = fusedrnn.LSTM(3, 4, backend="torch_step", save="hidden")
    y = module(torch.randn(5, 2, 3))[0]
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("where", ["recurrence_forward", "recurrence_backward", "recompute"])
def test_after_an_exception_the_next_step_is_exact(monkeypatch, where):
    module = fusedrnn.LSTM(3, 4, num_layers=2, dtype=torch.float64, backend="torch_step", save="hidden", chunk=2)
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    expected = results(module, x)
    for k in range(3):
        calls = iter(range(100))
        method = getattr(TorchStep, where)

        def failing(self, *args, k=k, calls=calls, method=method, **kwargs):
            if next(calls) == k:
                raise KeyboardInterrupt
            return method(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(TorchStep, where, failing)
            with pytest.raises(KeyboardInterrupt):
                results(module, x)
        found = results(module, x)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_truncated_backpropagation_stops_at_the_detach(make):
    module = make(3, 4)
    x = torch.randn(12, 2, 3, dtype=module.weight_ih_l0.dtype, requires_grad=True)
    y, state = module(x[:6])
    y2, _ = module(x[6:], tuple(s.detach() for s in state))
    (dx,) = torch.autograd.grad(y2.sum(), x, retain_graph=True, allow_unused=True)
    assert dx[:6].eq(0).all() and dx[6:].ne(0).any()
    whole = gradients(twin(module), x, LOSSES["sum"])
    y2, _ = module(x[6:], state)
    (y.sum() + y2.sum()).backward()
    assert_close(x.grad, whole["dx"], "dx in two connected pieces")
