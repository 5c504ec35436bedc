"""Under autocast a layer computes in autocast's dtype; parameters and their gradients keep theirs."""

import pytest
import torch

import fusedrnn
from fusedrnn.testing import assert_close, assert_no_worse_than_torch, results, twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["auto", "hidden"])
@pytest.mark.parametrize("with_state", [True, False])
def test_autocast(dtype, save, with_state):
    module = fusedrnn.LSTM(8, 16, num_layers=2, save=save)
    x = torch.randn(12, 3, 8)
    hx = (torch.randn(2, 3, 16), torch.randn(2, 3, 16)) if with_state else None
    exact = results(twin(module), x, hx)
    theirs = results(twin(module, dtype), x, hx)
    with torch.autocast("cpu", dtype=dtype):
        found = results(module, x, hx)
    assert {found[name].dtype for name in "yhc"} == {dtype}
    for name in exact:
        if name not in "yhc":
            assert found[name].dtype == torch.float32, name
        factor = 3.0 if name.startswith("d") else 2.0
        floor = torch.finfo(dtype).eps * float(exact[name].abs().max())
        assert_no_worse_than_torch(found[name], theirs[name], exact[name], name, factor, floor)


def test_backward_inside_autocast_is_the_same():
    module = fusedrnn.LSTM(8, 16, save="hidden")
    x = torch.randn(12, 3, 8)
    grads = []
    for inside in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(x)[0].float().pow(2).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append([weight.grad.clone() for weight in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_float64_is_left_alone():
    module = fusedrnn.LSTM(3, 4, dtype=torch.float64, save="hidden")
    x = torch.randn(5, 2, 3)
    plain = results(module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(module, x)
    for name in plain:
        assert_close(found[name], plain[name], name)


def test_functional_form_under_autocast():
    module = fusedrnn.LSTM(3, 4)
    weights = [weight.detach() for weight in module.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, (h, c) = fusedrnn.lstm(torch.randn(5, 2, 3).bfloat16(), (torch.zeros(2, 4), torch.zeros(2, 4)), *weights)
    assert y.dtype == h.dtype == c.dtype == torch.bfloat16
