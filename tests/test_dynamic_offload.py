"""`dynamic_rnn(swap_memory=...)` moves what is saved to the host and back, and changes no bit."""

import pytest
import torch
from torch import nn

from fusedrnn.dynamic import dynamic_rnn
from fusedrnn.offloading import OffloadConfig, offload, offloader
from fusedrnn.testing import full_device

T, B = 40, 4


def counters(off):
    return off.scheduler(torch.device("cpu")).counters


def train(cell, x, lengths=None, **options):
    """All results and gradients."""
    y, state = dynamic_rnn(cell, x, sequence_length=lengths, **options)
    outs = [y, *(state if isinstance(state, tuple) else [state])]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator) for out in outs]
    return [*outs, *torch.autograd.grad(outs, [x, *cell.parameters()], grads)]


@pytest.mark.parametrize("save", ["all", "recompute"])
@pytest.mark.parametrize("lengths", [None, [T, 0, 7, 30]], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_no_bit_changes(kind, lengths, save):
    cell, x = kind(24, 32), torch.randn(T, B, 24, requires_grad=True)
    expected = train(cell, x, lengths, save=save)
    off = offload(full_device())
    for _ in range(2):
        before = counters(off).spills
        found = train(cell, x, lengths, save=save, swap_memory=off)
        assert counters(off).spills > before
        assert all(map(torch.equal, found, expected))


def test_a_function_with_a_history_of_its_own():
    linear, raw = nn.Linear(56, 32), torch.randn(B, 32, requires_grad=True)
    x = torch.randn(T, B, 24, requires_grad=True)

    def run(swap_memory):
        context = raw.tanh()

        def cell(x, h):
            h = torch.tanh(linear(torch.cat([x, h], 1)) + context)
            return h, h

        y, _ = dynamic_rnn(cell, x, context, save="recompute", swap_memory=swap_memory)
        return [y, *torch.autograd.grad(y.square().sum(), [x, raw, *linear.parameters()])]

    assert all(map(torch.equal, run(full_device()), run(False)))


def test_calls_with_one_configuration_share_an_offloader():
    cell, x, config = nn.GRUCell(24, 32), torch.randn(T, B, 24, requires_grad=True), full_device()
    shared = offloader("swap_memory", config)
    for _ in range(2):
        before = counters(shared).spills
        train(cell, x, swap_memory=config)
        assert counters(shared).spills > before


def test_on_the_cpu_it_says_that_it_is_inactive():
    cell, x = nn.GRUCell(24, 32), torch.randn(T, B, 24, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="offloading is inactive on cpu"):
        found = train(cell, x, swap_memory=OffloadConfig(prefetch=3))
    assert all(map(torch.equal, found, train(cell, x)))


def test_after_an_exception_the_next_call_is_exact():
    inner, off = nn.GRUCell(24, 32), offload(full_device())
    x = torch.randn(T, B, 24, requires_grad=True)
    expected = train(inner, x)

    def cell(x, h):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        h = inner(x, h)
        return h, h

    for failing in (1, 20, 39):
        left = failing
        with pytest.raises(KeyboardInterrupt):
            dynamic_rnn(cell, x, torch.zeros(B, 32), swap_memory=off)
        assert all(map(torch.equal, train(inner, x, swap_memory=off), expected))


def test_options_reach_the_offloader():
    cell, x = nn.LSTMCell(24, 32), torch.randn(T, B, 24, requires_grad=True)
    asked = []
    train(cell, x, swap_memory=full_device(occupancy=lambda: asked.append(None) or 0.0))
    assert asked
    off = offload(full_device(min_bytes=1 << 20))
    train(cell, x, swap_memory=off)
    assert counters(off).spills == 0
