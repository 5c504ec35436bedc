"""Which saved tensors move, when, and what is said where they do not."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn.dynamic import dynamic_rnn
from fusedrnn.offloading import OffloadConfig, offload, offloader
from fusedrnn.offloading.saved import Storage
from fusedrnn.testing import full_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
def test_tensors_of_any_dtype_move(dtype):
    off = offload(full_device(min_bytes=16))

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *tensors):
            ctx.save_for_backward(*tensors)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert all(map(torch.equal, ctx.saved_tensors, want))
            return grad, *[None] * len(want)

    x = torch.ones(3, requires_grad=True)
    want = [(torch.arange(3000) % 7 + number).to(dtype) for number in range(8)]
    with off:
        y = Saves.apply(x, *[tensor.clone() for tensor in want])
    assert off.stats().spills >= 6
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_conjugated_and_negated_views_stay_as_they_are():
    off = offload(full_device(min_bytes=16))
    x = torch.randn(4096, dtype=torch.complex64, requires_grad=True)
    (x.conj() * x.conj().imag).abs().sum().backward()
    want, x.grad = x.grad, None
    with off:
        y = (x.conj() * x.conj().imag).abs().sum()
    assert off.stats().skipped["negated or conjugated view"] > 0
    y.backward()
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("kind", [nn.LSTM, fusedrnn.LSTM])
def test_the_workspace_of_a_layer_moves(kind):
    layer, x = kind(16, 64), torch.randn(100, 16, 16)
    with offload(OffloadConfig(occupancy=lambda: 1.0, chunk_bytes=1 << 16)) as off:
        y = layer(x)[0].sum()
    workspace = 7 * 64 * 4 * 1600
    assert off.stats().spilled_bytes > workspace
    y.backward()


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_compiled_as_one_graph_moves(inside, capfd):
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    off, x = offload(full_device()), torch.randn(64, 32)
    blocks(x).sum().backward()
    want = [parameter.grad.clone() for parameter in blocks.parameters()]
    blocks.zero_grad()

    def run(x):
        with off:
            return blocks(x)

    compiled = torch.compile(run if inside else blocks, backend="aot_eager")
    with off if not inside else torch.enable_grad():
        y = compiled(x)
    assert inside or off.stats().spills > 0
    y.sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(blocks.parameters(), want, strict=True))
    del y
    gc.collect()
    assert "Exception ignored" not in capfd.readouterr().err


def test_what_is_held_is_said_once():
    off, held = offload(full_device()), []
    for number in range(2):
        x = torch.randn(64, 32, requires_grad=True)
        with pytest.warns(RuntimeWarning, match="moved nothing .* still refers to") if not number else off.paused():
            with off:
                for _ in range(12):
                    held.append(x := torch.tanh(x))
    assert "times a tensor was passed over" in off.explain() and "compile blocks one by one" in off.explain()


def test_a_cell_whose_outputs_are_all_that_is_saved():
    def cell(x, h):
        h = torch.tanh(x + h)
        return h, h

    off, x = offload(full_device()), torch.randn(40, 8, 32, requires_grad=True)
    y, _ = dynamic_rnn(cell, x, torch.zeros(8, 32), swap_memory=off)
    assert off.stats().spills > 0 or "compile blocks one by one" in off.explain()
    y.sum().backward()


def test_subclasses_are_counted():
    class Mine(torch.Tensor):
        pass

    x = torch.randn(64, 64).as_subclass(Mine).requires_grad_()
    with offload(full_device()) as off:
        x.sin().sum().backward()
    assert off.stats().skipped["of the class Mine"] > 0
    assert "not looked at: " in off.explain()


def test_small_tensors_on_the_cpu_start_nothing():
    scale = torch.tensor(2.0)
    with offload() as off:
        (torch.randn(4, requires_grad=True) * scale).sum().backward()
    assert not off._schedulers


def test_tensors_on_the_cpu_stay_beside_another_device():
    off = offload(full_device())
    off._schedulers[torch.device("cuda", 0)] = off.scheduler(CPU)
    del off._schedulers[CPU]
    with off:
        torch.randn(64, 64, requires_grad=True).exp().sum().backward()
    assert off.stats().skipped == {"on the CPU beside another device": 1} and CPU not in off._schedulers


def test_a_thread_enters_the_hooks_itself():
    off, found = offload(full_device()), []

    def work(context):
        with context:
            y = torch.randn(64, 64, requires_grad=True)
            for _ in range(8):
                y = y.exp()
        found.append(off.stats().spills)
        y.sum().backward()

    with off:
        assert "a thread that starts within" in off.explain()
        for context in (torch.enable_grad(), off.hooks()):
            thread = threading.Thread(target=work, args=(context,))
            thread.start()
            thread.join()
    assert found[0] == 0 < found[1]


def test_no_decisions_are_shown_where_none_are_asked_for():
    off = offload(full_device())
    with off:
        y = nn.Sequential(*[nn.Tanh() for _ in range(9)])(torch.randn(64, 64, requires_grad=True))
    del y
    assert len(off.explain(1).splitlines()) == len(off.explain(0).splitlines()) + 1


def test_an_occupancy_without_a_hash():
    class Full:
        __hash__ = None

        def __eq__(self, other):
            return self is other

        def __call__(self):
            return 1.0

    one, other = (OffloadConfig(occupancy=Full()) for _ in range(2))
    assert offloader("offload", one) is offloader("offload", one) is not offloader("offload", other)


def interrupted(line, action):
    """Run `action`, and interrupt it at a line that it runs of hooks.py and saved.py; return whether it got there."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.endswith(("offloading/hooks.py", "offloading/saved.py")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_leaves_no_hooks_behind():
    off = offload(full_device())
    line = 1
    while interrupted(line, off.__enter__):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        line += 1
    off.__exit__(None, None, None)
    assert line > 5
    lines = line
    # The first two lines come before Python knows of the `try`.
    line = 3
    while True:
        off.__enter__()
        if not interrupted(line, lambda: off.__exit__(None, None, None)):
            break
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        line += 1
    assert line > 5 and lines > 5


def test_an_interrupt_leaves_a_storage_complete():
    class Handle:
        def is_changed(self):
            return False

    line = 1
    while True:
        source = torch.zeros(4)
        storage = Storage(source, source.view(torch.uint8), None)
        stopped = interrupted(line, lambda kept=storage: kept.hand_over(Handle(), 8))
        assert not storage.is_changed()
        assert storage.offset == 8 if storage.handle else storage.buffer.numel() == 16 and storage.source is source
        if not stopped:
            break
        line += 1
    assert storage.handle is not None and line > 1


def test_a_forked_child_has_locks_of_its_own():
    off = offload(full_device())
    with off:
        y = torch.randn(64, 64, requires_grad=True).exp().sum()
    packer, lock = off._packers[CPU], off._lock
    lock.acquire()
    packer._lock.acquire()
    off._after_fork()
    assert not off._lock.locked() and not packer._lock.locked() and not off._packers and CPU in off._schedulers
    y.backward()
