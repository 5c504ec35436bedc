"""Bad input is refused before anything runs, in words that name the argument, what must hold and what came."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

import fusedrnn

MODULE = fusedrnn.LSTM(3, 4, num_layers=2, batch_first=True)
X = torch.zeros(5, 7, 3)


def zeros(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((None,), TypeError, r"`input` must be a tensor, an array or an iterable of chunks, got NoneType"),
        ((zeros(5, 7, 2),), ValueError, r"`input` must have a last dimension of `input_size` = 3, got 2 in shape"),
        ((zeros(3),), ValueError, r"`input` must have shape \(B, T, I\), or \(T, I\) for one sequence, got \(3,\)"),
        ((zeros(5, 7, 1, 3),), ValueError, r"`input` must have shape \(B, T, I\)"),
        ((X.long(),), ValueError, r"`input` must be of dtype float16, bfloat16, float32 or float64, got torch\.int64"),
        ((X.double(),), ValueError, r"`input` must have the dtype of the weights = torch\.float32, got torch\.float64"),
        ((X.to("meta"),), ValueError, r"`input` must be on the device of the weights = cpu, got meta"),
        ((X, zeros(2, 5, 4)), TypeError, r"`hx` must be a tuple \(`h0`, `c0`\), got Tensor"),
        ((X, (zeros(2, 5, 4),)), TypeError, r"`hx` must be a tuple"),
        ((X, (None, zeros(2, 5, 4))), TypeError, r"`h0` must be a torch\.Tensor, got NoneType"),
        ((X, (zeros(2, 4), zeros(2, 5, 4))), ValueError, r"`h0` must have shape \(num_layers \* directions, B, H\) = "),
        ((X, (zeros(2, 5, 4), zeros(2, 5, 8))), ValueError, r"`c0` must have shape .* = \(2, 5, 4\), got \(2, 5, 8\)"),
        ((X[0], (zeros(2, 1, 4), zeros(2, 4))), ValueError, r"`h0` must have shape \(num_layers \* directions, H\) = "),
        ((X, (zeros(2, 5, 4).double(), zeros(2, 5, 4))), ValueError, r"`h0` must have the dtype of the input"),
        ((X, (zeros(2, 5, 4), zeros(2, 5, 4).to("meta"))), ValueError, r"`c0` must be on the device of the input"),
        ((PackedSequence(zeros(4, 2), torch.tensor([2, 2])),), ValueError, r"`input_size` = 3, got 2"),
    ],
)
def test_module_input(args, error, message):
    before = MODULE(X)[0]
    with pytest.raises(error, match=message):
        MODULE(*args)
    assert torch.equal(MODULE(X)[0], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "everything"}, r"`save` must be one of 'auto', 'gates', 'cells', 'hidden', got 'everything'"),
        ({"backend": "cudnn"}, r"`backend` must be one of 'auto', .*'reference', got 'cudnn'"),
        ({"chunk": 0}, r'`chunk` must be "auto" or a number of timesteps of at least 1, got 0'),
        ({"chunk": 2.0}, r"`chunk` must be .*, got 2\.0"),
        ({"chunk": True}, r"`chunk` must be .*, got True"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        fusedrnn.LSTM(3, 4, **options)


def weights(H=4, I=3, P=None):
    P = P or H
    return {
        "weight_ih": zeros(4 * H, I),
        "weight_hh": zeros(4 * H, P),
        "bias_ih": zeros(4 * H),
        "bias_hh": zeros(4 * H),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, r"`x` must be a torch\.Tensor"),
        ({"x": zeros(7, 3)}, ValueError, r"`x` must have 3 dimensions \(T, B, I\), got shape \(7, 3\)"),
        ({"x": zeros(7, 2, 3).int()}, ValueError, r"`x` must be of dtype"),
        ({"weight_ih": zeros(15, 3)}, ValueError, r"`weight_ih` must have shape \(4H, I\), got \(15, 3\)"),
        ({"weight_ih": zeros(16, 2)}, ValueError, r"`weight_ih` must have shape \(4H, I\) = \(16, 3\), got \(16, 2\)"),
        ({"weight_hh": zeros(16)}, ValueError, r"`weight_hh` must have shape \(4H, P\), got \(16,\)"),
        ({"weight_hh": zeros(16, 3)}, ValueError, r"`weight_hh` must have shape \(4H, P\) = \(16, 4\), got \(16, 3\)"),
        ({"weight_hr": zeros(2, 4)}, ValueError, r"`weight_hr` must have shape \(P, H\) = \(4, 4\), got \(2, 4\)"),
        ({"bias_hh": None}, ValueError, r"`bias_ih` and `bias_hh` must both be given or both be None"),
        ({"bias_hh": zeros(4)}, ValueError, r"`bias_hh` must have shape \(4H,\) = \(16,\), got \(4,\)"),
        ({"bias_ih": zeros(16).double()}, ValueError, r"`bias_ih` must have the dtype of `x`"),
        ({"state": (zeros(2, 4), zeros(3, 4))}, ValueError, r"`c0` must have shape \(B, H\) = \(2, 4\), got \(3, 4\)"),
        ({"save": "none"}, ValueError, r"`save` must be one of"),
    ],
)
def test_functional_input(change, error, message):
    with pytest.raises(error, match=message):
        fusedrnn.lstm(**({"x": zeros(7, 2, 3), "state": None} | weights() | change))
