"""`dynamic_rnn` computes what a plain loop does, row by row, whatever the padding holds."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedrnn.dynamic import dynamic_rnn

F64 = torch.float64
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]
SAVES = ["all", "recompute"]
T = 11

State = namedtuple("State", ["memory", "rest"])


class NestedCell(nn.Module):
    """Nests everywhere; the memory is a matrix per row, and one part of the state counts steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 8, dtype=F64)

    def forward(self, x, state):
        h, (steps,) = state.rest["h"], state.rest["steps"]
        u, v = torch.tanh(self.linear(torch.cat([x["a"], x["b"][0].flatten(1), h], 1))).chunk(2, 1)
        memory = 0.5 * state.memory + u[:, :, None] * v[:, None, :]
        h = memory.mean(2)[:, :2] * (1 + steps[:, None])
        return (u, [v.exp(), steps]), State(memory, {"h": h, "steps": [steps + 1]})

    @staticmethod
    def initial_state(batch, dtype, device):
        memory = torch.ones(batch, 4, 4, dtype=dtype, device=device)
        return State(memory, {"h": memory[:, 0, :2], "steps": [torch.zeros(batch, dtype=torch.int64)]})


def nested_inputs(B):
    return {"a": torch.randn(T, B, 1, dtype=F64), "b": (torch.randn(T, B, 2, 1, dtype=F64),)}


def step(cell, x, state):
    if isinstance(cell, (nn.GRUCell, nn.RNNCell)):
        h = cell(x, state)
        return h, h
    if isinstance(cell, nn.LSTMCell):
        state = cell(x, state)
        return state[0], state
    return cell(x, state)


def plain(cell, x, state):
    """A loop over all steps."""
    outs = []
    for t in range(pytree.tree_leaves(x)[0].shape[0]):
        out, state = step(cell, pytree.tree_map(lambda leaf, t=t: leaf[t], x), state)
        outs.append(out)
    return pytree.tree_map(lambda *each: torch.stack(each), *outs), state


def row_by_row(cell, x, state, lengths):
    """Each sequence alone, cut to its length, with zeros after it."""
    rows = []
    for b, length in enumerate(lengths):
        own = pytree.tree_map(lambda leaf, b=b, n=length or 1: leaf[:n, b : b + 1], x)
        before = pytree.tree_map(lambda leaf, b=b: leaf[b : b + 1], state)
        y, after = plain(cell, own, before)
        y = pytree.tree_map(lambda leaf, n=length: torch.cat([leaf[:n], leaf.new_zeros(T - n, *leaf.shape[1:])]), y)
        rows.append((y, after if length else before))
    ys, states = zip(*rows, strict=True)
    return (
        pytree.tree_map(lambda *each: torch.cat(each, 1), *ys),
        pytree.tree_map(lambda *each: torch.cat(each), *states),
    )


def state_of(cell, B):
    if isinstance(cell, NestedCell):
        return cell.initial_state(B, F64, "cpu")
    state = tuple(torch.randn(B, cell.hidden_size, dtype=F64) for _ in range(2))
    return state if isinstance(cell, nn.LSTMCell) else state[0]


def results(run, cell, x, state):
    """Outputs, final states and gradients of everything, for random gradients of the results."""
    leaves, spec = pytree.tree_flatten((x, state))
    leaves = [leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    found = pytree.tree_leaves(run(*spec.unflatten(leaves)))
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (out * torch.randn(out.shape, generator=generator, dtype=F64)).sum() for out in found if out.requires_grad
    )
    wanted = [leaf for leaf in leaves if leaf.requires_grad] + list(cell.parameters())
    return found, torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


def assert_same(actual, expected, tolerance=1e-12):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[*CELLS, NestedCell], ids=lambda kind: kind.__name__)
def cell(request):
    return request.param() if request.param is NestedCell else request.param(3, 4, dtype=F64)


def inputs_of(cell, B):
    return nested_inputs(B) if isinstance(cell, NestedCell) else torch.randn(T, B, 3, dtype=F64)


