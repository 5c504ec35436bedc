"""Weights from and to other frameworks, against those frameworks' equations written out here in float64."""

import re

import pytest
import torch
from torch import Tensor, nn, sigmoid, tanh
from torch.nn.utils.parametrizations import weight_norm

import fusedrnn
from fusedrnn.testing import assert_close
from fusedrnn.weights import from_keras, from_onnx, from_tensorflow, to_keras, to_onnx, to_tensorflow

T, B, I, H, P = 6, 2, 3, 4, 2


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def scan(step, x: Tensor, width: int = H, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Run `step(x_t, h, c) -> (h, c)` over [T, B, I]; return all h and the last c."""
    h, c, ys = torch.zeros(B, width).double(), torch.zeros(B, H).double(), []
    for x_t in x.flip(0) if reverse else x:
        h, c = step(x_t, h, c)
        ys.append(h)
    return torch.stack(ys[::-1] if reverse else ys), c


def keras(w: dict[str, Tensor], x: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    def step(x_t, h, c):
        z = x_t @ w["kernel"] + h @ w["recurrent_kernel"] + w.get("bias", 0)
        z0, z1, z2, z3 = z[:, :H], z[:, H : 2 * H], z[:, 2 * H : 3 * H], z[:, 3 * H :]
        c = sigmoid(z1) * c + sigmoid(z0) * tanh(z2)
        return sigmoid(z3) * tanh(c), c

    return scan(step, x, reverse=reverse)


def cudnn(w: dict[str, Tensor], x: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """What cuDNN computes from one flat buffer: the matrix [H, I] of each gate, i, f, c, o, row by row."""

    def matrices(kernel: Tensor) -> list[Tensor]:
        flat = [kernel[:, k * H : (k + 1) * H].flatten() for k in range(4)]
        return [numbers.view(H, kernel.shape[0]) for numbers in flat]

    W, R = matrices(w["kernel"]), matrices(w["recurrent_kernel"])
    bw, br = w["bias"].view(2, 4, H)

    def step(x_t, h, c):
        i, f, g, o = (x_t @ W[k].T + bw[k] + h @ R[k].T + br[k] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(c), c

    return scan(step, x, reverse=reverse)


def tensorflow(w: dict[str, Tensor], x: Tensor, forget_bias: float, reverse: bool = False) -> tuple[Tensor, Tensor]:
    projection = w.get("projection/kernel")

    def step(x_t, h, c):
        i, j, f, o = (torch.cat((x_t, h), 1) @ w["kernel"] + w["bias"]).split(H, 1)
        c = sigmoid(f + forget_bias) * c + sigmoid(i) * tanh(j)
        h = sigmoid(o) * tanh(c)
        return h if projection is None else h @ projection, c

    return scan(step, x, H if projection is None else projection.shape[1], reverse)


def onnx(w: dict[str, Tensor], x: Tensor, index: int = 0) -> tuple[Tensor, Tensor]:
    W, R = w["W"][index].view(4, H, -1), w["R"][index].view(4, H, H)
    bias = w["B"][index].view(2, 4, H).sum(0) if "B" in w else torch.zeros(4, H).double()

    def step(x_t, h, c):
        it, ot, ft, ct = (x_t @ W[k].T + h @ R[k].T + bias[k] for k in range(4))
        c = sigmoid(ft) * c + sigmoid(it) * tanh(ct)
        return sigmoid(ot) * tanh(c), c

    return scan(step, x, reverse=index == 1)


def layer(state: dict[str, Tensor], **options) -> nn.LSTM:
    """Return a layer into which a state_dict goes without a key missing or left over."""
    module = fusedrnn.LSTM(I, H, dtype=torch.float64, **options)
    module.load_state_dict(state)
    return module


def compare(module: nn.LSTM, x: Tensor, *expected: tuple[Tensor, Tensor]) -> None:
    y, (_, c) = module(x)
    assert_close(y, torch.cat([y for y, _ in expected], -1), "y")
    assert_close(c, torch.stack([c for _, c in expected]), "c")


def keras_weights(bias: int = 4) -> dict[str, Tensor]:
    found = {"kernel": rand(I, 4 * H), "recurrent_kernel": rand(H, 4 * H)}
    return found | {"bias": rand(bias * H)} if bias else found


def tensorflow_weights(**more: Tensor) -> dict[str, Tensor]:
    return {"kernel": rand(I + H, 4 * H), "bias": rand(4 * H)} | more


def onnx_weights(directions: int = 1, bias: bool = True) -> dict[str, Tensor]:
    found = {"W": rand(directions, 4 * H, I), "R": rand(directions, 4 * H, H)}
    return found | {"B": rand(directions, 8 * H)} if bias else found


@pytest.mark.parametrize("bias", [4, 8, 0], ids=["LSTM", "CuDNNLSTM", "no bias"])
def test_from_keras(bias):
    weights, x = keras_weights(bias), rand(T, B, I)
    equations = cudnn if bias == 8 else keras
    compare(layer(from_keras(weights), bias=bool(bias)), x, equations(weights, x))
    arrays = [weight.numpy() for weight in weights.values()]
    compare(layer(from_keras(arrays), bias=bool(bias)), x, equations(weights, x))
    # Bidirectional: get_weights() has the forward ones first.
    more = keras_weights(bias)
    both = [*arrays, *(weight.numpy() for weight in more.values())]
    half = len(arrays)
    state = from_keras(both[:half]) | from_keras(both[half:], reverse=True)
    module = layer(state, bias=bool(bias), bidirectional=True)
    compare(module, x, equations(weights, x), equations(more, x, reverse=True))


@pytest.mark.parametrize("kind", ["LSTM", "CuDNNLSTM"])
@pytest.mark.parametrize("bias", [True, False])
def test_to_keras(kind, bias):
    x = rand(T, B, I)
    module = nn.LSTM(I, H, bias=bias, bidirectional=True, dtype=torch.float64)
    there = [to_keras(module, reverse=reverse, cudnn=kind == "CuDNNLSTM") for reverse in (False, True)]
    names = ["kernel", "recurrent_kernel", "bias"][: 3 if bias or kind == "CuDNNLSTM" else 2]
    assert list(there[0]) == names and all(weight.is_contiguous() for weight in there[0].values())
    equations = cudnn if kind == "CuDNNLSTM" else keras
    compare(module, x, equations(there[0], x), equations(there[1], x, reverse=True))
    if bias:
        compare(
            layer(from_keras(there[0]) | from_keras(there[1], reverse=True), bidirectional=True),
            x,
            *[equations(there[k], x, reverse=bool(k)) for k in range(2)],
        )


@pytest.mark.parametrize("forget_bias", [1.0, 0.0, 2.5])
@pytest.mark.parametrize("projected", [False, True])
def test_from_and_to_tensorflow(forget_bias, projected):
    x = rand(T, B, I)
    weights = tensorflow_weights()
    options = {}
    if projected:
        weights |= {"kernel": rand(I + P, 4 * H), "projection/kernel": rand(H, P)}
        options["proj_size"] = P
    module = layer(from_tensorflow(weights, forget_bias=forget_bias), **options)
    compare(module, x, tensorflow(weights, x, forget_bias))
    back = to_tensorflow(module, forget_bias=forget_bias)
    assert back.keys() == weights.keys()
    for name, weight in back.items():
        assert_close(weight, weights[name], name)
        assert weight.is_contiguous()


def test_tensorflow_adds_one_to_the_forget_gate_unless_told_otherwise():
    x, weights = rand(T, B, I), tensorflow_weights()
    compare(layer(from_tensorflow(weights)), x, tensorflow(weights, x, 1.0))
    module = nn.LSTM(I, H, bias=False, dtype=torch.float64)
    compare(module, x, tensorflow(to_tensorflow(module), x, 1.0))
    state = from_tensorflow(weights) | from_tensorflow(tensorflow_weights(), reverse=True)
    compare(
        layer(state, bidirectional=True),
        x,
        tensorflow(weights, x, 1.0),
        tensorflow(to_tensorflow(state, reverse=True), x, 1.0, reverse=True),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
def test_from_and_to_onnx(directions, bias):
    x, weights = rand(T, B, I), onnx_weights(directions, bias)
    module = layer(from_onnx(weights), bias=bias, bidirectional=directions == 2)
    compare(module, x, *(onnx(weights, x, index) for index in range(directions)))
    back = to_onnx(module)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in back)
    assert all(weight.is_contiguous() for weight in back.values())


def test_onnx_in_the_reverse_direction_only():
    weights = onnx_weights()
    state = from_onnx(weights, reverse=True)
    x = rand(T, B, I)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    y, (_, c) = fusedrnn.lstm(x, None, *(state[f"{name}_l0_reverse"] for name in names), reverse=True)
    expected = onnx({name: torch.cat((weight, weight)) for name, weight in weights.items()}, x, index=1)
    assert_close(y, expected[0], "y")
    assert_close(c, expected[1], "c")


def test_a_stack_is_read_and_written_layer_by_layer():
    module = nn.LSTM(I, H, 2, bidirectional=True, dtype=torch.float64)
    there = {(k, reverse): to_keras(module, layer=k, reverse=reverse) for k in (0, 1) for reverse in (False, True)}
    state = {}
    for (k, reverse), weights in there.items():
        state |= from_keras(weights, layer=k, reverse=reverse)
    onnx_state = from_onnx(to_onnx(module, layer=0)) | from_onnx(to_onnx(module, layer=1), layer=1)
    x = rand(T, B, I)
    for found in (state, onnx_state):
        assert_close(layer(found, num_layers=2, bidirectional=True)(x)[0], module(x)[0], "y")


def test_layers_and_state_dicts_are_read_alike_and_parametrized_ones_by_their_value():
    module = weight_norm(nn.LSTM(I, H, dtype=torch.float64), "weight_hh_l0")
    x = rand(T, B, I)
    compare(module, x, keras(to_keras(module), x))
    plain = nn.LSTM(I, H)
    for function in (to_keras, to_tensorflow, to_onnx):
        a, b = function(plain), function(plain.state_dict())
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        assert not any(weight.requires_grad for weight in a.values())


@pytest.mark.parametrize(
    ("read", "write", "weights"),
    [
        (from_keras, to_keras, {"kernel": rand(1, 4), "recurrent_kernel": rand(1, 4), "bias": rand(4)}),
        (from_keras, to_keras, {"kernel": rand(1, 4), "recurrent_kernel": rand(1, 4), "bias": rand(8)}),
        (from_tensorflow, to_tensorflow, {"kernel": rand(2, 4), "bias": rand(4), "projection/kernel": rand(1, 1)}),
        (from_onnx, to_onnx, {"W": rand(1, 4, 1), "R": rand(1, 4, 1), "B": rand(1, 8)}),
    ],
)
def test_nothing_is_shared(read, write, weights):
    # Of width 1, where a transposed matrix is contiguous and could be had without a copy.
    def overwritten_after(function, given):
        before = {name: weight.clone() for name, weight in given.items()}
        for weight in function(given).values():
            weight.fill_(7)
        return [name for name, weight in given.items() if not torch.equal(weight, before[name])]

    state = read(weights)
    assert overwritten_after(read, weights) == []
    assert overwritten_after(write, state) == []


def test_read_only_arrays_are_taken():
    arrays = {name: weight.numpy() for name, weight in onnx_weights().items()}
    for array in arrays.values():
        array.flags.writeable = False
    assert from_onnx(arrays)["weight_ih_l0"].shape == (4 * H, I)


BAD = {
    "other activation": (from_keras, keras_weights(), {"activation": "relu"}, "`activation` must be 'tanh'.*'relu'"),
    "hard sigmoid": (
        from_keras,
        keras_weights(),
        {"recurrent_activation": "hard_sigmoid"},
        "`recurrent_activation` must be 'sigmoid'.* got 'hard_sigmoid'",
    ),
    "two directions at once": (from_keras, [rand(1)] * 6, {}, r"`weights` must be 2 or 3 arrays .* got 6: read one"),
    "wrong names": (
        from_keras,
        {"kernel": rand(1), "depthwise": rand(1)},
        {},
        r"`weights` must have `kernel`, `recurrent_kernel` and may have `bias`, got 'kernel', 'depthwise'",
    ),
    "no names": (from_onnx, {}, {}, "`weights` must have `W`, `R` and may have `B`, got none"),
    "kernel not turned": (
        from_keras,
        keras_weights() | {"kernel": rand(4 * H, I)},
        {},
        r"`kernel` must have shape \(I, 4H\) = \(16, 16\), got \(16, 3\)",
    ),
    "recurrent kernel": (
        from_keras,
        keras_weights() | {"recurrent_kernel": rand(H, 3 * H)},
        {},
        r"`recurrent_kernel` must have shape \(H, 4H\) = \(4, 16\), got \(4, 12\)",
    ),
    "dims": (from_keras, keras_weights() | {"kernel": rand(3)}, {}, r"`kernel` must have 2 dimensions \(I, 4H\), got"),
    "bias": (
        from_keras,
        keras_weights() | {"bias": rand(5)},
        {},
        r"`bias` must have shape \(4H,\) = \(16,\), or \(8H,\) = \(32,\) of a CuDNNLSTM, got \(5,\)",
    ),
    "dtypes": (
        from_keras,
        keras_weights() | {"bias": torch.zeros(4 * H)},
        {},
        r"`bias` must have the dtype of `kernel` = torch\.float64, got torch\.float32",
    ),
    "integers": (from_keras, keras_weights() | {"bias": [1] * 16}, {}, "`bias` must be of dtype .*, got torch.int64"),
    "peepholes": (
        from_tensorflow,
        tensorflow_weights(w_f_diag=rand(H)),
        {},
        "`weights` must be without peepholes, got `w_f_diag`",
    ),
    "activation of a cell": (from_tensorflow, tensorflow_weights(), {"activation": "relu"}, "`activation` must be"),
    "cell's kernel": (
        from_tensorflow,
        tensorflow_weights(kernel=rand(H, 4 * H)),
        {},
        r"`kernel` must have shape \(I \+ P, 4H\) with P = 4, I at least 1 .*, got \(4, 16\)",
    ),
    "cell's bias": (from_tensorflow, tensorflow_weights(bias=rand(3)), {}, r"`bias` must have shape \(4H,\) = \(16,\)"),
    "cell's projection": (
        from_tensorflow,
        tensorflow_weights() | {"projection/kernel": rand(P, H)},
        {},
        r"`projection/kernel` must have shape \(H, P\) = \(4, 4\), got \(2, 4\)",
    ),
    "onnx peepholes": (from_onnx, onnx_weights() | {"P": rand(1, 3 * H)}, {}, "without peepholes, got `P`"),
    "onnx activations": (
        from_onnx,
        onnx_weights(),
        {"activations": ["Sigmoid", "Relu", "Tanh"]},
        "`activations` must be 'Sigmoid', 'Tanh', 'Tanh' in each direction, got",
    ),
    "onnx input_forget": (from_onnx, onnx_weights(), {"input_forget": 1}, "`input_forget` must be 0, got 1"),
    "onnx clip": (from_onnx, onnx_weights(), {"clip": 3.0}, "`clip` must be None, got 3.0"),
    "onnx reverse of two": (
        from_onnx,
        onnx_weights(2),
        {"reverse": True},
        r"`R` must have shape \(D, 4H, H\) with D = 1 directions for `reverse`=True, got \(2, 16, 4\)",
    ),
    "onnx W": (
        from_onnx,
        onnx_weights() | {"W": rand(1, I, 4 * H)},
        {},
        r"`W` must have shape \(D, 4H, I\) = \(1, 16, 16\), got \(1, 3, 16\)",
    ),
    "onnx R": (
        from_onnx,
        onnx_weights() | {"R": rand(1, 9, H)},
        {},
        r"`R` must have shape \(D, 4H, H\) = \(1, 16, 4\)",
    ),
    "onnx B": (from_onnx, onnx_weights() | {"B": rand(1, 4 * H)}, {}, r"`B` must have shape \(D, 8H\) = \(1, 32\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case):
    read, weights, options, match = BAD[case]
    with pytest.raises(ValueError, match=match):
        read(weights, **options)


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match=r"`kernel` must be a torch\.Tensor or a numpy array, got object"):
        from_keras(keras_weights() | {"kernel": object()})
    with pytest.raises(TypeError, match=r"`lstm` must be a torch\.nn\.LSTM or its state_dict, got GRU"):
        to_keras(nn.GRU(3, 4))


def test_layers_that_are_not_there_or_do_not_exist_elsewhere():
    module = nn.LSTM(I, H)
    for options, name in (({"layer": 1}, "weight_ih_l1"), ({"reverse": True}, "weight_ih_l0_reverse")):
        for write in (to_keras, to_tensorflow):
            with pytest.raises(ValueError, match=rf"`lstm` must have `{name}`, it has not: check `layer` and"):
                write(module, **options)
    with pytest.raises(ValueError, match="strip prefixes"):
        to_onnx({f"encoder.{name}": weight for name, weight in module.state_dict().items()})
    projected = nn.LSTM(I, H, proj_size=P)
    for write, whose in ((to_keras, "Keras"), (to_onnx, "ONNX")):
        match = re.escape("`lstm` must be without a projection, got `weight_hr` of shape (2, 4): " + whose)
        with pytest.raises(ValueError, match=match):
            write(projected)
