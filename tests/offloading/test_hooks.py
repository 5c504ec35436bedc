"""`offload()` around modules that know nothing of it."""

import gc
import json
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedrnn.offloading import OffloadConfig, offload
from fusedrnn.offloading.entry import State

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:offloading has no pinned host memory left")


def full(**options):
    return offload(OffloadConfig(**{"occupancy": lambda: 1.0, "chunk_bytes": 4096, **options}))


def counters(off):
    return off.scheduler(CPU).counters


def held(off):
    """Everything that offloading has in use: entries, ring, host."""
    scheduler = off.scheduler(CPU)
    entries = scheduler.entries()
    scheduler.audit()
    return len(entries), scheduler.ring.held - scheduler.ring.free, scheduler.host.used


class Net(nn.Module):
    def __init__(self, depth=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)))
        return x


@pytest.fixture
def net():
    return Net()


def gradients(net, x, off=None):
    net.zero_grad()
    if off is None:
        loss = net(x).square().sum()
    else:
        with off:
            loss = net(x).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, True),
        ({"ring_slots": 2, "prefetch": 0}, True),
        ({"chunk_bytes": 1 << 17}, False),
        ({"host_limit": 0}, False),
    ],
)
def test_gradients_are_those_without_bit_by_bit(net, options, moves):
    x = torch.randn(64, 32)
    want = gradients(net, x)
    off = full(**options)
    for _ in range(3):
        assert all(map(torch.equal, gradients(net, x, off), want))
        assert held(off) == (0, 0, 0)
    assert (counters(off).spills > 0) == moves


def test_nothing_moves_while_there_is_room(net):
    off = full(occupancy=lambda: 0.7)
    gradients(net, torch.randn(64, 32), off)
    assert counters(off).pushes > 0 and counters(off).spills == 0


@pytest.mark.parametrize(("numel", "moves"), [(2047, False), (2048, False), (2049, True)])
def test_more_than_min_bytes_is_strictly_more(numel, moves):
    x = torch.randn(numel, requires_grad=True)
    off = full(min_bytes=2048 * x.itemsize, chunk_bytes=8)
    with off:
        y = (x * 2).sin().sum()
    assert counters(off).pushes == moves
    assert counters(off).occupancy_asked == moves
    y.backward()


def test_small_tensors_are_gathered_into_large_copies(net):
    x = torch.randn(8, 32)
    want = gradients(net, x)
    # A tensor of 1 KiB in chunks of 32.
    off = full(min_bytes=64, chunk_bytes=1 << 15, ring_slots=2)
    deep = Net(200)
    deep(x).sum().backward()
    for _ in range(2):
        assert all(map(torch.equal, gradients(net, x, off), want))
    want = gradients(deep, x)
    assert all(map(torch.equal, gradients(deep, x, off), want))
    found = counters(off)
    assert found.gathered > 10 * found.gatherings > 0 and found.spills > 0
    assert held(off) == (0, 0, 0)


def test_layouts_of_one_storage_are_kept_apart():
    off = full(min_bytes=16, chunk_bytes=64)
    base = torch.randn(16, 16, requires_grad=True)
    w = torch.randn(16, 16)

    def loss():
        x = base.exp()
        views = (x, x.t(), x[2:9], x[:, 3], x[1::2, ::3], x.diagonal(), x[4, 5], x.permute(1, 0)[3:], x[:0])
        return (
            sum((view.sin() * view.cos()).sum() for view in views) + (x.t() @ w @ x).sum() + x[:1].expand(4, 16).sum()
        )

    loss().backward()
    want, base.grad = base.grad, None
    with off:
        out = loss()
    assert counters(off).shared > 5
    out.backward()
    assert torch.equal(base.grad, want)
    assert held(off) == (0, 0, 0)


