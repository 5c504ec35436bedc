"""Bad arguments and bad cells are refused in words that name them, what must hold and what came."""

import re

import pytest
import torch
from torch import nn

from fusedrnn.dynamic import dynamic_rnn

X = torch.zeros(5, 2, 3)
LSTM, GRU = nn.LSTMCell(3, 4), nn.GRUCell(3, 4)


def zeros(*shape):
    return torch.zeros(shape)


def identity(x, state):
    return x, state


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((None, X), TypeError, "`cell` must be a module or a function `cell(input, state)`, got NoneType"),
        ((LSTM, None), TypeError, "`inputs` must be a torch.Tensor, got NoneType"),
        ((LSTM, [X]), TypeError, "`inputs` must be a torch.Tensor, got list"),
        ((LSTM, X[0]), ValueError, "`inputs` must have shape (T, B, I) with I = `cell.input_size` = 3, got (2, 3)"),
        ((LSTM, zeros(5, 2, 4)), ValueError, "`inputs` must have shape (T, B, I) with I = `cell.input_size` = 3, got"),
        ((LSTM, X.double()), ValueError, "`inputs` must have the dtype of the cell's weights = torch.float32, got"),
        ((LSTM, X.to("meta")), ValueError, "`inputs` must be on the device of the cell's weights = cpu, got meta"),
        ((identity, []), ValueError, "`inputs` must hold at least one tensor, got none"),
        ((identity, {"a": X, "b": (1,)}), TypeError, "`inputs['b'][0]` must be a torch.Tensor, got int"),
        ((identity, [zeros(5)]), ValueError, "`inputs[0]` must have shape (T, B, ...), got (5,)"),
        ((identity, (X, zeros(5, 3))), ValueError, "`inputs[1]` must have shape (T, B, ...) with (T, B) = (5, 2) as"),
        ((identity, (X, X.to("meta"))), ValueError, "`inputs[1]` must be on the device of the first of the inputs ="),
        ((LSTM, X, zeros(2, 4)), TypeError, "`initial_state` must be a tuple (h, c) for an LSTMCell, got Tensor"),
        ((LSTM, X, (zeros(2, 4),)), TypeError, "`initial_state` must be a tuple (h, c) for an LSTMCell, got tuple"),
        ((LSTM, X, (zeros(2, 4), 0)), TypeError, "`initial_state[1]` must be a torch.Tensor, got int"),
        ((LSTM, X, (zeros(2, 4), zeros(3, 4))), ValueError, "`initial_state[1]` must have shape (B, H) = (2, 4), got"),
        ((GRU, X, (zeros(2, 4),)), TypeError, "`initial_state` must be a torch.Tensor, got tuple"),
        ((GRU, X, zeros(2, 4).double()), ValueError, "`initial_state` must have the dtype of `inputs` = torch.float32"),
        ((GRU, X, zeros(2, 4).to("meta")), ValueError, "`initial_state` must be on the device of `inputs` = cpu, got"),
        ((identity, X), ValueError, "`initial_state` must be given for a cell without a method `initial_state(batch,"),
        ((identity, X, {"a": zeros(3)}), ValueError, "`initial_state['a']` must have shape (B, ...) with B = 2, got"),
        ((identity, X, {"a": None}), TypeError, "`initial_state['a']` must be a torch.Tensor, got NoneType"),
        ((identity, X, zeros(2).to("meta")), ValueError, "`initial_state` must be on the device of `inputs` = cpu"),
        ((GRU, X, None, 3), TypeError, "`sequence_length` must be a tensor or a list of integers, got int 3"),
        ((GRU, X, None, [3, 1.5]), TypeError, "`sequence_length` must be a tensor or a list of integers, got list [3,"),
        ((GRU, X, None, [True, 1]), TypeError, "`sequence_length` must be a tensor or a list of integers, got list"),
        ((GRU, X, None, zeros(2)), TypeError, "`sequence_length` must hold integers, got torch.float32: convert it"),
        ((GRU, X, None, zeros(2).bool()), TypeError, "`sequence_length` must hold integers, got torch.bool"),
        ((GRU, X, None, [3]), ValueError, "`sequence_length` must have shape (B,) = (2,), got (1,)"),
        ((GRU, X, None, zeros(2, 1).long()), ValueError, "`sequence_length` must have shape (B,) = (2,), got (2, 1)"),
        ((GRU, X, None, [3, 6]), ValueError, "`sequence_length` must lie between 0 and T = 5, got 6 for sequence 1"),
        ((GRU, X, None, [-1, 5]), ValueError, "`sequence_length` must lie between 0 and T = 5, got -1 for sequence 0"),
        ((GRU, X, None, None, 1), TypeError, "`swap_memory` must be True, False, an OffloadConfig or what"),
        ((GRU, X, None, None, False, True, "some"), ValueError, "`save` must be one of 'all', 'recompute', got 'some'"),
    ],
)
def test_arguments(args, error, message):
    with pytest.raises(error, match=re.escape(message)):
        dynamic_rnn(*args)


