"""The kernels that run a whole chunk in one launch, on a concurrent grid, against float64."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from fusedrnn.kernels import lstm_sequence_backward, lstm_sequence_forward
from fusedrnn.kernels._sequence import Config, Rows
from fusedrnn.testing import poisoned

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Sizes, rows of each step as they lie in memory, and how they are walked."""

    H: int
    batches: tuple[int, ...]
    config: Config
    packed: bool = False
    backwards: bool = False

    @property
    def B(self):
        return max(self.batches)

    @property
    def steps(self):
        """First row and number of rows of each step, in processing order."""
        pairs = list(zip(accumulate(self.batches, initial=0), self.batches, strict=False))
        return pairs[::-1] if self.backwards else pairs

    def rows(self, device):
        offsets, batches = zip(*self.steps, strict=True)
        if not self.packed:
            return Rows(len(offsets), offsets[0], -self.B if self.backwards else self.B)
        return Rows(
            len(offsets),
            offsets=torch.tensor(offsets, device=device),
            batches=torch.tensor(batches, dtype=torch.int32, device=device),
        )


# The interpreter takes tiles smaller than the machine's matrix instructions do.
SMALL = Config(block_b=4, block_h=16, block_k=16, num_warps=4)
CASES = {
    # Two batch blocks and two hidden blocks, rows and columns masked, two blocks of k.
    "dense": Case(20, (5, 5, 5), SMALL),
    "dense, backwards": Case(20, (5, 5, 5), SMALL, backwards=True),
    "packed": Case(20, (5, 3, 1), SMALL, packed=True),
    "packed, backwards": Case(20, (5, 3, 1), SMALL, packed=True, backwards=True),
    "weights first": Case(20, (5, 5, 5), replace(SMALL, ahead=1, swap=True)),
    "one of everything": Case(1, (1,), replace(SMALL, block_b=16)),
    "three by three": Case(40, (9, 9), replace(SMALL, ahead=2, swap=True)),
    "a batch block runs out of rows": Case(20, (9, 4, 4, 1), replace(SMALL, block_k=32), packed=True),
    "a batch block gets its rows late": Case(17, (6, 4, 2), replace(SMALL, ahead=1), packed=True, backwards=True),
    "seventeen hidden blocks": Case(260, (2, 2), replace(SMALL, block_k=128, ahead=1, swap=True)),
    "exact blocks": Case(32, (8, 8), replace(SMALL, block_k=32, swap=True)),
}
EVERY = [pytest.param(case, torch.float32, id=name) for name, case in CASES.items()]
# Not bfloat16: the interpreter would multiply its bit patterns.
HALF = [
    pytest.param(CASES[name], torch.float16, id=f"{name}, float16")
    for name in ("dense", "packed, backwards", "weights first")
]
WITHOUT_DY = [pytest.param(case.values[0], torch.float32, False, id=f"{case.id}, no dy") for case in EVERY[:4]]


