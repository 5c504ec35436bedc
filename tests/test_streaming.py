"""A streamed sequence gives what a layer gives that keeps everything, and never holds it whole.

To the last bit for the shapes here, whose products do not round by shape or alignment; to rounding for others.
"""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedrnn
from fusedrnn.bench._measure import allocated_bytes
from fusedrnn.streaming import results
from fusedrnn.testing import full_device, offload_all

T, B, I, H = 50, 3, 5, 8
CHUNK = 16

LAYERS = {
    "lstm, onednn": (fusedrnn.LSTM, {"save": "hidden"}),
    "lstm, hidden": (fusedrnn.LSTM, {"save": "hidden", "backend": "torch_step"}),
    "lstm, cells": (fusedrnn.LSTM, {"save": "cells", "backend": "torch_step"}),
    "lstm, gates": (fusedrnn.LSTM, {"save": "gates", "backend": "torch_step"}),
    "lstm, two layers": (fusedrnn.LSTM, {"save": "hidden", "num_layers": 2, "backend": "torch_step"}),
    "lstm, projection": (fusedrnn.LSTM, {"save": "hidden", "num_layers": 2, "proj_size": 4}),
    "lstm, bfloat16": (fusedrnn.LSTM, {"save": "hidden", "dtype": torch.bfloat16}),
    "gru": (fusedrnn.GRU, {"save": "hidden", "num_layers": 2}),
}


class Problem:
    """A layer, a head with a loss, data, and all gradients of a pass."""

    def __init__(self, cls=fusedrnn.LSTM, batch_first=False, unbatched=False, **options):
        torch.manual_seed(0)
        options = {"chunk": CHUNK, "batch_first": batch_first, **options}
        self.layer = cls(I, H, **options)
        dtype = self.layer.weight_hh_l0.dtype
        width = self.layer.proj_size or H
        self.head = nn.Linear(width, 3, dtype=dtype)
        self.x = torch.randn((T, I) if unbatched else (B, T, I) if batch_first else (T, B, I), dtype=dtype)
        self.time = 1 if batch_first and not unbatched else 0
        shape = (self.layer.num_layers, *([] if unbatched else [B]))
        states = [torch.randn(*shape, width, dtype=dtype), torch.randn(*shape, H, dtype=dtype)]
        self.hx = states[: 1 if cls is fusedrnn.GRU else 2]

    def loss(self, y, at):
        """A loss that depends on the timestep."""
        steps = torch.arange(at.start, at.stop, dtype=y.dtype)
        steps = steps.view((-1, *[1] * (y.dim() - 1 - self.time)))
        return (self.head(y).sin() * steps.cos()).sum()

    def run(self, compute, x=None):
        """Call `compute(x, hx)` -> (loss or output, states), differentiate, and return everything by name."""
        x = self.x.clone().requires_grad_() if x is None else x
        hx = [state.clone().requires_grad_() for state in self.hx]
        self.layer.zero_grad()
        self.head.zero_grad()
        result, after = compute(x, tuple(hx) if len(hx) > 1 else hx[0])
        after = after if isinstance(after, tuple) else (after,)
        outputs = result, *after
        generator = torch.Generator().manual_seed(5)
        torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator).to(t) for t in outputs])
        parameters = [*self.layer.named_parameters(), *self.head.named_parameters("head")]
        found = {"result": result, **{f"state{k}": state for k, state in enumerate(after)}}
        found |= {f"d{name}": parameter.grad for name, parameter in parameters}
        found |= {f"dh{k}": state.grad for k, state in enumerate(hx)}
        found |= {"dx": x.grad} if isinstance(x, torch.Tensor) else {}
        return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}

    def kept(self, x, hx):
        """The same loss from a layer that keeps everything."""
        y, after = self.layer(x, hx)
        total = 0
        for first in range(0, T, CHUNK):
            at = slice(first, min(T, first + CHUNK))
            total = total + self.loss(y[(slice(None),) * self.time + (at,)], at).to(
                torch.promote_types(y.dtype, torch.float32)
            )
        return total, after

    def streamed(self, x, hx):
        return self.layer(x, hx, chunk_loss=self.loss)