def test_batch_first_shapes_are_named_as_such():
    for cell, x in ((LSTM, zeros(5, 2)), (identity, zeros(5)), (identity, (X, zeros(2, 5)))):
        with pytest.raises(ValueError, match=r"must have shape \(B, T, "):
            dynamic_rnn(cell, x, zeros(5), time_major=False)


def test_states_from_the_cell_are_checked():
    class Cell:
        def __call__(self, x, state):
            return x, state

        def initial_state(self, batch, dtype, device):
            return (torch.zeros(batch + 1),)

    with pytest.raises(ValueError, match=r"`cell\.initial_state\(\.\.\.\)\[0\]` must have shape \(B, \.\.\.\) with B"):
        dynamic_rnn(Cell(), X)


@pytest.mark.parametrize("options", [{}, {"sequence_length": [2, 0]}, {"save": "recompute"}], ids=str)
@pytest.mark.parametrize(
    ("cell", "error", "message"),
    [
        (lambda x, s: s["h"], TypeError, "`cell` must return a tuple (output, state), got Tensor"),
        (lambda x, s: (x, s, s), TypeError, "`cell` must return a tuple (output, state), got a tuple of 3"),
        (
            lambda x, s: (x, s["h"]),
            TypeError,
            "`cell` must return states of one structure of tensors = {'h': *}, got *",
        ),
        (lambda x, s: (x, {"c": x}), TypeError, "states of one structure of tensors = {'h': *}, got {'c': *}"),
        (lambda x, s: (x, {"h": 1}), TypeError, "states of one structure of tensors = {'h': *}, got {'h': int}"),
        (lambda x, s: (x, {"h": x}), ValueError, "`cell` must return a state of the shape of the one before = (2, 4)"),
        (lambda x, s: (x, {"h": s["h"].half()}), ValueError, "a state of the dtype of the one before = torch.float32"),
        (lambda x, s: ([x, None], s), TypeError, "`cell(input, state)[0]` must be a torch.Tensor, got NoneType"),
        (lambda x, s: (x.sum(), s), ValueError, "`cell` must return outputs of shape (B = 2, ...), got ()"),
        (lambda x, s: (x.t(), s), ValueError, "`cell` must return outputs of shape (B = 2, ...), got (3, 2)"),
    ],
)
def test_what_the_cell_returns(cell, error, message, options):
    with pytest.raises(error, match=re.escape(message)):
        dynamic_rnn(cell, X, {"h": zeros(2, 4)}, **options)


@pytest.mark.parametrize("lengths", [None, [5, 0]])
def test_structures_must_stay(lengths):
    def forgetful(x, state):
        return x, (state if state[1][0] < 3 else state[0], state[1] + 1)

    def wavering(x, state):
        return (x if state[1][0] < 3 else [x]), (state[0], state[1] + 1)

    for cell, word in ((forgetful, "states"), (wavering, "outputs")):
        with pytest.raises(TypeError, match=f"`cell` must return {word} of one structure"):
            dynamic_rnn(cell, X, (zeros(2, 4), zeros(2)), lengths)
