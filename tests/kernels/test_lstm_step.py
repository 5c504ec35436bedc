"""The elementwise kernels against float64, with NaN in everything that they must write."""

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 1), (3, 5), (2, 128), (5, 130), (17, 33)]


def close(actual, exact, dtype):
    eps = torch.finfo(dtype).eps
    error = (actual.double().cpu() - exact).abs()
    assert torch.isfinite(actual).all()
    assert (error <= 2 * eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * (1 + exact.abs())).all(), error.max()


def strided(tensor):
    """The same numbers with rows further apart."""
    wide = torch.full(
        (*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype, device=tensor.device
    )
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def poison(*shape, dtype=torch.float32, device):
    return strided(torch.full(shape, float("nan"), dtype=dtype, device=device))


def activated(pre):
    i, f, g, o = pre.double().cpu().chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "H"), SIZES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("store", [True, False])
def test_forward(device, dtype, n, H, scale, store):
    from fusedrnn.kernels.lstm_step import lstm_step_forward

    pre = strided((scale * torch.randn(n, 4 * H, device=device)).to(dtype))
    c_prev = strided(torch.randn(n, H, device=device))
    h, c = poison(n, H, dtype=dtype, device=device), poison(n, H, device=device)
    i, f, g, o = activated(pre)
    exact_c = f * c_prev.double().cpu() + i * g
    before = pre.clone()
    lstm_step_forward(pre, c_prev, h, c, store_gates=store)
    close(c, exact_c, torch.float32)
    close(h, o * torch.tanh(exact_c), dtype)
    if store:
        close(pre, torch.cat((i, f, g, o), -1), dtype)
    else:
        assert torch.equal(pre, before)


def test_forward_over_its_own_state(device):
    from fusedrnn.kernels.lstm_step import lstm_step_forward

    pre, c = torch.randn(3, 20, device=device), torch.randn(3, 5, device=device)
    i, f, g, _ = activated(pre)
    exact = f * c.double().cpu() + i * g
    lstm_step_forward(pre, c, torch.empty(3, 5, device=device), c)
    close(c, exact, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "H"), SIZES)
@pytest.mark.parametrize("given", ["both", "dy", "dh", "neither"])
@pytest.mark.parametrize("in_place", [True, False])
def test_backward(device, dtype, n, H, given, in_place):
    from fusedrnn.kernels.lstm_step import lstm_step_backward

    pre = torch.randn(n, 4 * H, dtype=torch.float64)
    gates = strided(torch.cat(activated(pre), -1).to(dtype).to(device))
    i, f, g, o = gates.double().cpu().chunk(4, -1)
    c_prev = strided(torch.randn(n, H, device=device))
    c = strided((f * c_prev.double().cpu() + i * g).float().to(device))
    dc = strided(torch.randn(n, H, device=device))
    dy = (
        torch.randn(n, H, device=device).to(dtype).t().contiguous().t()
        if H == 1
        else torch.randn(n, H).to(device, dtype)
    )
    dh = torch.randn(n, H).to(device, dtype)
    dy, dh = dy if given in ("both", "dy") else None, dh if given in ("both", "dh") else None
    total = sum((t.double().cpu() for t in (dy, dh) if t is not None), torch.zeros(n, H, dtype=torch.float64))
    tanh_c = torch.tanh(c.double().cpu())
    exact_dc = dc.double().cpu() + total * o * (1 - tanh_c**2)
    exact = torch.cat(
        (
            exact_dc * g * i * (1 - i),
            exact_dc * c_prev.double().cpu() * f * (1 - f),
            exact_dc * i * (1 - g**2),
            total * tanh_c * o * (1 - o),
        ),
        -1,
    )
    dgates = gates if in_place else poison(n, 4 * H, dtype=dtype, device=device)
    lstm_step_backward(gates, c_prev, c, dy, dh, dc, dgates)
    close(dgates, exact, dtype)
    close(dc, exact_dc * f, torch.float32)


ROWS = {
    "dense": ([0, 3, 6, 9], [3, 3, 3, 3]),
    "dense, backwards": ([9, 6, 3, 0], [3, 3, 3, 3]),
    "packed": ([0, 3, 6, 8], [3, 3, 2, 1]),
    "packed, backwards": ([8, 6, 3, 0], [1, 2, 3, 3]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("H", [1, 5, 130])
def test_recompute(device, dtype, kind, H):
    from fusedrnn.kernels.lstm_recompute import lstm_recompute

    offsets, batches = ROWS[kind]
    rows = sum(batches)
    pre = strided(torch.randn(rows, 4 * H).to(device, dtype))
    c0, c = strided(torch.randn(3, H, device=device)), poison(rows, H, device=device)
    gates = torch.cat(activated(pre), -1)
    state, exact = c0.double().cpu().clone(), torch.empty(rows, H, dtype=torch.float64)
    i, f, g, _ = gates.chunk(4, -1)
    for offset, n in zip(offsets, batches, strict=True):
        here = slice(offset, offset + n)
        state[:n] = exact[here] = f[here] * state[:n] + i[here] * g[here]
    if kind.startswith("dense"):
        lstm_recompute(pre, c0, c, len(offsets), offsets[0], offsets[1] - offsets[0])
    else:
        places = {
            "offsets": torch.tensor(offsets, device=device),
            "batches": torch.tensor(batches, dtype=torch.int32, device=device),
        }
        lstm_recompute(pre, c0, c, len(offsets), **places)
    close(pre, gates, dtype)
    assert ((c.double().cpu() - exact).abs() <= 1e-5 * (1 + exact.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "H"), [(1, 1), (7, 5), (40, 33)])
def test_activate(device, dtype, rows, H):
    from fusedrnn.kernels.lstm_recompute import lstm_activate

    pre = strided((10 * torch.randn(rows, 4 * H)).to(device, dtype))
    exact = torch.cat(activated(pre), -1)
    lstm_activate(pre)
    close(pre, exact, dtype)


def test_nan_stays_in_its_row(device):
    from fusedrnn.kernels.lstm_step import lstm_step_forward

    pre = torch.randn(4, 20, device=device)
    pre[1, 7] = float("nan")
    h, c = torch.empty(4, 5, device=device), torch.empty(4, 5, device=device)
    lstm_step_forward(pre, torch.zeros(4, 5, device=device), h, c)
    assert torch.isnan(h[1, 2]) and torch.isfinite(h[[0, 2, 3]]).all() and torch.isfinite(c[1, [0, 1, 3, 4]]).all()