@pytest.mark.parametrize("save", SAVES)
def test_equals_a_plain_loop(cell, save):
    x, state = inputs_of(cell, 3), state_of(cell, 3)
    outputs, gradients = results(lambda x, s: dynamic_rnn(cell, x, s, save=save), cell, x, state)
    expected, exact = results(lambda x, s: plain(cell, x, s), cell, x, state)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert_same(gradients, exact)
    with torch.no_grad():
        outputs = pytree.tree_leaves(dynamic_rnn(cell, x, state, save=save))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert not any(out.requires_grad for out in outputs)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("padding", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("lengths", [[0, 1, T, 5], [4, 3, 7, 4], [0, 0, 0, 0], [6, 6, 6, 6]], ids=str)
def test_lengths(cell, save, padding, lengths):
    x, state = inputs_of(cell, 4), state_of(cell, 4)
    for leaf in pytree.tree_leaves(x):
        for b, length in enumerate(lengths):
            leaf[length:, b] = padding
    finite = pytree.tree_map(lambda leaf: leaf.nan_to_num(0, 0), x)
    outputs, gradients = results(lambda x, s: dynamic_rnn(cell, x, s, lengths, save=save), cell, x, state)
    expected, exact = results(lambda x, s: row_by_row(cell, x, s, lengths), cell, finite, state)
    assert_same(outputs, expected)
    assert_same(gradients, exact)
    for y in outputs[: len(outputs) - len(pytree.tree_leaves(state))]:
        assert all(y[length:, b].eq(0).all() for b, length in enumerate(lengths))
    for dx in gradients[: len(pytree.tree_leaves(x))]:
        assert all(dx[length:, b].eq(0).all() for b, length in enumerate(lengths))
    for before, after, length in zip(
        zip(*pytree.tree_leaves(state), strict=False),
        zip(*outputs[len(outputs) - len(pytree.tree_leaves(state)) :], strict=False),
        lengths,
        strict=True,
    ):
        assert length or all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("save", SAVES)
def test_what_an_ended_row_holds_stays_in_it(save):
    cell = nn.GRUCell(3, 4, dtype=F64)
    x = torch.randn(T, 2, 3, dtype=F64, requires_grad=True)
    with torch.no_grad():
        x[2, 1] = float("nan")
    y, h = dynamic_rnn(cell, x, sequence_length=[T, 5], save=save)
    (dx,) = torch.autograd.grad(y[:, 0].sum() + h[0].sum(), x)
    assert y[:, 0].isfinite().all()
    assert dx[:, 0].isfinite().all()
    assert y[2:5, 1].isnan().all()
    assert y[5:].eq(0)[:, 1].all()
    assert h[1].isnan().all()


def test_batch_first(cell):
    x, state, lengths = inputs_of(cell, 3), state_of(cell, 3), [2, T, 0]
    turned = pytree.tree_map(lambda leaf: leaf.transpose(0, 1).contiguous(), x)
    for options in ({}, {"sequence_length": lengths}):
        y, after = dynamic_rnn(cell, x, state, **options)
        y_turned, after_turned = dynamic_rnn(cell, turned, state, time_major=False, **options)
        for a, b in zip(pytree.tree_leaves(y), pytree.tree_leaves(y_turned), strict=True):
            assert torch.equal(a.transpose(0, 1), b)
        for a, b in zip(pytree.tree_leaves(after), pytree.tree_leaves(after_turned), strict=True):
            assert torch.equal(a, b)


def test_structures_come_back():
    cell = NestedCell()
    y, state = dynamic_rnn(cell, nested_inputs(2), sequence_length=[3, 1])
    assert isinstance(y, tuple)
    assert isinstance(y[1], list)
    assert y[1][1].dtype == torch.int64
    assert type(state) is State
    assert state.memory.shape == (2, 4, 4)
    assert state.rest["steps"][0].tolist() == [3, 1]


@pytest.mark.parametrize("save", SAVES)
def test_no_timesteps_no_sequences(save):
    for kind in CELLS:
        cell = kind(3, 4)
        state = (torch.randn(2, 4, requires_grad=True),) * 2
        state = state if kind is nn.LSTMCell else state[0]
        for lengths in (None, [0, 0]):
            y, after = dynamic_rnn(cell, torch.zeros(0, 2, 3, requires_grad=True), state, lengths, save=save)
            assert y.shape == (0, 2, 4)
            assert all(map(torch.equal, pytree.tree_leaves(after), pytree.tree_leaves(state)))
            (y.sum() + sum(leaf.sum() for leaf in pytree.tree_leaves(after))).backward()
        assert all(weight.grad.eq(0).all() for weight in cell.parameters())
        for lengths in (None, []):
            y, after = dynamic_rnn(cell, torch.zeros(5, 0, 3), sequence_length=lengths, save=save)
            assert y.shape == (5, 0, 4)
            assert pytree.tree_leaves(after)[0].shape == (0, 4)
        assert dynamic_rnn(cell, torch.zeros(2, 0, 3), time_major=False, save=save)[0].shape == (2, 0, 4)
    y, _ = dynamic_rnn(NestedCell(), pytree.tree_map(lambda leaf: leaf[:0], nested_inputs(2)), save=save)
    assert [leaf.shape for leaf in pytree.tree_leaves(y)] == [(0, 2, 4), (0, 2, 4), (0, 2)]


@pytest.mark.parametrize("save", SAVES)
def test_a_cell_needs_no_state(save):
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(T, 2, 3)
    y, state = dynamic_rnn(lambda x, state: (x @ weight, state), x, (), [T, 2], save=save)
    y.sum().backward()
    assert state == ()
    torch.testing.assert_close(weight.grad, (x[:, 0].sum(0) + x[:2, 1].sum(0))[:, None].expand(3, 4))


@pytest.mark.parametrize(("lengths", "calls"), [(None, T), ([4, 2], 4), ([0, 0], 1), ([0, T], T)])
def test_steps_past_the_longest_sequence_are_not_run(lengths, calls):
    seen = []

    def cell(x, state):
        seen.append(x)
        return x, state

    dynamic_rnn(cell, torch.randn(T, 2), torch.zeros(2), lengths)
    assert len(seen) == calls


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, lambda v: torch.tensor(v, dtype=torch.uint8)])
def test_lengths_may_come_in_any_form(make):
    cell, x = nn.RNNCell(3, 4), torch.randn(T, 2, 3)
    assert torch.equal(dynamic_rnn(cell, x, None, make([3, 9]))[0], dynamic_rnn(cell, x, None, [3, 9])[0])


