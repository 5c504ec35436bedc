"""The GRU's step kernels, interpreted, against float64; and the backend on them."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.kernels.gru_step import gru_step_backward, gru_step_forward
from fusedrnn.testing import assert_close, assert_no_worse_than_torch, offload_all, poisoned, results, twin

NAN = float("nan")
SIZES = [(1, 1), (3, 5), (17, 33), (5, 129)]


def equations(pre, hproj, h_prev):
    x_r, x_z, x_n = pre.chunk(3, -1)
    h_r, h_z, h_n = hproj.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return torch.cat((r, z, n), -1), n + z * (h_prev - n)


def tolerance(dtype):
    return 8 * torch.finfo(dtype).eps


def near(actual, exact, dtype, name):
    error = (actual.double().cpu() - exact).abs().max()
    assert error <= tolerance(dtype) * max(1.0, float(exact.abs().max())), f"{name}: {error}"


@pytest.mark.parametrize(("n", "H"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_forward(device, n, H, dtype, scale):
    pre, hproj = (scale * torch.randn(n, 3 * H)).to(device, dtype), torch.randn(n, 3 * H).to(device, dtype)
    h_prev = torch.randn(n, 2 * H).to(device, dtype)[:, :H]
    gates, h_exact = equations(*(t.double().cpu() for t in (pre, hproj, h_prev)))
    h, hn = (torch.full((n, 2 * H), NAN, dtype=dtype, device=device)[:, H:] for _ in range(2))
    gru_step_forward(pre, hproj, h_prev, h, hn)
    near(h, h_exact, dtype, "h")
    near(pre, gates, dtype, "gates")
    assert torch.equal(hn, hproj[:, 2 * H :])


def test_forward_without_saving_and_gates_alone(device):
    pre, hproj, h_prev = (torch.randn(3, k * 5, device=device) for k in (3, 3, 1))
    gates, h_exact = equations(*(t.double().cpu() for t in (pre, hproj, h_prev)))
    before, h = pre.clone(), torch.full((3, 5), NAN, device=device)
    gru_step_forward(pre, hproj, h_prev, h, None)
    near(h, h_exact, torch.float32, "h")
    assert torch.equal(pre, before)
    hn = torch.full((3, 5), NAN, device=device)
    gru_step_forward(pre, hproj, None, None, hn)
    near(pre, gates, torch.float32, "gates")
    assert torch.equal(hn, hproj[:, 10:])


@pytest.mark.parametrize(("n", "H"), SIZES)
@pytest.mark.parametrize("with_dy", [True, False])
def test_backward(device, n, H, with_dy):
    leaves = [torch.randn(n, k * H, dtype=torch.float64, requires_grad=True) for k in (3, 3, 1)]
    gates, h = equations(*leaves)
    dh, dy = torch.randn(n, H), torch.randn(n, H)
    dpre, dhproj, dh_prev = torch.autograd.grad(h, leaves, (dh + dy if with_dy else dh).double())
    saved = gates.detach().float().to(device)
    hn = leaves[1].detach()[:, 2 * H :].float().to(device).contiguous()
    dh = dh.to(device)
    gru_step_backward(saved, hn, leaves[2].detach().float().to(device), dy.to(device) if with_dy else None, dh)
    near(saved, dpre, torch.float32, "dpre")
    near(hn, dhproj[:, 2 * H :], torch.float32, "dhn")
    near(dh, dh_prev, torch.float32, "dh_prev")


@pytest.mark.parametrize("save", ["gates", "hidden"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_layer(device, save, options):
    module = fusedrnn.GRU(3, 5, backend="triton_step", save=save, chunk=4, device=device, **options)
    x = torch.randn(6, 2, 3, device=device)
    with poisoned():
        ours = results(module, x)
    exact = results(twin(module).to(device), x)
    for name in exact:
        assert_close(ours[name], exact[name], name)


def test_packed_sequences(device):
    module = fusedrnn.GRU(3, 4, bidirectional=True, backend="triton_step", save="hidden", chunk=2, device=device)
    x = pack_padded_sequence(torch.randn(5, 4, 3, device=device), [2, 5, 1, 5], enforce_sorted=False)
    ours, exact = results(module, x), results(twin(module).to(device), x)
    for name in exact:
        assert_close(ours[name], exact[name], name)


def test_half_precision_is_as_near_to_float64_as_torch_is(device):
    module = fusedrnn.GRU(8, 16, backend="triton_step", save="hidden", chunk=4, dtype=torch.bfloat16, device=device)
    x = torch.randn(8, 4, 8).to(device, torch.bfloat16)
    ours, theirs, exact = (results(m.to(device), x) for m in (module, twin(module, torch.bfloat16), twin(module)))
    for name in exact:
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, 3.0 if name.startswith("d") else 2.0)


def test_offloading_changes_no_bit(device):
    found = []
    for offload in (False, offload_all()):
        torch.manual_seed(0)
        module = fusedrnn.GRU(16, 16, 2, backend="triton_step", save="gates", chunk=1, device=device, offload=offload)
        found.append(results(module, torch.randn(5, 2, 16, device=device)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