def strided(tensor):
    """The same numbers with rows further apart, and NaN in between."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 16), NAN, dtype=tensor.dtype, device=tensor.device)
    wide[..., 16:] = tensor
    return wide[..., 16:]


def gap(tensor):
    """What lies between the rows of a strided tensor."""
    return tensor.as_strided((len(tensor), 16), (tensor.stride(0), 1), tensor.storage_offset() - 16)


def exact(case, xproj, weight, h, c):
    """The equations in float64, differentiable: gates, y, c by row, and the final states."""
    gates, y, cells = {}, {}, {}
    for offset, n in case.steps:
        pre = xproj[offset : offset + n] + h[:n] @ weight.t()
        i, f, g, o = pre.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = torch.cat((f * c[:n] + i * g, c[n:]))
        h = torch.cat((o * c[:n].tanh(), h[n:]))
        gates[offset], y[offset], cells[offset] = torch.cat((i, f, g, o), -1), h[:n], c[:n]
    return *(torch.cat([parts[at] for at in sorted(parts)]) for parts in (gates, y, cells)), h, c


def data(case, dtype, device):
    rows, B, H = sum(case.batches), case.B, case.H
    xproj = torch.randn(rows, 4 * H).to(device, dtype)
    weight = (2 * H**-0.5 * torch.randn(4 * H, H)).to(device, dtype)
    return xproj, weight, torch.randn(B, H).to(device, dtype), torch.randn(B, H, device=device)


def near(actual, expected, dtype, name):
    error = (actual.double().cpu() - expected).abs().max()
    assert error <= 20 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max())), f"{name}: {error}"


@pytest.mark.parametrize(("case", "dtype"), EVERY + HALF)
def test_forward(device, at_once, case, dtype):
    xproj, weight, h0, c0 = data(case, dtype, device)
    expected = exact(case, *(t.double().cpu() for t in (xproj, weight, h0, c0)))
    xproj, c0 = strided(xproj), strided(c0)
    y = strided(torch.full((len(xproj), case.H), NAN, dtype=dtype, device=device))
    c = strided(torch.full((len(xproj), case.H), NAN, device=device))
    with poisoned():
        hT, cT = lstm_sequence_forward.lstm_sequence_forward(
            xproj, weight, h0, c0, y, c, case.rows(device), case.config, store_gates=True
        )
    for name, actual, value in zip(("gates", "y", "c", "hT", "cT"), (xproj, y, c, hT, cT), expected, strict=True):
        near(actual, value, dtype, name)
    assert all(gap(t).isnan().all() for t in (xproj, y, c, c0))


@pytest.mark.parametrize("name", ["dense", "packed, backwards"])
def test_forward_without_saving(device, at_once, name):
    case = CASES[name]
    xproj, weight, h0, c0 = data(case, torch.float32, device)
    _, exact_y, _, exact_h, exact_c = exact(case, *(t.double().cpu() for t in (xproj, weight, h0, c0)))
    before, y = xproj.clone(), torch.full((len(xproj), case.H), NAN, device=device)
    with poisoned():
        hT, cT = lstm_sequence_forward.lstm_sequence_forward(
            xproj, weight, h0, c0, y, None, case.rows(device), case.config, store_gates=False
        )
    near(y, exact_y, torch.float32, "y")
    near(hT, exact_h, torch.float32, "hT")
    near(cT, exact_c, torch.float32, "cT")
    assert torch.equal(xproj, before)


@pytest.mark.parametrize(
    ("case", "dtype", "with_dy"), [pytest.param(*p.values, True, id=p.id) for p in EVERY + HALF] + WITHOUT_DY
)
def test_backward(device, at_once, case, dtype, with_dy):
    xproj, weight, h0, c0 = data(case, dtype, device)
    leaves = [t.double().cpu().requires_grad_() for t in (xproj, weight, h0, c0)]
    gates, y, cells, hT, cT = exact(case, *leaves)
    dy = strided(torch.randn(len(xproj), case.H).to(device, dtype)) if with_dy else None
    dh = strided(torch.randn(case.B, case.H).to(device, dtype))
    dc = strided(torch.randn(case.B, case.H, device=device))
    outputs, grads = [hT, cT], [dh.double().cpu(), dc.double().cpu()]
    if dy is not None:
        outputs, grads = [y, *outputs], [dy.double().cpu(), *grads]
    expected = torch.autograd.grad(outputs, leaves, grads)
    gates = strided(gates.detach().to(device, dtype))
    cells = strided(cells.detach().float().to(device))
    with poisoned():
        lstm_sequence_backward.lstm_sequence_backward(
            gates, weight, strided(c0), cells, dy, dh, dc, case.rows(device), case.config
        )
    # In half precision the gates themselves were rounded before the pass.
    near(gates, expected[0], dtype, "dgates")
    near(dh, expected[2], dtype, "dh0")
    near(dc, expected[3], dtype, "dc0")
    assert all(gap(t).isnan().all() for t in (gates, dh, dc))