def test_unpacked_tensors_have_their_layout(net):
    off = full(min_bytes=16, chunk_bytes=64)
    x = torch.randn(30, 20, dtype=torch.float64, requires_grad=True)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[3:7, 1::4], lambda t: t.as_strided((5, 3), (2, 7), 11)):
        with off:
            y = view(x * 1).sin()
        saved = y.grad_fn._saved_self
        want = view(x * 1)
        assert (saved.shape, saved.stride(), saved.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(saved, want) and torch.equal(y.grad_fn._saved_self, want)


def test_parameters_their_views_and_copies_stay(net):
    off = full(min_bytes=0, chunk_bytes=1)
    with off, torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.randn(4, 32, requires_grad=True))
    skipped = counters(off).skipped
    assert skipped["parameter"] > 0 and skipped["copy of a parameter"] > 0
    storages = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert not storages & {e.slot.buffer.data_ptr() for e in off.scheduler(CPU).entries() if e.slot is not None}


def test_what_cannot_be_offloaded_stays():
    off = full(min_bytes=0, chunk_bytes=1)
    x = torch.randn(8, 8, requires_grad=True)
    index = torch.arange(8)
    with off:
        kept = (x[index].exp(), x.exp().expand(3, 8, 8).sin(), torch.sparse.mm(torch.eye(8).to_sparse(), x))
        sum(part.sum() for part in kept).backward()
    assert {"expanded", "sparse"} <= set(counters(off).skipped)


@pytest.mark.parametrize("chunk_bytes", [1024, 2048])
def test_a_tensor_that_recurs_at_every_step_is_not_copied(chunk_bytes):
    # 128 bytes are large in chunks of 1024, and small in chunks of 2048.
    off = full(min_bytes=64, chunk_bytes=chunk_bytes, ring_slots=2)
    invariant = (torch.randn(32, requires_grad=True) * 1).detach()
    x = torch.randn(32, requires_grad=True)
    h = x
    with off:
        for _ in range(100):
            h = torch.tanh(h * invariant)
    storage = off._packers[CPU]._find(invariant)
    assert storage.saves == 101
    del invariant
    with off:
        for _ in range(100):
            h = torch.tanh(h * 2)
    found = counters(off)
    assert found.spills > 0 and (found.gathered > 0) == (chunk_bytes == 2048)
    assert storage.handle is None or storage.handle.entry.state is State.KEPT
    del storage
    h.sum().backward()
    assert held(off) == (0, 0, 0)


def test_a_change_in_place_is_an_error_as_in_autograd():
    for size in (4, 4096):
        for fill in (0, 20):
            off = full(min_bytes=8, chunk_bytes=4096)
            x = torch.randn(size, requires_grad=True)
            y = x * 1
            with off:
                z = y.sin().sum()
                # Pushed over the edge, or not.
                others = [(torch.randn(4096, requires_grad=True) * 1).cos() for _ in range(fill)]
            y.add_(1)
            with pytest.raises(RuntimeError, match=rf"a tensor of shape \({size},\) saved .* changed by an in-place"):
                z.backward()
            assert counters(off).changed_in_place == 1 if size > 8 else True
            del others


def test_backward_outside_the_context_and_in_another_thread(net):
    x = torch.randn(64, 32)
    want = gradients(net, x)
    off = full()
    net.zero_grad()
    with off:
        loss = net(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert all(map(torch.equal, (p.grad for p in net.parameters()), want))


def test_kept_graph_second_backward_and_second_derivative():
    off = full(min_bytes=16, chunk_bytes=64)
    x = torch.randn(40, requires_grad=True)
    with off:
        y = x.exp().sin().square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], first)
    with off:
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        curvature = torch.autograd.grad(slope.sum(), x)[0]
    plain = x.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(plain.exp().sin().square().sum(), plain, create_graph=True)
    assert torch.equal(first, want.detach())
    assert torch.equal(curvature, torch.autograd.grad(want.sum(), plain)[0])
    del y, slope
    assert held(off) == (0, 0, 0)


def test_a_dropped_graph_frees_all_without_the_collector(net):
    off = full()
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            with off:
                x = torch.randn(64, 32, requires_grad=True) * 1
                y = net(x)
            refs = [weakref.ref(x), weakref.ref(y)]
            del x, y
            assert [ref() for ref in refs] == [None, None]
            assert held(off) == (0, 0, 0)
    finally:
        gc.enable()


