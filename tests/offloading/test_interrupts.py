"""Interrupts at any moment, forks, finalizers on any thread: what follows is exact, and nothing is lost."""

import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

import fusedrnn
from fusedrnn.offloading.disk import Extent
from fusedrnn.offloading.stack import Offloader
from fusedrnn.testing import full_device

CPU = torch.device("cpu")
SIZE = 4096


def mlp(layers=6, width=64):
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers))
    )


def subject(kind, **options):
    """A module, its offloader, and a function that runs a step of it and returns all gradients."""
    torch.manual_seed(1)
    off = fusedrnn.offload(full_device(min_bytes=256, chunk_bytes=1024, **options))
    if kind == "lstm":
        module = fusedrnn.LSTM(8, 16, save="gates", chunk=4, backend="torch_step", offload=off)
        x = torch.randn(24, 4, 8)
    else:
        module, x = mlp(5, 24), torch.randn(16, 24)

    def step():
        module.zero_grad()
        if kind == "lstm":
            y = module(x)[0]
        else:
            with off:
                y = module(x)
        y.square().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    return off, step


def left_over(off):
    gc.collect()
    scheduler = off.scheduler(CPU)
    scheduler.audit()
    return scheduler.entries()


class Interrupt(BaseException):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "hooks"])
def test_a_step_after_an_interrupt_is_exact(kind, disk, tmp_path):
    off, step = subject(kind, **({"spill_dir": tmp_path} if disk else {}))
    expected = step()
    start = time.perf_counter()
    step()
    duration, draw, interrupted = time.perf_counter() - start, random.Random(0), 0

    def interrupt(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupted < 30:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, draw.random() * duration * 1.1))
                try:
                    step()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
            except RuntimeError as error:
                # Python goes on after an interrupt that came in a finalizer, whose work then is not done.
                if "the buffer was lost: an interrupt" not in str(error):
                    raise
                interrupted += 1
            # Contexts of torch may be interrupted on their way in or out, and then stay in force.
            torch.set_grad_enabled(True)
            while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            assert all(map(torch.equal, step(), expected))
            assert left_over(off) == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted_in(monkeypatch, scheduler, name):
    """Let the scheduler's next call of a method of its transfers be interrupted in its midst."""
    method = getattr(scheduler._transfers, name)

    def interrupted(*args, **options):
        method(*args, **options)
        raise Interrupt

    monkeypatch.setattr(scheduler._transfers, name, interrupted)


def push(stack, value):
    slot = stack.reserve(SIZE)
    slot.buffer.fill_(value)
    return stack.push(slot)


def push_all(stack, count):
    return [push(stack, value % 100) for value in range(count)]


@pytest.mark.parametrize("name", ["spill", "retire", "_last_uses", "await_slot"])
def test_what_was_offloaded_during_an_interrupt_is_refused_and_the_rest_begins_anew(name, monkeypatch):
    off = Offloader(full_device(host_limit=64 * SIZE))
    scheduler, stack = off.scheduler(CPU), off.stack(CPU)
    handles = push_all(stack, 8)
    reserved = stack.reserve(SIZE)
    interrupted_in(monkeypatch, scheduler, name)
    with pytest.raises(Interrupt):
        push_all(stack, 8)
    again = push_all(stack, 8)
    for use in (handles[0].get, reserved.push):
        with pytest.raises(RuntimeError, match=r"the buffer was lost: an interrupt .* Run the forward pass again"):
            use()
    handles[1].release()
    del handles, reserved, use
    for value, handle in reversed(list(enumerate(again))):
        assert bool((handle.get() == value).all())
        handle.release()
    scheduler.audit()
    assert scheduler.entries() == [] and scheduler.ring.held == scheduler.ring.free and scheduler.host.used == 0


@pytest.mark.filterwarnings("ignore:offloading has no pinned host memory left")
def test_an_error_on_purpose_loses_nothing():
    off = Offloader(full_device(host_limit=0, on_host_full="raise", ring_slots=2))
    stack = off.stack(CPU)
    handles = push_all(stack, 2)
    with pytest.raises(fusedrnn.OffloadHostFull):
        push_all(stack, 4)
    for value, handle in reversed(list(enumerate(handles))):
        assert bool((handle.get() == value).all())


