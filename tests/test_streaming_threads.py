"""The threads of a stream: what they read ahead, and what becomes of them after fork() and Ctrl-C."""

import multiprocessing
import threading
import time

import pytest
import torch

import fusedrnn
from fusedrnn.offloading.device import ThreadDevice
from fusedrnn.streaming import transfer

LAYER = fusedrnn.LSTM(5, 8, chunk=10, save="hidden")
x = torch.randn(50, 3, 5)


def step(chunks):
    """Return the sum of the losses and all gradients."""
    LAYER.zero_grad()
    total, _ = LAYER(chunks, chunk_loss=lambda y, at: y.sin().sum())
    total.backward()
    return [total.detach(), *(parameter.grad.clone() for parameter in LAYER.parameters())]


def no_threads():
    """Return whether all threads of streams end soon; one whose start was interrupted is waited for by nobody."""
    for _ in range(500):
        if not any(thread.name.startswith(("fusedrnn-in", "fusedrnn-out")) for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def test_chunks_may_be_made_in_the_same_memory():
    def chunks():
        buffer = torch.empty(10, 3, 5)
        for piece in x.split(10):
            yield buffer.copy_(piece)

    assert all(map(torch.equal, step(chunks()), step(list(x.split(10)))))


def _in_child(connection):
    # OpenMP's threads do not exist in a forked process either, and are waited for.
    torch.set_num_threads(1)
    connection.send([tensor.tolist() for tensor in step(iter(x.split(10)))])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_streams(monkeypatch):
    # Its parent has threads for the copies, which the child has not.
    device = ThreadDevice()
    monkeypatch.setattr(transfer, "device_of", lambda _: device)
    expected = step(iter(x.split(10)))
    context = multiprocessing.get_context("fork")
    mine, others = context.Pipe()
    child = context.Process(target=_in_child, args=(others,))
    child.start()
    try:
        assert mine.poll(30)
        assert mine.recv() == [tensor.tolist() for tensor in expected]
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("where", ["forward", "backward", "generator"])
def test_an_interrupt_leaves_no_thread_and_the_next_call_exact(where):
    expected, calls = step(iter(x.split(10))), []

    def loss(y, at):
        calls.append(at)
        if len(calls) == {"forward": 2, "backward": 8}.get(where):
            raise KeyboardInterrupt
        return y.sin().sum()

    def chunks():
        yield from x.split(10)[:3]
        if where == "generator":
            raise KeyboardInterrupt
        yield from x.split(10)[3:]

    with pytest.raises(KeyboardInterrupt):
        LAYER(chunks(), chunk_loss=loss)[0].backward()
    assert no_threads()
    assert all(map(torch.equal, step(iter(x.split(10))), expected))
