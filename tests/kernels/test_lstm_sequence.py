"""The kernels that run a whole chunk in one launch, on a concurrent grid, against float64."""

import pytest
import torch

from fusedrnn.kernels import lstm_sequence_backward, lstm_sequence_forward
from fusedrnn.kernels._sequence import Config, Rows

pytestmark = pytest.mark.usefixtures("at_once")
NAN = float("nan")
ROWS = {
    "dense": ([0, 5, 10], [5, 5, 5]),
    "dense, backwards": ([10, 5, 0], [5, 5, 5]),
    "packed": ([0, 5, 8], [5, 3, 1]),
    "packed, backwards": ([8, 5, 0], [1, 3, 5]),
}
# Two batch blocks and two hidden blocks of 16, columns and rows masked, two blocks of k.
B, H, CONFIG = 5, 20, Config(block_b=4, block_h=16, block_k=16, num_warps=4)
"""The interpreter takes tiles smaller than the machine's matrix instructions do."""


def layout(kind, device):
    offsets, batches = ROWS[kind]
    if kind.startswith("dense"):
        return Rows(len(offsets), offsets[0], offsets[1] - offsets[0])
    return Rows(
        len(offsets),
        offsets=torch.tensor(offsets, device=device),
        batches=torch.tensor(batches, dtype=torch.int32, device=device),
    )


def forward(kind, xproj, weight, h, c):
    """The equations in float64: gates, y, c by row, and the final states."""
    offsets, batches = ROWS[kind]
    xproj, weight, h, c = (t.double().cpu() for t in (xproj, weight, h, c))
    h, c = h.clone(), c.clone()
    gates, y, cells = torch.empty_like(xproj), torch.empty(len(xproj), H).double(), torch.empty(len(xproj), H).double()
    for offset, n in zip(offsets, batches, strict=True):
        here = slice(offset, offset + n)
        pre = xproj[here] + h[:n] @ weight.t()
        i, f, g, o = pre.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c[:n] = f * c[:n] + i * g
        h[:n] = o * c[:n].tanh()
        gates[here], y[here], cells[here] = torch.cat((i, f, g, o), -1), h[:n], c[:n]
    return gates, y, cells, h, c


def data(kind, dtype, device):
    rows = sum(ROWS[kind][1])
    xproj = torch.randn(rows, 4 * H).to(device, dtype)
    weight = (0.5 * torch.randn(4 * H, H)).to(device, dtype)
    return xproj, weight, torch.randn(B, H).to(device, dtype), torch.randn(B, H, device=device)


def tolerance(dtype):
    return 20 * torch.finfo(dtype).eps


def near(actual, exact, dtype, name):
    error = (actual.double().cpu() - exact).abs().max()
    assert error <= tolerance(dtype) * max(1.0, float(exact.abs().max())), f"{name}: {error}"


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_forward(device, kind, dtype):
    xproj, weight, h0, c0 = data(kind, dtype, device)
    exact = forward(kind, xproj, weight, h0, c0)
    wide = torch.full((len(xproj), 2 * H), NAN, dtype=dtype, device=device)
    y, c = wide[:, H:], torch.full((len(xproj), H), NAN, device=device)
    hT, cT = lstm_sequence_forward.lstm_sequence_forward(
        xproj, weight, h0, c0, y, c, layout(kind, device), CONFIG, store_gates=True
    )
    for name, actual, expected in zip(("gates", "y", "c", "hT", "cT"), (xproj, y, c, hT, cT), exact, strict=True):
        near(actual, expected, dtype, name)
    assert wide[:, :H].isnan().all()


def test_forward_without_saving(device):
    xproj, weight, h0, c0 = data("dense", torch.float32, device)
    _, exact_y, _, exact_h, exact_c = forward("dense", xproj, weight, h0, c0)
    before, y = xproj.clone(), torch.full((len(xproj), H), NAN, device=device)
    hT, cT = lstm_sequence_forward.lstm_sequence_forward(
        xproj, weight, h0, c0, y, None, layout("dense", device), CONFIG, store_gates=False
    )
    near(y, exact_y, torch.float32, "y")
    near(hT, exact_h, torch.float32, "hT")
    near(cT, exact_c, torch.float32, "cT")
    assert torch.equal(xproj, before)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("with_dy", [True, False])
def test_backward(device, kind, dtype, with_dy):
    if not with_dy and dtype == torch.float16:
        pytest.skip("the same path in another dtype")
    xproj, weight, h0, c0 = data(kind, dtype, device)
    leaves = [t.double().cpu().requires_grad_() for t in (xproj, weight, h0, c0)]
    gates, y, cells, hT, cT = differentiable(kind, *leaves)
    dy = torch.randn(len(xproj), H).to(device, dtype) if with_dy else None
    dh, dc = torch.randn(B, H).to(device, dtype), torch.randn(B, H, device=device)
    outputs, grads = [hT, cT], [dh.double().cpu(), dc.double().cpu()]
    if dy is not None:
        outputs, grads = [y, *outputs], [dy.double().cpu(), *grads]
    exact = torch.autograd.grad(outputs, leaves, grads)
    saved = gates.detach().to(device, dtype)
    lstm_sequence_backward.lstm_sequence_backward(
        saved, weight, c0, cells.detach().float().to(device), dy, dh, dc, layout(kind, device), CONFIG
    )
    # The gates themselves were rounded before the pass.
    slack = torch.float32 if dtype == torch.float32 else torch.float16
    near(saved, exact[0], slack, "dgates")
    near(dh, exact[2], slack, "dh0")
    near(dc, exact[3], slack, "dc0")


def differentiable(kind, xproj, weight, h, c):
    offsets, batches = ROWS[kind]
    gates, y, cells = ([None] * len(offsets) for _ in range(3))
    for k, (offset, n) in enumerate(zip(offsets, batches, strict=True)):
        pre = xproj[offset : offset + n] + h[:n] @ weight.t()
        i, f, g, o = pre.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = torch.cat((f * c[:n] + i * g, c[n:]))
        h = torch.cat((o * c[:n].tanh(), h[n:]))
        gates[k], y[k], cells[k] = torch.cat((i, f, g, o), -1), h[:n], c[:n]
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    return *(torch.cat([parts[k] for k in order]) for parts in (gates, y, cells)), h, c