def run(code):
    """Run code in a process of its own; a hang fails."""
    head = "import gc, os, sys, tempfile, time, torch, fusedrnn\nfrom fusedrnn.testing import full_device\n"
    command = [sys.executable, "-W", "ignore", "-c", head + "torch.set_num_threads(1)\n" + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


FORKS = """
off = fusedrnn.offload(full_device(min_bytes=256, chunk_bytes=1024, ring_slots=2, **options))
lstm = fusedrnn.LSTM(8, 16, save="gates", chunk=8, backend="torch_step", offload=off.config)
x = torch.randn(200, 4, 8)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(6)])
def step():
    lstm.zero_grad()
    lstm(x)[0].sum().backward()
    with off:
        loss = model(x).sum()
    loss.backward()
    return [p.grad.clone() for p in lstm.parameters()]
expected = step()
kept = lstm(x)[0].sum()
class Node: pass
with off:
    node = Node(); node.me = node; node.loss = model(x).sum()
del node
child = os.fork()
if child == 0:
    gc.collect()
    assert all(map(torch.equal, step(), expected))
    try:
        kept.backward()
    except RuntimeError as error:
        print(error, flush=True)
    del kept
    gc.collect()
    assert all(map(torch.equal, step(), expected))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
kept.backward()
assert all(map(torch.equal, step(), expected))
"""


@pytest.mark.parametrize("options", ["{}", "{'spill_dir': tempfile.gettempdir()}"])
def test_a_forked_process_starts_anew(options):
    said = run(f"options = {options}\n" + FORKS)
    assert "belongs to the process that this one was forked from" in said


def test_garbage_collected_on_a_copy_thread_waits_for_nobody():
    run(
        """
        from fusedrnn.offloading import stack
        from fusedrnn.offloading.device import ThreadDevice
        armed = False
        def delay():
            if armed:
                gc.collect()
            return 0.001
        stack.ThreadDevice = lambda: ThreadDevice(delay=delay)
        gc.freeze()
        config = full_device(min_bytes=256, chunk_bytes=1024, ring_slots=2, spill_dir=tempfile.gettempdir())
        off = fusedrnn.offload(config)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(8)])
        class Node: pass
        for _ in range(8):
            with off:
                loss = model(torch.randn(32, 32)).sum()
            node = Node(); node.me, node.loss = node, loss
            armed = True
            del loss, node
        """
    )


def test_what_is_dropped_while_another_thread_is_at_work_is_given_back_when_that_leaves():
    entered, leave = threading.Event(), threading.Event()
    off = Offloader(full_device(host_limit=64 * SIZE))
    scheduler, stack = off.scheduler(CPU), off.stack(CPU)
    handles = [push(stack, value) for value in range(8)]

    def work():
        entered.set()
        leave.wait(10)

    thread = threading.Thread(target=lambda: scheduler._exclusive.run(work))
    thread.start()
    entered.wait(10)
    del handles
    leave.set()
    thread.join()
    assert not scheduler._exclusive.ownerless and scheduler.host.used == 0


def test_a_source_of_the_occupancy_may_look_at_the_statistics():
    off = Offloader(full_device(occupancy=lambda: 1.0 if off.stats().host_peak < 2 * SIZE else 0.5))
    stack = off.stack(CPU)
    handles = [push(stack, value) for value in range(12)]
    assert 0 < off.stats().spills < 12
    del handles


def test_limits_are_those_of_the_process():
    limit = 4 << 20
    offs = [Offloader(full_device(host_limit=limit, ring_slots=2)) for _ in range(3)]
    schedulers = [off.scheduler(CPU) for off in offs]
    gc.collect()
    held = schedulers[0].host.account.others(None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept = [push_all(off.stack(CPU), 2000) for off in offs]
    assert "held by other offloaders of this process" in str(said[-1].message)
    assert sum(scheduler.host.reserved for scheduler in schedulers) <= max(limit, held)
    assert all(scheduler.host.account is schedulers[0].host.account for scheduler in schedulers)
    # What one of them does not use, another gets.
    del kept
    before = offs[2].stats().spills
    more = push_all(offs[2].stack(CPU), 900)
    assert offs[2].stats().spills - before > 800
    del more


def test_any_error_of_a_copy_thread_counts_as_a_failed_write(monkeypatch, tmp_path):
    off, step = subject("lstm", spill_dir=tmp_path)
    expected, write, calls = step(), Extent.write, 0

    def failing(self, *args):
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise MemoryError("no memory for this")
        write(self, *args)

    monkeypatch.setattr(Extent, "write", failing)
    with pytest.warns(RuntimeWarning, match="could not write to .* no memory for this"):
        found = [step() for _ in range(3)]
    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected, strict=True))
    assert off.stats().disk_failures > 0 and left_over(off) == []