def test_initial_states():
    x = torch.randn(T, 2, 3, dtype=F64)
    for kind in CELLS:
        cell = kind(3, 4, dtype=F64)
        zeros = torch.zeros(2, 4, dtype=F64)
        given = dynamic_rnn(cell, x, [zeros, zeros] if kind is nn.LSTMCell else zeros)
        assert all(map(torch.equal, pytree.tree_leaves(dynamic_rnn(cell, x)), pytree.tree_leaves(given)))

    class Cell:
        def __call__(self, x, state):
            return x.unsqueeze(1) + state, state + 1

        def zero_state(self, *asked):
            self.asked = asked
            batch, dtype, device = asked
            return torch.zeros(batch, 3, dtype=dtype, device=device)

    cell = Cell()
    for given, dtype in ((torch.zeros(T, 2, dtype=F64), F64), (torch.zeros(T, 2).long(), torch.float32)):
        y, state = dynamic_rnn(cell, given)
        assert cell.asked == (2, dtype, torch.device("cpu"))
        assert state.dtype == dtype
        assert state.eq(T).all()
        assert y[:, 0, 0].tolist() == list(range(T))


def test_derivatives_of_second_order():
    def f(x, h, weight):
        def cell(x, state):
            h = torch.tanh(torch.cat([x, state["h"]], 1) @ weight)
            return h.exp(), {"h": h, "sum": state["sum"] + h}

        y, state = dynamic_rnn(cell, x, {"h": h, "sum": h * x[0, :, :2]}, [4, 0, 2])
        return y, state["h"], state["sum"]

    args = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in ((4, 3, 3), (3, 2), (5, 2))]
    assert torch.autograd.gradcheck(f, args)
    assert torch.autograd.gradgradcheck(f, args)


def test_function_transforms():
    linear, x = nn.Linear(7, 4, dtype=F64), torch.randn(T, 2, 5, 3, dtype=F64)

    def run(x):
        def cell(x, h):
            h = torch.tanh(linear(torch.cat([x, h], 1)))
            return h, h

        return dynamic_rnn(cell, x, torch.zeros(2, 4, dtype=F64), [3, T])[0]

    mapped = torch.func.vmap(run, 2)(x)
    assert_same(mapped, [run(x[:, :, n]) for n in range(5)])
    with torch.no_grad():
        assert_same(torch.func.vmap(run, 2)(x), mapped)
    direction = torch.randn_like(x[:, :, 0])
    _, tangent = torch.func.jvp(run, (x[:, :, 0],), (direction,))
    finite = (run(x[:, :, 0] + 1e-6 * direction) - run(x[:, :, 0] - 1e-6 * direction)) / 2e-6
    assert_same([tangent], [finite], 1e-7)


@pytest.mark.parametrize("save", SAVES)
def test_after_an_exception_the_next_call_is_exact(save):
    inner = nn.GRUCell(3, 4, dtype=F64)
    x, h0 = torch.randn(T, 2, 3, dtype=F64), torch.zeros(2, 4, dtype=F64)

    def run(fail_at=None):
        calls = 0

        def cell(x, h):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise KeyboardInterrupt
            h = inner(x, h)
            return h, h

        found = results(lambda x, h: dynamic_rnn(cell, x, h, [T, 4], save=save), inner, x, h0)
        return pytree.tree_leaves(found), calls

    expected, calls = run()
    assert calls == (T if save == "all" else 2 * T + 1)
    for k in range(1, calls + 1):
        with pytest.raises(KeyboardInterrupt):
            run(k)
        assert all(map(torch.equal, run()[0], expected))


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ragged", [False, True])
def test_operations_besides_the_cell_are_few_and_do_not_grow(ragged):
    cell = lambda x, s: (x, s + x)  # noqa: E731
    counts = []
    for steps in (100, 400, 1600):
        x, state = torch.randn(steps, 2, requires_grad=True), torch.zeros(2)
        with Count() as count:
            dynamic_rnn(cell, x, state, [steps, 0] if ragged else None)
        counts.append(count.calls - steps * (2 if ragged else 1))
    # One addition of the cell, one choice between two states; besides these, a few for each of sqrt(T) chunks.
    for calls, chunks in zip(counts, (10, 20, 40), strict=True):
        assert calls <= 12 * chunks + 20
