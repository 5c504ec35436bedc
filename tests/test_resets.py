"""Resets within sequences: every piece is as if it were run alone."""

import pytest
import torch

import fusedrnn
from fusedrnn.choice import choose
from fusedrnn.testing import assert_close, offload_all

T, B = 13, 3


def resets(*steps):
    """True at (step, sequence)."""
    found = torch.zeros(T, B, dtype=torch.bool)
    for step, sequence in steps:
        found[step, sequence] = True
    return found


SOME = resets((0, 1), (4, 0), (4, 1), (5, 1), (12, 2), (7, 0))


def alone(module, x, hx, reset):
    """Each piece of each sequence by itself with float64 torch: the output, and the states after the last pieces."""
    rows, finals = [], []
    for b in range(B):
        starts = sorted({0, *reset[:, b].nonzero().flatten().tolist()})
        pieces = []
        for first, last in zip(starts, [*starts[1:], T], strict=True):
            state = None if hx is None else tuple(s[:, b : b + 1].clone() for s in hx)
            directions = 2 if module.bidirectional else 1
            if state is not None:
                # The first piece starts from hx forwards, the last one backwards.
                if first or reset[0, b]:
                    for s in state:
                        s[::directions] = 0
                if directions == 2 and last < T:
                    for s in state:
                        s[1::2] = 0
                state = state if isinstance(module, torch.nn.LSTM) else state[0]
            y, after = module(x[first:last, b : b + 1], state)
            pieces.append((y, after if isinstance(after, tuple) else (after,)))
        rows.append(torch.cat([y for y, _ in pieces]))
        # Forward states come from the last piece, reverse ones from the first.
        last, first = pieces[-1][1], pieces[0][1]
        ends = [state.clone() for state in last]
        if module.bidirectional:
            for end, state in zip(ends, first, strict=True):
                end[1::2] = state[1::2]
        finals.append(ends)
    return torch.cat(rows, 1), [torch.cat(states, 1) for states in zip(*finals, strict=True)]


def everything(y, finals, leaves):
    generator = torch.Generator().manual_seed(3)
    outs = [y, *finals]
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


@pytest.mark.parametrize("kind", [fusedrnn.LSTM, fusedrnn.GRU], ids=["LSTM", "GRU"])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "torch_step", "save": "gates"},
        {"backend": "torch_step", "save": "hidden"},
        {"backend": "reference"},
        {"backend": "torch_step", "save": "hidden", "bidirectional": True, "num_layers": 2},
        {"backend": "torch_step", "save": "gates", "num_layers": 2},
        {"offload": offload_all(), "backend": "torch_step", "save": "gates"},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "hx"])
def test_pieces_are_as_if_run_alone(kind, options, with_state):
    module = kind(4, 5, chunk=4, **options)
    shape = (module.num_layers * (2 if module.bidirectional else 1), B, 5)
    states = [torch.randn(shape) for _ in range(2 if kind is fusedrnn.LSTM else 1)] if with_state else []
    x = torch.randn(T, B, 4)
    other = (torch.nn.LSTM if kind is fusedrnn.LSTM else torch.nn.GRU)(
        4, 5, module.num_layers, bidirectional=module.bidirectional, dtype=torch.float64
    )
    other.load_state_dict(module.state_dict())
    leaves = [t.double().requires_grad_() for t in (x, *states)]
    y, finals = alone(other, leaves[0], leaves[1:] or None, SOME)
    exact = everything(y, finals, [*leaves, *other.parameters()])
    leaves = [t.clone().requires_grad_() for t in (x, *states)]
    hx = None if not with_state else tuple(leaves[1:]) if kind is fusedrnn.LSTM else leaves[1]
    y, after = module(leaves[0], hx, resets=SOME)
    found = everything(y, after if isinstance(after, tuple) else (after,), [*leaves, *module.parameters()])
    for k, (ours, expected) in enumerate(zip(found, exact, strict=True)):
        assert_close(ours, expected, f"result {k}")