def assert_equal(found, expected, names=None):
    assert found.keys() == expected.keys() if names is None else True
    for name in names or expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("name", LAYERS)
def test_a_loss_per_chunk_changes_no_bit(name):
    cls, options = LAYERS[name]
    problem = Problem(cls, **options)
    assert_equal(problem.run(problem.streamed), problem.run(problem.kept))


@pytest.mark.parametrize("layout", ["batch_first", "unbatched"])
def test_layouts(layout):
    problem = Problem(save="hidden", **{layout: True})
    assert_equal(problem.run(problem.streamed), problem.run(problem.kept))


@pytest.mark.parametrize("name", LAYERS)
def test_output_on_the_host(name):
    cls, options = LAYERS[name]
    problem = Problem(cls, **options)
    assert_equal(problem.run(lambda x, hx: problem.layer(x, hx, output="host")), problem.run(problem.layer))


@pytest.mark.parametrize("layout", [{}, {"batch_first": True}, {"unbatched": True}])
def test_last_output(layout):
    problem = Problem(save="hidden", **layout)

    def last(x, hx):
        y, after = problem.layer(x, hx)
        return y.select(problem.time, -1), after

    assert_equal(problem.run(lambda x, hx: problem.layer(x, hx, output="last")), problem.run(last))


def sources(x, tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=tuple(x.shape))
    mapped[:] = x.numpy()
    mapped.flush()
    chunks = list(x.split(CHUNK))
    return {
        "array": x.numpy(),
        "file": np.memmap(tmp_path / "x", np.float32, "r", shape=tuple(x.shape)),
        "copy on write": np.memmap(tmp_path / "x", np.float32, "c", shape=tuple(x.shape)),
        "list": chunks,
        "arrays": [chunk.numpy() for chunk in chunks],
        "generator": (chunk for chunk in chunks),
    }


@pytest.mark.parametrize("kind", ["array", "file", "copy on write", "list", "arrays", "generator"])
@pytest.mark.parametrize("output", ["sequence", "loss"])
def test_sources(kind, output, tmp_path):
    problem = Problem(save="hidden")
    expected = problem.run(problem.kept if output == "loss" else problem.layer)
    del expected["dx"]
    compute = problem.streamed if output == "loss" else problem.layer
    assert_equal(problem.run(compute, sources(problem.x, tmp_path)[kind]), expected)


def test_a_private_mapping_keeps_what_was_written_to_it(tmp_path):
    problem = Problem()
    mapped = sources(problem.x, tmp_path)["copy on write"]
    mapped[:] = 1
    y, _ = problem.layer(mapped)
    assert torch.equal(y, problem.layer(torch.ones_like(problem.x))[0])
    assert (mapped == 1).all()


def test_resets_are_those_of_each_segment():
    problem = Problem(save="hidden", backend="torch_step")
    resets = torch.rand(T, B, generator=torch.Generator().manual_seed(1)) < 0.2
    whole = problem.run(lambda x, hx: problem.layer(x, hx, resets))
    assert_equal(problem.run(lambda x, hx: problem.layer(x, hx, resets, output="host")), whole)


def by_hand(problem, draw):
    """Segments of one graph, made by calling the layer on each."""

    def compute(x, hx):
        total = 0
        for first in range(0, T, CHUNK):
            at = slice(first, min(T, first + CHUNK))
            y, hx = problem.layer(x[at], hx)
            total = total + draw(y, at)
        return total, hx

    return compute


def test_random_numbers_are_the_same_in_both_passes():
    problem = Problem(num_layers=2, dropout=0.5)

    def draw(y, at):
        return F.dropout(problem.head(y), 0.5).sin().sum()

    torch.manual_seed(7)
    expected = problem.run(by_hand(problem, draw))
    torch.manual_seed(7)
    found = problem.run(lambda x, hx: problem.layer(x, hx, chunk_loss=draw))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize("cls", [fusedrnn.LSTM, fusedrnn.GRU])
