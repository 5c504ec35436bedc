"""`dynamic_rnn(save="recompute")` gives what `save="all"` gives, bit by bit, from the states at the borders alone."""

import contextlib
import gc
import weakref
from math import isqrt

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fusedrnn import recompute
from fusedrnn.dynamic import dynamic_rnn
from fusedrnn.stepping import Chunk, cut_time

T, B = 23, 3
LENGTHS = [None, [T, 0, 9], [6, 4, 5], [0, 0, 0]]


def train(run, tensors, seed=3):
    """Results, gradients for random gradients of the results, and what the generator draws next."""
    torch.manual_seed(seed)
    found = [leaf for leaf in pytree.tree_leaves(run()) if leaf.requires_grad]
    drawn = torch.rand(3)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(leaf.shape, generator=generator).to(leaf.dtype) for leaf in found]
    gradients = torch.autograd.grad(found, tensors, grads, allow_unused=True)
    return [*found, drawn, torch.rand(3), *gradients]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a is b is None or torch.equal(a, b), k


def both(make, tensors):
    """Assert that both ways to save give the same bits; return them."""
    expected, found = (train(lambda save=save: make(save), tensors) for save in ("all", "recompute"))
    assert_equal(found, expected)
    return expected


class Refused(AssertionError):
    pass


@pytest.fixture
def no_checkpoint(monkeypatch):
    """Fails where `torch.utils.checkpoint` is used."""

    def refuse(*args, **kwargs):
        raise Refused

    monkeypatch.setattr(recompute, "checkpoint", refuse)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.usefixtures("no_checkpoint")
def test_torch_cells(kind, lengths):
    cell, x = kind(5, 7), torch.randn(T, B, 5, requires_grad=True)
    h = torch.randn(B, 7, requires_grad=True)
    state = (h, h.detach().requires_grad_()) if kind is nn.LSTMCell else h
    tensors = [x, *pytree.tree_leaves(state), *cell.parameters()]
    both(lambda save: dynamic_rnn(cell, x, state, lengths, save=save), tensors)
    frozen = kind(5, 7).requires_grad_(False)
    for wanted in ([x], [h]):
        both(lambda save: dynamic_rnn(frozen, x, state, lengths, save=save), wanted)
    both(lambda save: dynamic_rnn(cell, x.detach(), None, lengths, save=save), list(cell.parameters()))


