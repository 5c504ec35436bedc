"""Programs that are made for one edge each, with streams slowed down so that its absence must show.

Each returns its name, its faults and its offloader, as `program.run` wants them.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable
from typing import Any

import cuda
import torch
from subjects import TwoStreams
from torch import Tensor, nn

import fusedrnn
from fusedrnn.offloading.accelerators import copy_stream
from fusedrnn.testing import full_device

Found = tuple[str, list[str], Any]


def _interleaved(draw: random.Random, device: torch.device) -> Found:
    """E4: amid a graph's backward pass, another spills to where the first still fetches from.

    With a disk below, a fetch gives its host slot back at once, to be used again after the copy.
    """
    n, rows = 64, 32
    first = nn.ModuleList(nn.Sequential(nn.Linear(n, n), nn.Tanh()) for _ in range(8)).to(device)
    second = nn.Sequential(*(nn.Sequential(nn.Linear(n, n), nn.Tanh()) for _ in range(8))).to(device)
    x = torch.randn(rows, n).to(device)
    nbytes = rows * n * 4
    off = fusedrnn.offload(
        full_device(
            min_bytes=256, chunk_bytes=1024, ring_slots=draw.choice((2, 3, 6, 8)), prefetch=draw.choice((2, 4, 4)),
            spill_dir=tempfile.gettempdir(), host_limit=nbytes * draw.choice((2, 3, 4)),
        )
    )  # fmt: skip

    # One of the two streams that copy becomes slower than the other now and then.
    slow = copy_stream(device, draw.choice(("spill", "fetch", "fetch")))

    # The first graph has a stream of its own, so that the second, which spills, does not wait for what the first waits.
    ours = torch.accelerator.current_stream(device)
    aside = torch.Stream(device) if draw.random() < 0.8 else ours

    def step(context: Any) -> list[Tensor]:
        def within(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            if context is None:
                return module(x)
            with context:
                return module(x)

        x.grad = None
        middles: list[Tensor] = []
        aside.wait_stream(ours)
        with aside:
            states = [x.detach().requires_grad_()]
            for layer in first:
                middles.append(within(layer, states[-1]))
                states.append(middles[-1].detach().requires_grad_())
            grad, found = torch.ones_like(x), []
        for index in reversed(range(len(middles))):
            if index in (5, 3, 1):
                # What is fetched from now on stays on its way for a while.
                cuda.set_delay(slow, 20_000)
            with aside:
                grads = torch.autograd.grad(middles.pop(), [states[index], *first[index].parameters()], grad)
                grad = grads[0]
                found += grads
            if index in (5, 3, 1):
                loss = within(second, x).square().sum()
                found += torch.autograd.grad(loss, list(second.parameters()))
                cuda.set_delay(slow, 0)
        ours.wait_stream(aside)
        return found

    expected = [tensor.cpu() for tensor in step(None)]
    faults = []
    for number in range(3):
        found = [tensor.cpu() for tensor in step(off)]
        if not all(map(torch.equal, found, expected)):
            faults.append(f"step {number}: results differ")
    return "interleaved graphs above a disk", faults, off


def _reused_host(draw: random.Random, device: torch.device) -> Found:
    """E2: a stream that waits for nothing spills to where a slow fetch, whose reader has been released, still reads."""
    nbytes, count = 1 << 14, 12
    config = full_device(
        min_bytes=256, chunk_bytes=1024, ring_slots=8, prefetch=0, host_limit=nbytes * draw.choice((8, 16))
    )
    off = fusedrnn.offload(config)
    ours, aside, fetch = torch.accelerator.current_stream(device), torch.Stream(device), copy_stream(device, "fetch")

    def push(stack: Any, value: int) -> tuple[Any, int]:
        slot = stack.reserve(nbytes)
        slot.buffer.fill_(value)
        return stack.push(slot), value

    first, second = off.stack(device), off.stack(device)
    handles = [push(first, value + 1) for value in range(count)]
    torch.accelerator.synchronize(device)
    read, others = [], []
    while handles:
        handle, value = handles.pop()
        cuda.set_delay(fetch, 20_000)
        read.append((handle.get().clone(), value))
        handle.release()
        with aside:
            others += [push(second, 100 + len(others) + number) for number in range(2)]
    cuda.set_delay(fetch, 0)
    while others:
        handle, value = others.pop()
        with aside:
            read.append((handle.get().clone(), value))
            handle.release()
    ours.wait_stream(aside)
    wrong = [value for tensor, value in read if not bool((tensor.cpu() == value).all())]
    return "a host slot used again", [f"buffers {wrong} are not what was pushed"] * bool(wrong), off


def _overwritten(draw: random.Random, device: torch.device) -> Found:
    """E7: a buffer is overwritten on one stream while another, slow one still reads it."""
    off = fusedrnn.offload(full_device(min_bytes=256, chunk_bytes=1024, ring_slots=4))
    stack = off.stack(device)
    slow, ours = torch.Stream(device), torch.accelerator.current_stream(device)
    read: list[tuple[Tensor, float]] = []
    handles = []
    for value in range(6):
        slot = stack.reserve(1 << 14)
        slot.buffer.fill_(value + 1)
        handles.append((stack.push(slot), value + 1))
    del slot
    cuda.set_delay(slow, 3000)
    while handles:
        handle, value = handles.pop()
        with slow:
            read.append((handle.get().clone(), value))
        handle.get(writable=True).fill_(0)
        handle.release()
    ours.wait_stream(slow)
    wrong = [value for tensor, value in read if not bool((tensor.cpu() == value).all())]
    return "read aside and overwritten", [f"buffers {wrong} were overwritten before they were read"] * bool(wrong), off


def _flushed(draw: random.Random, device: torch.device) -> Found:
    """The wait at home: memory that a slow copy to the host still reads goes back to the allocator, and is used."""
    nbytes, count = 1 << 14, draw.randint(6, 10)
    off = fusedrnn.offload(full_device(min_bytes=256, chunk_bytes=1024, ring_slots=draw.choice((2, 4))))
    stack, handles = off.stack(device), []
    cuda.set_delay(copy_stream(device, "spill"), 10_000)
    for value in range(count):
        slot = stack.reserve(nbytes)
        slot.buffer.fill_(value + 1)
        handles.append((stack.push(slot), value + 1))
    del slot
    off.scheduler(device).flush()
    others = [torch.full((nbytes,), 100, dtype=torch.uint8, device=device) for _ in range(count)]
    cuda.set_delay(copy_stream(device, "spill"), 0)
    read = []
    while handles:
        handle, value = handles.pop()
        read.append((handle.get().clone(), value))
        handle.release()
    wrong = [value for tensor, value in read if not bool((tensor.cpu() == value).all())]
    del others
    return "memory given back", [f"buffers {wrong} are not what was pushed"] * bool(wrong), off


def _foreign_memory(draw: random.Random, device: torch.device) -> Found:
    """What is saved on one stream was allocated on another, which goes on while slow copies to the host read it."""
    n = 64 * 64
    module = TwoStreams(n, draw.randint(8, 12), device)
    x = torch.randn(n).to(device)
    off = fusedrnn.offload(full_device(min_bytes=256, chunk_bytes=1 << 12, ring_slots=2))

    def step(context: Any) -> list[Tensor]:
        module.zero_grad()
        with context:
            loss = module(x).sum()
        loss.backward()
        torch.accelerator.current_stream(device).wait_stream(module.aside)
        return [parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None]

    cuda.overwrite_freed(2)
    expected = step(contextlib.nullcontext())
    cuda.set_delay(copy_stream(device, "spill"), 20_000)
    faults = []
    for number in range(2):
        wrong = [not torch.equal(a, b) for a, b in zip(step(off), expected, strict=True)]
        if any(wrong):
            faults.append(f"step {number}: {sum(wrong)} gradients differ")
    return "memory of another stream", faults, off


KINDS: dict[str, Callable[[random.Random, torch.device], Found]] = {
    "interleaved": _interleaved,
    "overwritten": _overwritten,
    "reused_host": _reused_host,
    "flushed": _flushed,
    "foreign_memory": _foreign_memory,
}
