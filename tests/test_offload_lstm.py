"""`fusedrnn.LSTM(offload=...)`: activations go to the host and come back, and no bit changes.

Occupancy is injected, so that the scheduler works on the CPU with threads that really copy.
"""

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import fusedrnn
from fusedrnn import OffloadConfig
from fusedrnn.offloading import OffloadHooks
from fusedrnn.offloading.device import ThreadDevice
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.testing import assert_close, full_device, offload_all, results, twin

KINDS = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "two layers, dropout": {"num_layers": 2, "dropout": 0.5},
    "projection": {"num_layers": 2, "proj_size": 16},
}
CPU = torch.device("cpu")


def pair(offload, **options):
    """The same layer without and with offloading."""
    options = {"backend": "torch_step", "chunk": 4, **options}
    torch.manual_seed(1)
    plain = fusedrnn.LSTM(16, 32, **options)
    offloading = fusedrnn.LSTM(16, 32, offload=offload, **options)
    offloading.load_state_dict(plain.state_dict())
    return plain, offloading


def counters(module):
    return module.offloader.scheduler(CPU).counters


def train(module, x):
    torch.manual_seed(2)
    return results(module, x)


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes(save, kind):
    plain, offloading = pair(offload_all(), save=save, **KINDS[kind])
    x = torch.randn(32, 8, 16)
    for _ in range(3):
        before = counters(offloading).spills if save != "hidden" or "layers" in kind else -1
        equal(train(offloading, x), train(plain, x))
        assert counters(offloading).spills > before
    assert counters(offloading).loads > 0 or save == "hidden"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_no_bit_changes_in_other_dtypes(dtype):
    plain, offloading = pair(offload_all(), save="gates", dtype=dtype)
    x = torch.randn(32, 8, 16, dtype=dtype)
    equal(train(offloading, x), train(plain, x))
    assert counters(offloading).spills > 0


@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_no_bit_changes_in_packed_sequences(save):
    plain, offloading = pair(offload_all(), save=save, num_layers=2, bidirectional=True)
    x = pack_padded_sequence(torch.randn(32, 8, 16), [32, 3, 17, 1, 32, 8, 9, 30], enforce_sorted=False)
    equal(train(offloading, x), train(plain, x))
    assert counters(offloading).spills > 0


@pytest.mark.parametrize("backend", ["onednn", "reference"])
def test_no_bit_changes_with_backends_that_let_torch_record(backend):
    save = "hidden" if backend == "onednn" else "gates"
    plain, offloading = pair(offload_all(), backend=backend, save=save, num_layers=2)
    x = torch.randn(64, 8, 16)
    equal(train(offloading, x), train(plain, x))
    assert counters(offloading).spills > 0


def test_the_ring_stays_within_its_bound_and_is_equal_in_repeated_runs():
    _, offloading = pair(OffloadHooks(full_device(ring_slots=4)), save="gates")
    x = torch.randn(256, 8, 16)
    peaks = []
    for _ in range(3):
        train(offloading, x)
        scheduler = offloading.offloader.scheduler(CPU)
        scheduler.synchronize()
        peaks.append(scheduler.ring.held)
        assert not scheduler.entries()
    slot = 4 * 8 * (4 * 32 + 32) * 4 + 2 * 8 * 32 * 4
    assert peaks[0] <= 4 * slot and len(set(peaks)) == 1


def test_a_graph_that_is_kept_and_a_second_backward_pass():
    plain, offloading = pair(offload_all(), save="gates")
    x = torch.randn(32, 8, 16, requires_grad=True)
    for module in (plain, offloading):
        y = module(x)[0]
        module.found = [
            torch.autograd.grad(y.square().sum(), [x, *module.parameters()], retain_graph=keep)
            for keep in (True, True, False)
        ]
    for found, expected in zip(offloading.found, plain.found, strict=True):
        assert all(map(torch.equal, found, expected))
    y = offloading(x)[0]
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    assert not offloading.offloader.scheduler(CPU).entries()


def test_a_dropped_graph_and_an_exception_leave_nothing_and_the_next_step_is_exact():
    plain, offloading = pair(offload_all(), save="gates", num_layers=2)
    x = torch.randn(32, 8, 16)
    expected = train(plain, x)
    scheduler = offloading.offloader.scheduler(CPU)
    gc.disable()
    try:
        offloading(x.requires_grad_())
        assert not scheduler.entries()
        y = offloading(x)[0]
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        seen = weakref.ref(y)
        del y
        assert seen() is None
        assert not scheduler.entries()
    finally:
        gc.enable()
    equal(train(offloading, x.detach()), expected)


def test_within_the_context_chunks_go_to_the_same_offloader():
    plain, _ = pair(False, save="gates", num_layers=2)
    x = torch.randn(32, 8, 16)
    expected = train(plain, x)
    off = fusedrnn.offload(full_device())
    with off:
        found = train(plain, x)
    equal(found, expected)
    # Eight chunks of two layers, beside what autograd saves.
    assert off.scheduler(CPU).counters.pushes >= 8
    assert off.scheduler(CPU).counters.spills > 0


def test_under_checkpoint_its_hooks_stay_in_force():
    plain, offloading = pair(offload_all(), save="gates")
    x = torch.randn(32, 8, 16, requires_grad=True)
    expected = torch.autograd.grad(plain(x)[0].square().sum(), x)[0]
    y = checkpoint(lambda x: offloading(x)[0], x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)


def test_derivatives_of_second_order():
    plain, offloading = pair(offload_all(), save="gates")
    x = torch.randn(8, 8, 16, requires_grad=True)

    def penalty(module):
        (dx,) = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *module.parameters()])

    for found, expected in zip(penalty(offloading), penalty(plain), strict=True):
        assert_close(found, expected.double(), "second derivative")