def test_zoneout_is_that_of_the_whole_sequence(cls):
    problem = Problem(cls, num_layers=2, zoneout=0.3, save="hidden", backend="torch_step", dtype=torch.float64)
    found = []
    for compute in (problem.kept, problem.streamed, problem.streamed):
        torch.manual_seed(7)
        found.append(problem.run(compute, list(problem.x.split(7)) if len(found) == 2 else None))
    assert_equal(found[1], found[0])
    for name, tensor in found[2].items():
        torch.testing.assert_close(tensor, found[0][name])


def test_autocast_is_the_same_in_both_passes():
    problem = Problem(save="hidden")
    with torch.autocast("cpu", torch.bfloat16):
        result, _ = problem.streamed(problem.x, None)
    result.backward()
    found = problem.layer.weight_hh_l0.grad.clone()
    problem.layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = problem.kept(problem.x, None)
    expected.backward()
    torch.testing.assert_close(found, problem.layer.weight_hh_l0.grad, rtol=2e-2, atol=2e-2)
    assert problem.layer.explain().startswith("backend 'torch_step'")


@pytest.mark.parametrize("kind", ["tensor", "generator"])
def test_offloading_takes_the_states_and_input_that_cannot_be_read_again(kind):
    plain, moved = Problem(save="hidden"), Problem(save="hidden", offload=offload_all())
    give = (lambda x: None) if kind == "tensor" else (lambda x: (chunk for chunk in x.split(CHUNK)))
    expected = plain.run(plain.streamed, give(plain.x))
    assert_equal(moved.run(moved.streamed, give(moved.x)), expected)
    stats = moved.layer.offloader.stats()
    assert stats.spills > 0 and 1 < stats.released == stats.pushes < -(-T // CHUNK)
    assert stats.spilled_bytes > (0 if kind == "tensor" else CHUNK * B * I * 4)


def test_a_graph_that_is_kept_gives_the_same_twice():
    problem = Problem(save="hidden")
    result, _ = problem.streamed(problem.x, None)
    result.backward(retain_graph=True)
    first = [p.grad.clone() for p in problem.layer.parameters()]
    problem.layer.zero_grad()
    result.backward()
    assert all(map(torch.equal, first, [p.grad for p in problem.layer.parameters()]))
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


def test_only_what_is_needed_gets_a_gradient():
    problem = Problem()
    problem.layer.requires_grad_(False)
    x = problem.x.clone().requires_grad_()
    problem.streamed(x, None)[0].backward()
    assert x.grad.abs().sum() > 0 and problem.layer.weight_hh_l0.grad is None
    problem.head.requires_grad_(False)
    assert not problem.streamed(problem.x, None)[0].requires_grad
    with torch.no_grad():
        assert not problem.streamed(x, None)[0].requires_grad
    assert problem.layer(problem.x, chunk_loss=lambda y, at: y.sum())[1][0].grad_fn is None


def test_nothing_outlives_its_segment():
    problem = Problem(save="hidden")
    alive, seen = [], []

    def loss(y, at):
        seen.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(y.untyped_storage()))
        return problem.head(y).softmax(-1).sin().sum()

    gc.collect()
    gc.disable()
    try:
        result, _ = problem.layer(problem.x, chunk_loss=loss)
        assert not any(ref() for ref in alive)
        result.backward()
    finally:
        gc.enable()
    assert len(seen) == 2 * -(-T // CHUNK) and not any(seen)


class _Long:
    """A layer that streams segments of four steps, with the states between them on a disk."""

    def __init__(self, folder, monkeypatch, block):
        monkeypatch.setattr(results, "_BLOCK", block)
        self.layer = fusedrnn.LSTM(I, H, save="hidden", chunk=4, offload=full_device(spill_dir=folder))

    def step(self, segments, at_end=lambda: None):
        x = np.zeros((4 * segments, 4, I), np.float32)

        def loss(y, steps):
            if steps.stop == len(x):
                at_end()
            return y.sum()

        return lambda: self.layer(x, chunk_loss=loss)[0].backward()


def test_a_longer_sequence_takes_no_more_memory(tmp_path, monkeypatch):
    long = _Long(tmp_path, monkeypatch, 4096)
    long.step(2)()
    peaks = [allocated_bytes(long.step(segments)) for segments in (64, 256)]
    assert long.layer.offloader.stats().spilled_bytes > 256 * 2 * 4 * H * 4
    assert peaks[1] < 1.01 * peaks[0]


def test_a_segment_leaves_hardly_any_objects(tmp_path, monkeypatch):
    long, traced = _Long(tmp_path, monkeypatch, 1 << 16), []

    def note():
        gc.collect()
        traced.append(tracemalloc.get_traced_memory()[0])

    long.step(64)()
    tracemalloc.start(1)
    try:
        for segments in (64, 1024):
            long.step(segments, note)()
    finally:
        tracemalloc.stop()
    # Both passes note their end, the backward pass first of all its segments.
    kept = (traced[2] - traced[0]) / 960
    array = 4 * 4 * I * 4
    assert kept - array < 150


def test_two_passes_in_one_graph():
    problem = Problem(save="hidden")
    a, state = problem.streamed(problem.x, None)
    b, _ = problem.streamed(problem.x, state)
    (a + b).backward()
    found = problem.layer.weight_hh_l0.grad.clone()
    problem.layer.zero_grad()
    a, state = problem.kept(problem.x, None)
    b, _ = problem.kept(problem.x, state)
    (a + b).backward()
    torch.testing.assert_close(found, problem.layer.weight_hh_l0.grad)


def test_an_error_in_the_loss_loses_nothing():
    problem = Problem(save="hidden", offload=offload_all())
    expected = problem.run(problem.streamed)
    fails: list[bool] = []

    def failing(y, at):
        if fails.pop():
            raise ArithmeticError("in the loss")
        return problem.loss(y, at)

    for calls in (2, 6):
        fails[:] = [True] + [False] * (calls - 1)
        with pytest.raises(ArithmeticError, match="in the loss"):
            problem.layer(problem.x, chunk_loss=failing)[0].backward()
        assert_equal(problem.run(problem.streamed), expected)
    gc.collect()
    stats = problem.layer.offloader.stats()
    assert stats.pushes == stats.released + stats.dropped


def test_a_segment_without_a_chunk_is_chosen_by_bytes():
    layer = fusedrnn.LSTM(I, 128)
    x = torch.randn(3000, 4, I)
    lengths = []
    layer(x, chunk_loss=lambda y, at: lengths.append(len(y)) or y.sum())
    assert lengths == [512] * 5 + [440]


@pytest.mark.parametrize("backward", ["truncated", "full"])
@pytest.mark.parametrize("kind", ["tensor", "batch first", "array", "generator"])
def test_stream_yields_chunk_by_chunk(backward, kind):
    problem = Problem(batch_first=kind == "batch first")
    time = problem.time
    pieces = problem.x.split(CHUNK, time)
    source = {"array": problem.x.numpy(), "generator": iter(pieces)}.get(kind, problem.x)
    resets = torch.rand(problem.x.shape[:2], generator=torch.Generator().manual_seed(1)) < 0.1
    losses, state = [], None
    for piece, part in zip(pieces, resets.split(CHUNK, time), strict=True):
        y, state = problem.layer(piece, state, part)
        losses.append(y.sin().sum())
        state = tuple(s.detach() for s in state) if backward == "truncated" else state
    sum(losses).backward()
    expected = problem.layer.weight_hh_l0.grad.clone()
    problem.layer.zero_grad()
    outputs, states = zip(*problem.layer.stream(source, steps=CHUNK, backward=backward, resets=resets), strict=True)
    found = [y.sin().sum() for y in outputs]
    sum(found).backward()
    assert [loss.item() for loss in found] == [loss.item() for loss in losses]
    assert torch.equal(states[-1][1], state[1])
    torch.testing.assert_close(problem.layer.weight_hh_l0.grad, expected)


def test_stream_can_be_left_early():
    problem = Problem()
    for y, _ in problem.layer.stream(problem.x.numpy(), steps=7):
        assert len(y) == 7
        break
    gru = fusedrnn.GRU(I, H)
    assert sum(len(y) for y, _ in gru.stream(problem.x, torch.zeros(1, B, H))) == T