class Dropped(nn.Module):
    """A module of many uses of its state, with dropout inside."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.GRUCell(5, 6), nn.Linear(6, 4)

    def forward(self, x, state):
        h = self.inner(F.dropout(x, 0.3), state["h"]) * (1 + state["h"].sin())
        total = state["more"][0] + h.exp().mean(1)
        return (self.out(F.dropout(h, 0.5)), {"argmax": h.argmax(1)}), {"h": h, "more": [total, state["more"][1] + 1]}

    def initial_state(self, batch, dtype, device):
        h = torch.full((batch, 6), 0.1, dtype=dtype, device=device)
        return {"h": h, "more": [h[:, 0], torch.zeros(batch, dtype=torch.int32)]}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.usefixtures("no_checkpoint")
def test_dropout_draws_the_same_masks_and_leaves_the_generator_alone(lengths):
    cell, x = Dropped(), torch.randn(T, B, 5, requires_grad=True)
    found = both(lambda save: dynamic_rnn(cell, x, None, lengths, save=save), [x, *cell.parameters()])
    others = train(lambda: dynamic_rnn(cell, x, None, lengths, save="recompute"), [x, *cell.parameters()], seed=4)
    assert lengths == [0, 0, 0] or not torch.equal(found[0], others[0])


@pytest.mark.usefixtures("no_checkpoint")
def test_a_function_may_use_leaves_that_are_no_arguments():
    linear, scale = nn.Linear(9, 4), torch.tensor(0.7, requires_grad=True)

    def cell(x, h):
        h = torch.tanh(linear(torch.cat([x, h], 1)) * scale.exp())
        return h + scale, h

    x, h = torch.randn(T, B, 5, requires_grad=True), torch.zeros(B, 4)
    both(lambda save: dynamic_rnn(cell, x, h, save=save), [x, scale, *linear.parameters()])


def test_a_function_may_use_tensors_with_a_history():
    raw, context = torch.randn(9, 4, requires_grad=True), torch.randn(B, 4, requires_grad=True)
    x = torch.randn(T, B, 5, requires_grad=True)
    linear = nn.Linear(4, 4)

    def run(save):
        weight, shift = raw / raw.norm(), (context * 2).tanh()

        def cell(x, h):
            h = torch.tanh(F.dropout(torch.cat([x, h], 1), 0.2) @ weight + linear(h) + shift + raw.mean())
            return h, h

        return dynamic_rnn(cell, x, shift, [T, 3, 9], save=save)

    both(run, [x, raw, context, *linear.parameters()])


@pytest.mark.usefixtures("no_checkpoint")
def test_parameters_may_come_into_use_after_the_first_step():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.later, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x, state):
            h, t = state
            h = torch.tanh((self.later if t[0] > 12 else self.first)(x + h))
            return h, (h, t + 1)

    cell, x = Late(), torch.randn(T, B, 5)
    state = (torch.zeros(B, 5), torch.zeros(B, dtype=torch.int64))
    found = both(lambda save: dynamic_rnn(cell, x, state, save=save), list(cell.parameters()))
    assert found[-1] is None
    assert found[-3].abs().sum() > 0


@pytest.mark.parametrize("late", ["leaf", "history"])
def test_other_tensors_that_come_into_use_after_the_first_step_are_refused(late):
    weight = torch.randn(5, requires_grad=True)
    factor = weight if late == "leaf" else weight * 2

    def cell(x, state):
        h, t = state
        h = torch.tanh(x + h * factor) if t[0] > 12 else torch.tanh(x + h)
        return h, (h, t + 1)

    x, state = torch.randn(T, B, 5, requires_grad=True), (torch.zeros(B, 5), torch.zeros(B))
    y, _ = dynamic_rnn(cell, x, state, save="recompute")
    got = r"of shape \(5,\)" if late == "leaf" else "with a history"
    with pytest.raises(RuntimeError, match=rf'`cell` must take .* got another one {got} later: .*use `save="all"`'):
        y.sum().backward()


def test_parameters_that_were_swapped_for_the_call_are_missed_not_mixed_up():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.RNNCell(5, 6)

        def forward(self, x):
            return dynamic_rnn(self.cell, x, save="recompute")[0]

    whole, x = Whole(), torch.randn(T, B, 5)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in whole.named_parameters()}
    y = torch.func.functional_call(whole, weights, (x,))
    with pytest.raises(RuntimeError, match="`cell` must take the tensors that need gradients in its first step"):
        y.sum().backward()


def test_second_derivatives_are_refused():
    x = torch.randn(T, B, 5, requires_grad=True)
    y, _ = dynamic_rnn(nn.GRUCell(5, 6), x, save="recompute")
    with pytest.raises(RuntimeError, match=r'first derivatives only, .*`create_graph=True`: use `save="all"`'):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_kept_graph_gives_the_same_twice_and_a_dropped_one_says_so():
    cell, x = Dropped(), torch.randn(T, B, 5, requires_grad=True)
    y = dynamic_rnn(cell, x, save="recompute")[0][0].sum()
    first = torch.autograd.grad(y, [x, *cell.parameters()], retain_graph=True)
    assert_equal(torch.autograd.grad(y, [x, *cell.parameters()]), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_weight_that_changed_in_place_is_noticed():
    cell = nn.GRUCell(5, 6)
    y, _ = dynamic_rnn(cell, torch.randn(T, B, 5), save="recompute")
    with torch.no_grad():
        cell.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_cell_may_return_what_it_was_given_and_the_same_twice(lengths):
    weight = nn.Parameter(torch.randn(5))

    def cell(x, state):
        h = torch.sin(x * weight + state[0] + state[2])
        return (h, x, h, weight.expand(B, 5)), [h, h, state[2], x]

    x = torch.randn(T, B, 5, requires_grad=True)
    state = [torch.randn(B, 5, requires_grad=True) for _ in range(3)]
    given = [state[0], state[0], *state[1:]]
    both(lambda save: dynamic_rnn(cell, x, given, lengths, save=save), [x, *state, weight])
    _, after = dynamic_rnn(cell, x, given, lengths, save="recompute")
    after[2].mul_(2).sum().backward()


def test_chunks_that_no_gradient_reaches_are_not_run_again():
    calls = []

    def cell(x, h):
        calls.append(None)
        return h, torch.sin(x)

    x = torch.randn(25, B, requires_grad=True)
    _, h = dynamic_rnn(cell, x, torch.zeros(B), save="recompute")
    calls.clear()
    (dx,) = torch.autograd.grad(h.sum(), x)
    assert len(calls) == 5
    assert dx[:24].eq(0).all()
    assert torch.equal(dx[24], x[24].cos())


def test_default_device_is_that_of_the_forward_pass():
    seen = []

    def cell(x, h):
        seen.append(torch.empty(0).device.type)
        return x + h, x * h

    x = torch.randn(T, B, requires_grad=True)
    with torch.device("meta"):
        y, _ = dynamic_rnn(cell, x, torch.zeros(B, device="cpu"), [T] * B, save="recompute")
    y.sum().backward()
    assert set(seen) == {"meta"}
    assert len(seen) == 2 * T + 1


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast(kind, inside):
    cell, x = kind(5, 6), torch.randn(T, B, 5, requires_grad=True)
    tensors = [x, *cell.parameters()]

    def run(make):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            outs = pytree.tree_leaves(make())
            # What was cast without a history in between must not be taken here.
            late = F.linear(x[0], cell.weight_ih).float().sum()
            if not inside:
                stack.close()
            return outs, torch.autograd.grad(sum(out.float().sum() for out in outs) + late, tensors)

    def loop():
        state = (torch.zeros(B, 6),) * 2 if kind is nn.LSTMCell else torch.zeros(B, 6)
        outs = []
        for each in x.unbind(0):
            state = cell(each, state)
            outs.append(state[0] if kind is nn.LSTMCell else state)
        return torch.stack(outs), state

    expected, exact = run(loop)
    for save in ("all", "recompute"):
        outs, gradients = run(lambda save=save: dynamic_rnn(cell, x, save=save))
        assert_equal(outs, expected)
        for a, b in zip(gradients, exact, strict=True):
            # Sums over time that autocast makes in bfloat16, in an order of their own.
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
    # Twice in one region: nothing of the first call is left for the second.
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (dynamic_rnn(cell, x, save="recompute")[0] for _ in range(2))
    assert_equal(torch.autograd.grad(first.float().sum(), tensors), torch.autograd.grad(second.float().sum(), tensors))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_hooks_around_it(reentrant):
    cell, x = Dropped(), torch.randn(T, B, 5, requires_grad=True)
    tensors = [x, *cell.parameters()]

    def loss(x):
        return dynamic_rnn(cell, x, save="recompute")[0][0].square().sum()

    def gradients(run):
        torch.manual_seed(5)
        for tensor in tensors:
            tensor.grad = None
        run().backward()
        return [tensor.grad for tensor in tensors]

    expected = gradients(lambda: loss(x))
    assert_equal(gradients(lambda: checkpoint(loss, x, use_reentrant=reentrant)), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_equal(gradients(lambda: loss(x)), expected)


@pytest.mark.parametrize("full", [0, 1, 10, 99, 100])
def test_time_is_cut_into_about_the_root_of_its_length(full):
    for steps in (max(full, 1), 100, 101, 10_000, 1_000_000):
        chunks = cut_time(full, steps)
        assert [t for chunk in chunks for t in range(chunk.first, chunk.last)] == list(range(steps))
        assert all(chunk.masked == (chunk.first >= full) for chunk in chunks)
        length = max(chunk.last - chunk.first for chunk in chunks)
        assert length <= isqrt(steps - 1) + 1
        assert len(chunks) <= isqrt(steps) + 3
    assert cut_time(2, 5) == [Chunk(0, 2, False), Chunk(2, 5, True)]


def kept(steps, save, lengths=None):
    """Bytes that autograd keeps of a call besides input, output and weights, each storage once."""
    cell, x = nn.LSTMCell(8, 32), torch.randn(steps, 4, 8)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, state = dynamic_rnn(cell, x, None, lengths, save=save)
    for tensor in (x, y, *state, *cell.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_kept_grows_as_the_root_of_the_length(ragged):
    h = 4 * 32 * 4
    for steps, borders in ((64, 8), (256, 16), (1024, 32)):
        lengths = [steps, 0, 5, 9] if ragged else None
        # The initial h and c are the same zeros.
        assert kept(steps, "recompute", lengths) == h + 2 * h * (borders - 1)
    assert kept(1024, "all", lengths) > 5 * h * 1024


@pytest.mark.parametrize("steps", [64, 256])
def test_the_backward_pass_holds_one_chunk_at_a_time(steps):
    alive, peak = 0, 0

    def died():
        nonlocal alive
        alive -= 1

    def cell(x, h):
        nonlocal alive, peak
        pre = x + h
        alive += 1
        peak = max(peak, alive)
        weakref.finalize(pre, died)
        return x, torch.sin(pre)

    x = torch.randn(steps, B, requires_grad=True)
    for save, bound in (("all", steps), ("recompute", isqrt(steps) + 1)):
        peak = 0
        y, h = dynamic_rnn(cell, x, torch.zeros(B), save=save)
        h.sum().backward()
        assert bound - 1 <= peak <= bound
        del y, h
        gc.collect()
        assert alive == 0


def test_everything_is_freed_at_once():
    cell = nn.GRUCell(5, 6)
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            x = torch.randn(T, B, 5, requires_grad=True) * 1.0
            y, h = dynamic_rnn(cell, x, sequence_length=[T, 0, 5], save="recompute")
            seen = [weakref.ref(tensor) for tensor in (x, y, h)]
            if backward:
                (y.sum() + h.sum()).backward()
            del x, y, h
            assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()
