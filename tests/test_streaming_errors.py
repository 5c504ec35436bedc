"""What cannot be streamed is refused in words, and what fails on the way is said where it happened."""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import fusedrnn

I, H = 5, 8
x = torch.randn(20, 3, I)


def loss(y, at):
    return y.sum()


LAYER = fusedrnn.LSTM(I, H, chunk=8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: LAYER(x, output="whole"),
            ValueError,
            "`output` must be one of 'sequence', 'last', 'host', got 'whole'",
        ),
        (lambda: LAYER(x, chunk_loss=3), TypeError, "`chunk_loss` must be a function .* got 3"),
        (lambda: LAYER(x, chunk_loss=loss, output="host"), ValueError, "leave `output` as it is"),
        (lambda: LAYER(x, chunk_loss=lambda y, at: y), ValueError, r"one number, got shape \(8, 3, 8\): sum"),
        (lambda: LAYER(x, chunk_loss=lambda y, at: 1.0), ValueError, "one number, got float"),
        (lambda: LAYER(7), TypeError, "`input` must be a tensor, an array or an iterable of chunks, got int"),
        (lambda: LAYER(iter([])), ValueError, "at least one chunk"),
        (lambda: LAYER([x, "x"]), TypeError, "tensors or arrays, got str as chunk 1"),
        (lambda: LAYER([x, x[:, :2]]), ValueError, r"nothing but their length, got \(20, 2, 5\)"),
        (lambda: LAYER([x, x[:, 0]]), ValueError, r"nothing but their length, got \(20, 5\)"),
        (lambda: LAYER([x[..., :4]]), ValueError, "`input_size` = 5, got 4"),
        (lambda: LAYER(x.double().numpy()), ValueError, r"dtype of the weights = torch.float32, got torch.float64"),
        (lambda: LAYER(np.zeros((2, 3, 4, I), np.float32)), ValueError, r"`input` must have shape \(T, B, I\)"),
        (lambda: LAYER([x.clone().requires_grad_()]), ValueError, "`requires_grad` as chunk 0: give the input as one"),
        (lambda: LAYER(x[:0], output="last"), ValueError, "at least one timestep"),
        (lambda: LAYER(iter([x]), resets=torch.zeros(20, 3, dtype=torch.bool)), ValueError, "length is known"),
        (lambda: LAYER(x, resets=torch.zeros(9, 3, dtype=torch.bool), output="host"), ValueError, "`resets` must have"),
        (lambda: LAYER(x, (x[:1, :, :2], x[:1]), output="host"), ValueError, "`h0` must have shape"),
        (lambda: LAYER(pack_sequence([x[0]]), output="host"), ValueError, "got a PackedSequence: pad it"),
        (lambda: fusedrnn.LSTM(I, H, bidirectional=True)(x, output="host"), ValueError, "one direction"),
        (lambda: LAYER.stream(x, backward="none"), ValueError, "`backward` must be one of 'truncated', 'full'"),
        (lambda: LAYER.stream(x, steps=0), ValueError, "`steps` must be a number of timesteps of at least 1, got 0"),
        (lambda: LAYER.stream(x.clone().requires_grad_()), ValueError, r"`input\.detach\(\)`"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_the_number_of_a_bad_chunk_is_said():
    with pytest.raises(ValueError, match="input_size") as raised:
        LAYER([x, x, x[..., :4]], chunk_loss=loss)
    assert raised.value.__notes__ == ["This is chunk 2 of `input`, counted from 0."]


def test_a_loss_from_outside_the_segment_is_refused():
    weight = torch.ones(H, requires_grad=True)
    scaled = weight * 2
    with pytest.raises(ValueError, match="`chunk_loss` must compute from its arguments and from parameters"):
        LAYER(x, chunk_loss=lambda y, at: (y * scaled).sum())
    result, _ = LAYER(x, chunk_loss=lambda y, at: (y * weight).sum())
    result.backward()
    assert weight.grad is not None


def test_no_second_derivatives():
    given = x.clone().requires_grad_()
    result, _ = LAYER(given, chunk_loss=loss)
    with pytest.raises(RuntimeError, match="first derivatives only, got a backward pass with `create_graph=True`"):
        torch.autograd.grad(result, given, create_graph=True)


@pytest.mark.parametrize("what", ["input", "parameter of the loss", "weight"])
def test_changes_in_place_are_noticed(what):
    given, scale = x.clone().requires_grad_(), torch.ones(H, requires_grad=True)
    layer = fusedrnn.LSTM(I, H, chunk=8)
    result, _ = layer(given, chunk_loss=lambda y, at: (y * scale).sum())
    with torch.no_grad():
        {"input": given, "parameter of the loss": scale, "weight": layer.weight_hh_l0}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_a_source_that_fails_is_heard():
    def chunks():
        yield x
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        LAYER(chunks(), chunk_loss=loss)
    assert torch.equal(LAYER(x, output="host")[0], LAYER(x)[0])
