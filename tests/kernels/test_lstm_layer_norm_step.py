"""The layer-normalised LSTM's step kernels, interpreted, against float64; and the backend on them."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.kernels.lstm_layer_norm_step import lstm_layer_norm_step_backward, lstm_layer_norm_step_forward, pick
from fusedrnn.testing import TOLERANCES, assert_no_worse_than_torch, offload_all, poisoned, results, twin

NAN = float("nan")
SIZES = [(1, 1), (3, 5), (17, 33), (2, 129)]
EPS = 1e-5


def equations(pre, hproj, c_prev, gain_hh, gain_c, bias_c):
    """Return the gates, c, a and h."""
    H = c_prev.shape[1]
    i, f, g, o = (pre + F.layer_norm(hproj, (4 * H,), gain_hh, eps=EPS)).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c_prev + i * g
    a = F.layer_norm(c, (H,), gain_c, bias_c, EPS)
    return torch.cat((i, f, g, o), -1), c, a, o * a.tanh()


def near(actual, exact, dtype, name):
    """Within rounding; a normalisation magnifies it by what it divides through, which for these rows is about 1."""
    error = (actual.double().cpu() - exact).abs().max()
    assert error <= 16 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max())), f"{name}: {error}"


def apart(rows, width, dtype=torch.float32, device=None):
    """Rows that are further apart than they are wide, full of NaN."""
    return torch.full((rows, 2 * width), NAN, dtype=dtype, device=device)[:, width:]


def gains(H, **where):
    return [1 + 0.3 * torch.randn(4 * H, **where), 1 + 0.3 * torch.randn(H, **where), 0.3 * torch.randn(H, **where)]


@pytest.mark.parametrize(("n", "H"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_forward(device, n, H, dtype, scale):
    hproj = (scale * (torch.randn(n, 4 * H) + 1)).to(device, dtype)
    pre, c_prev = scale * torch.randn(n, 4 * H, device=device), torch.randn(n, 2 * H, device=device)[:, :H]
    norms = gains(H, device=device)
    _, c_exact, _, h_exact = equations(*(t.double().cpu() for t in (pre, hproj, c_prev, *norms)))
    h, c = apart(n, H, dtype, device), apart(n, H, device=device)
    lstm_layer_norm_step_forward(pre, hproj, c_prev, *norms, h, c, EPS)
    near(c, c_exact, torch.float32, "c")
    near(h, h_exact, dtype, "h")


def test_forward_of_rows_that_do_not_vary(device):
    """The variance is 0, as it is where an initial state of zeros was multiplied."""
    pre, hproj, c_prev = torch.randn(3, 20, device=device), torch.full((3, 20), 7.0, device=device), torch.zeros(3, 5)
    norms = gains(5, device=device)
    _, c_exact, _, h_exact = equations(*(t.double().cpu() for t in (pre, hproj, c_prev, *norms)))
    h, c = apart(3, 5, device=device), c_prev.to(device)
    lstm_layer_norm_step_forward(pre, hproj, c, *norms, h, c, EPS)
    near(c, c_exact, torch.float32, "c, written over c_prev")
    near(h, h_exact, torch.float32, "h")


@pytest.mark.parametrize(("n", "H"), SIZES)
@pytest.mark.parametrize("with_dy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward(device, n, H, with_dy, dtype):
    leaves = [torch.randn(n, k * H, dtype=torch.float64, requires_grad=True) for k in (4, 4, 1)]
    norms = gains(H, dtype=torch.float64)
    gates, c, a, h = equations(*leaves, *norms)
    dh, dy, dc = torch.randn(n, H).to(dtype), torch.randn(n, H).to(dtype), torch.randn(n, H)
    total = (dh.double() + dy if with_dy else dh).double()
    loss = (h * total).sum() + (c * dc).sum()
    dpre, dhproj, dc_prev, da = torch.autograd.grad(loss, [*leaves, a])

    def statistics(rows):
        rows = rows.detach()
        var, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
        return [t.float().to(device) for t in (rows, mean, (var + EPS).rsqrt())]

    found = {"dpre": gates.detach().float().to(device), "dc_prev": dc.to(device)}
    found |= {"da": apart(n, H, device=device), "dhproj": apart(n, 4 * H, dtype, device)}
    lstm_layer_norm_step_backward(
        found["dpre"],
        *statistics(leaves[1]),
        *statistics(c),
        leaves[2].detach().float().to(device),
        *(norm.float().to(device) for norm in norms),
        dy.to(device) if with_dy else None,
        dh.to(device),
        found["dc_prev"],
        found["da"],
        found["dhproj"],
    )
    near(found["dpre"], dpre, torch.float32, "dpre")
    near(found["dc_prev"], dc_prev, torch.float32, "dc_prev")
    near(found["da"], da, torch.float32, "da")
    near(found["dhproj"], dhproj, dtype, "dhproj")


@pytest.mark.parametrize("H", [1, 5, 32, 100, 512, 1500, 4096])
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_blocks_hold_whole_rows(H, rows):
    config = pick(rows, H)
    blocks, across = config.grid(rows, H)
    assert across == 1 and config.block_h >= H and blocks * config.block_b >= rows
    assert config.block_b * config.block_h <= 256 or config.block_b == 1
    assert config.block_b * config.block_h <= 8 * 32 * config.num_warps


def as_near(ours, theirs, exact, name, factor):
    """As near to float64 as the same equations in torch's operators, or within the absolute tolerance of the table.

    Normalisations magnify roundings, how much differs from row to row.
    """
    floor = None
    if ours.dtype in TOLERANCES:
        floor = TOLERANCES[ours.dtype][1] / factor * max(1.0, float(exact.abs().max()))
    assert_no_worse_than_torch(ours, theirs, exact, name, factor, floor)


def as_near_as_a_loop(module, x):
    device = next(module.parameters()).device
    with poisoned():
        ours = results(module, x)
    dtype = next(module.parameters()).dtype
    theirs, exact = (results(twin(module, wanted).to(device), x) for wanted in (dtype, torch.float64))
    for name in exact:
        as_near(ours[name], theirs[name], exact[name], name, 3.0 if name.startswith("d") else 2.0)


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_layer(device, save, options):
    options = {"backend": "triton_step", "save": save, "chunk": 4, "device": device, **options}
    as_near_as_a_loop(fusedrnn.LSTM(8, 17, layer_norm=True, **options), torch.randn(6, 4, 8, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(device, dtype):
    options = {"backend": "triton_step", "save": "hidden", "chunk": 4, "device": device, "dtype": dtype}
    as_near_as_a_loop(fusedrnn.LSTM(8, 16, layer_norm=True, **options), torch.randn(8, 4, 8).to(device, dtype))


@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_packed_sequences(device, save):
    options = {"backend": "triton_step", "save": save, "chunk": 2, "device": device}
    x = pack_padded_sequence(torch.randn(5, 4, 8, device=device), [2, 5, 1, 5], enforce_sorted=False)
    as_near_as_a_loop(fusedrnn.LSTM(8, 17, bidirectional=True, layer_norm=True, **options), x)


@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_resets(device, save):
    module = fusedrnn.LSTM(8, 17, layer_norm=True, backend="triton_step", save=save, chunk=4, device=device)
    resets = torch.zeros(6, 3, dtype=torch.bool, device=device)
    resets[2, 0] = resets[4, 1] = resets[0, 2] = True
    x = torch.randn(6, 3, 8, device=device)
    found = []
    for m in (module, twin(module, torch.float32).to(device), twin(module).to(device)):
        data = x.to(next(m.parameters()).dtype).requires_grad_()
        y, (_, c) = m(data, resets=resets)
        grads = torch.autograd.grad(y.pow(2).sum() + c.sum(), [data, *m.parameters()])
        found.append([y.detach(), c.detach(), *grads])
    for k, (ours, theirs, exact) in enumerate(zip(*found, strict=True)):
        as_near(ours, theirs, exact, f"result {k}", 2.0 if k < 2 else 3.0)


def test_offloading_changes_no_bit(device):
    found = []
    for offload in (False, offload_all()):
        torch.manual_seed(0)
        options = {"backend": "triton_step", "save": "gates", "chunk": 1, "device": device, "offload": offload}
        module = fusedrnn.LSTM(16, 16, 2, layer_norm=True, **options)
        found.append(results(module, torch.randn(5, 2, 16, device=device)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