def test_functional_form():
    plain, _ = pair(False, save="gates")
    x = torch.randn(32, 8, 16, requires_grad=True)
    off = fusedrnn.offload(full_device())
    weights = [weight.detach().requires_grad_() for weight in plain.parameters()]
    found = [
        torch.autograd.grad(
            fusedrnn.lstm(x, None, *weights, backend="torch_step", save="gates", chunk=4, offload=offload)[0].sum(),
            [x, *weights],
        )
        for offload in (False, off)
    ]
    assert all(map(torch.equal, *found))
    assert off.scheduler(CPU).counters.spills > 0


def test_on_a_device_without_pressure_nothing_moves():
    _, offloading = pair(OffloadHooks(full_device(occupancy=lambda: 0.1)), save="gates")
    train(offloading, torch.randn(32, 8, 16))
    assert counters(offloading).spills == 0 and counters(offloading).pushes > 0


def test_on_the_cpu_it_is_inactive_and_says_so_once():
    plain, offloading = pair(OffloadHooks(OffloadConfig()), save="gates")
    x = torch.randn(8, 8, 16)
    with pytest.warns(RuntimeWarning, match=r"offloading is inactive on cpu: .* inject `occupancy`"):
        found = train(offloading, x)
    equal(found, train(plain, x))
    train(offloading, x)


def test_names_and_errors():
    config = full_device()
    assert fusedrnn.LSTM(2, 3, swap_memory=config).offloader is fusedrnn.LSTM(2, 3, offload=config).offloader
    assert fusedrnn.LSTM(2, 3).offloader is None
    assert "offload" not in repr(fusedrnn.LSTM(2, 3)) and "offload=" in repr(fusedrnn.LSTM(2, 3, offload=config))
    assert (
        repr(fusedrnn.LSTM(2, 3, offload=OffloadConfig(ring_slots=8)))
        == "LSTM(2, 3, offload=OffloadConfig(ring_slots=8))"
    )
    with pytest.raises(ValueError, match="`offload` and `swap_memory` are two names of one argument, got both"):
        fusedrnn.LSTM(2, 3, offload=True, swap_memory=True)
    with pytest.raises(TypeError, match=r"`offload` must be True, False, an OffloadConfig or what .* got int"):
        fusedrnn.LSTM(2, 3, offload=1)
    with pytest.raises(TypeError, match=r"`swap_memory` must be True, False, an OffloadConfig or what .* got str"):
        fusedrnn.LSTM(2, 3, swap_memory="yes")


def test_copies_offload_for_themselves():
    offloading = fusedrnn.LSTM(16, 32, offload=offload_all(), save="gates", backend="torch_step", chunk=4)
    other = copy.deepcopy(offloading)
    assert other.offloader is not offloading.offloader
    x = torch.randn(32, 8, 16)
    equal(train(other, x), train(offloading, x))
    assert counters(other).spills > 0
    loaded = pickle.loads(pickle.dumps(fusedrnn.LSTM(2, 3, offload=True)))
    assert loaded.offloader.config == OffloadConfig()


def test_explain_tells_what_offloading_did():
    _, offloading = pair(offload_all(), save="gates")
    train(offloading, torch.randn(32, 8, 16))
    assert "torch_step" in offloading.explain() and "may go to the host" in offloading.explain()


# Dynamo looks at .grad of what enters the graph after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_with_a_break_in_the_graph():
    plain, offloading = pair(offload_all(), save="gates")
    x = torch.randn(32, 8, 16, requires_grad=True)
    expected = torch.autograd.grad(plain(x)[0].square().sum(), x)[0]

    def run(x):
        return offloading(x)[0].square().sum()

    with torch._dynamo.config.patch(allow_rnn=True):
        found = torch.autograd.grad(torch.compile(run, backend="aot_eager")(x), x)[0]
        torch._dynamo.reset()
        with pytest.raises(Exception, match="an offloading layer moves its buffers itself"):
            torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, expected)
    assert counters(offloading).spills > 0


# torch's own rules for forward-mode differentiation are loaded through torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_keep_what_they_save():
    """What a transform saves stands for other tensors and has no memory that could be copied."""
    plain, offloading = pair(offload_all(), backend="auto")
    x = torch.randn(32, 8, 16)
    for _ in range(3):
        found, expected = (
            torch.func.jvp(lambda x, m=m: m(x)[0], (x,), (torch.ones_like(x),)) for m in (offloading, plain)
        )
        assert all(map(torch.equal, found, expected))
        with offload_all():
            inside = torch.func.jvp(lambda x: torch.tanh(plain(x)[0] * x.sum()), (x,), (torch.ones_like(x),))
        assert inside[1].isfinite().all()
    grads = torch.func.vmap(torch.func.grad(lambda x: offloading(x)[0].sum()), 1)(x)
    assert grads.shape == (8, 32, 16)


def test_twin_of_an_offloading_layer_is_plain():
    assert type(twin(fusedrnn.LSTM(2, 3, offload=True))) is torch.nn.LSTM


@pytest.mark.parametrize("seed", range(4))
def test_no_bit_changes_however_late_the_copies_are(seed):
    plain, offloading = pair(offload_all(), save="gates", num_layers=2)
    delays = random.Random(seed)
    device = ThreadDevice(lambda: delays.choice((0.0, 0.0, 0.002, 0.01)))
    offloading.offloader._schedulers[CPU] = Scheduler(device, offloading.offloader.config)
    x = torch.randn(32, 8, 16)
    for _ in range(2):
        equal(train(offloading, x), train(plain, x))
    assert counters(offloading).loads > 0