def test_collection_in_another_thread(net):
    off = full()
    x = torch.randn(64, 32)
    want = gradients(net, x)

    class Ring:
        pass

    for _ in range(10):
        with off:
            ring = Ring()
            ring.self, ring.y = ring, net(x)
        del ring
        collector = threading.Thread(target=gc.collect)
        collector.start()
        assert all(map(torch.equal, gradients(net, x, off), want))
        collector.join()
    assert held(off) == (0, 0, 0)


def test_an_exception_in_backward_at_any_node_leaves_nothing(net):
    off = full()
    x = torch.randn(64, 32)
    want = gradients(net, x)

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    for at in range(0, 12, 3):
        with off:
            h = x
            for index, layer in enumerate(net.layers):
                h = net.norm(torch.tanh(layer(h)))
                if index == at:
                    h = Raises.apply(h)
        with pytest.raises(ValueError, match="on purpose"):
            h.sum().backward()
        del h
        gc.collect()
        assert held(off) == (0, 0, 0)
        assert all(map(torch.equal, gradients(net, x, off), want))


def test_an_exception_in_forward_leaves_nothing(net):
    off = full()

    def fail(*_):
        raise ValueError("on purpose")

    net.layers[9].register_forward_hook(fail)
    with off, pytest.raises(ValueError, match="on purpose"):
        net(torch.randn(64, 32))
    gc.collect()
    assert held(off) == (0, 0, 0)


@pytest.mark.parametrize("outside", [True, False])
def test_with_checkpoint(net, outside):
    x = torch.randn(64, 32, requires_grad=True)
    want = gradients(net, x)
    off = full()
    calls = []
    net.layers[3].register_forward_hook(lambda *_: calls.append(1))

    def region(t):
        if outside:
            return net(t)
        with off:
            return net(t)

    net.zero_grad()
    with off if outside else torch.enable_grad():
        loss = checkpoint(region, x, use_reentrant=False).square().sum()
    loss.backward()
    assert len(calls) == 2
    assert all(map(torch.equal, (p.grad for p in net.parameters()), want))


def test_outer_hooks_stay_in_force(net):
    packed = []
    off = full()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        with off, full() as inner:
            net(torch.randn(64, 32))
    assert packed and not off._packers and not inner._packers


def test_paused_region_stays(net):
    off = full()
    with off:
        with off.paused():
            loss = net(torch.randn(64, 32)).sum()
    assert not off._packers
    loss.backward()


def test_under_inference_mode_first(net):
    off = full()
    with torch.inference_mode(), off:
        net(torch.randn(64, 32))
    x = torch.randn(64, 32)
    assert all(map(torch.equal, gradients(net, x, off), gradients(net, x)))


def test_two_offloaders_share_nothing(net):
    x = torch.randn(64, 32)
    one, other = full(), full()
    gradients(net, x, one)
    assert counters(one).pushes > 0 and not other._packers
    gradients(net, x, other)
    assert one.scheduler(CPU) is not other.scheduler(CPU)


def test_stats_explain_and_trace(tmp_path):
    off = full(trace=True)
    net, x = Net(), torch.randn(64, 32, requires_grad=True)
    with off:
        net(x).sum().backward()
    found = off.stats()
    assert found.pushes > 0 and found.spills > 0 and found.loads > 0 and found.host_peak > 0
    assert found.pushes == found.released + found.dropped
    text = off.explain()
    assert f"{found.spills} did" in text and "KiB" in text and "offloading on cpu" in text
    off.export_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(rows.values()) == {"compute", "to the host", "from the host"}
    boxes = [event for event in events if event["ph"] == "X"]
    counts = Counter(event["cat"] for event in boxes)
    assert counts["spill"] == found.spills and counts["fetch"] == found.loads
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["args"]["bytes"] > 0 for event in boxes)
    for event in boxes:
        assert (rows[event["tid"]] == "to the host") == (event["cat"] == "spill")


def test_a_trace_needs_its_option():
    with pytest.raises(RuntimeError, match=r"`export_trace` needs times .* set `OffloadConfig\(trace=True\)`"):
        full().export_trace("unused.json")
    assert "nothing was saved" in full().explain()