def test_cells_and_projection():
    for options in ({"save": "cells"}, {"save": "gates", "proj_size": 3}):
        module = fusedrnn.LSTM(4, 5, chunk=4, backend="torch_step", **options)
        reference = fusedrnn.LSTM(4, 5, backend="reference", proj_size=module.proj_size)
        reference.load_state_dict(module.state_dict())
        x = torch.randn(T, B, 4, requires_grad=True)
        found, expected = (
            everything(y, state, [x, *m.parameters()]) for m in (module, reference) for y, state in [m(x, resets=SOME)]
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs.double(), str(options))


def test_bits_are_those_of_the_pieces_where_all_sequences_start_anew_together():
    module = fusedrnn.LSTM(16, 16, backend="torch_step", save="gates", chunk=4)
    x = torch.randn(8, B, 16)
    together = torch.zeros(8, B, dtype=torch.bool)
    together[4] = True
    y, (h, c) = module(x, resets=together)
    first, _ = module(x[:4])
    second, after = module(x[4:])
    assert torch.equal(y, torch.cat((first, second)))
    assert torch.equal(h, after[0]) and torch.equal(c, after[1])


def test_layouts_of_resets():
    module = fusedrnn.LSTM(4, 5)
    x = torch.randn(T, B, 4)
    expected = module(x, resets=SOME)[0]
    first = fusedrnn.LSTM(4, 5, batch_first=True)
    first.load_state_dict(module.state_dict())
    assert torch.equal(first(x.transpose(0, 1), resets=SOME.T)[0].transpose(0, 1), expected)
    assert_close(module(x[:, 0], resets=SOME[:, 0])[0], expected[:, 0].double(), "one sequence")
    assert "torch_step" in module.explain()


def test_functional_form_and_second_derivatives():
    module = fusedrnn.LSTM(4, 5, backend="torch_step", save="hidden", chunk=4, dtype=torch.float64)
    x = torch.randn(T, B, 4, dtype=torch.float64, requires_grad=True)
    y, _ = fusedrnn.lstm(x, None, *module.parameters(), resets=SOME)
    assert_close(y, module(x, resets=SOME)[0], "y")
    assert torch.autograd.gradgradcheck(lambda x: module(x[:6], resets=SOME[:6])[0], (x,))


def test_compiled():
    module = fusedrnn.LSTM(4, 5, backend="torch_step", save="gates", chunk=4)
    x = torch.randn(T, B, 4, requires_grad=True)
    expected = torch.autograd.grad(module(x, resets=SOME)[0].square().sum(), [x, *module.parameters()])
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(x, resets=SOME)[0].square().sum(), [x, *module.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs.double(), "compiled")


def test_errors():
    module, x = fusedrnn.LSTM(4, 5), torch.randn(T, B, 4)
    with pytest.raises(ValueError, match=r"`resets` must have shape \(T, B\) = \(13, 3\), got \(3, 13\)"):
        module(x, resets=SOME.T)
    with pytest.raises(ValueError, match=r"`resets` must have shape \(B, T\) = \(3, 13\), got \(13, 3\)"):
        fusedrnn.LSTM(4, 5, batch_first=True)(x.transpose(0, 1), resets=SOME)
    with pytest.raises(ValueError, match=r"`resets` must have shape \(T,\) = \(13,\), got \(13, 3\)"):
        module(x[:, 0], resets=SOME)
    with pytest.raises(ValueError, match=r"`resets` must be of dtype bool, got torch.float32: compare it"):
        module(x, resets=SOME.float())
    with pytest.raises(TypeError, match=r"`resets` must be a torch.Tensor, got list"):
        module(x, resets=SOME.tolist())
    packed = torch.nn.utils.rnn.pack_sequence([x[:, 0], x[:4, 1]])
    with pytest.raises(ValueError, match="`resets` must be None for a PackedSequence, got resets: pack each piece"):
        module(packed, resets=SOME)
    with pytest.raises(RuntimeError, match="onednn: torch's operator knows no resets"):
        fusedrnn.LSTM(4, 5, backend="onednn")(x, resets=SOME)
    choose.cache_clear()
