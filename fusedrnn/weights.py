"""Weights of an LSTM layer as Keras, TensorFlow 1 and ONNX store them, and back.

Functions named `from_...` return entries of a `state_dict` with torch's names, `to_...` take a layer or its
`state_dict`. Both work on one layer (and direction) of a stack; dicts of several are joined by `|`:

    lstm.load_state_dict(from_keras(forward) | from_keras(backward, reverse=True))

Nothing is shared between what comes in and what goes out. Letters: I is the width of the input, H of the state, P of
the output (H without a projection). i, f, o are the gates, g is what is added to the cell (c or j elsewhere); torch's
order is i, f, g, o.

Where a format has one bias and torch has two, it goes to `bias_ih`, and `bias_hh` is zero; the other way they are
added.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedrnn import _checks
from fusedrnn.cells import Weights

_TORCH, _TENSORFLOW, _ONNX = "ifgo", "igfo", "iofg"
"""Orders of the gates. Keras has torch's."""


def from_keras(
    weights: Mapping[str, Any] | Sequence[Any],
    *,
    layer: int = 0,
    reverse: bool = False,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
) -> dict[str, Tensor]:
    """Return the weights of a `keras.layers.LSTM` or `CuDNNLSTM` by torch's names.

    Keras computes x kernel + h recurrent_kernel + bias with the columns of i, f, c, o side by side
    (https://keras.io/api/layers/recurrent_layers/lstm/). A bias of 8H says, as it does to Keras's own loader, that they
    are a CuDNNLSTM's: two biases, and for each gate the numbers of a matrix [H, I] row by row, called [I, H].

    Args:
        weights: `kernel` [I, 4H], `recurrent_kernel` [H, 4H] and, unless `use_bias=False`, `bias` [4H] or [8H]; by
            these names, or in this order, as `layer.get_weights()` returns them. Of a Bidirectional layer the first
            half is forward, the second to be read with `reverse=True`.
        layer: Number of the layer in torch's stack.
        reverse: Whether the names are those of the reverse direction.
        activation: The layer's `activation`, which must be "tanh".
        recurrent_activation: The layer's `recurrent_activation`, which must be "sigmoid". Keras before 2.3 had
            "hard_sigmoid" by default.

    Returns:
        `weight_ih_l0` [4H, I], `weight_hh_l0` [4H, H] and, with a bias, `bias_ih_l0` and `bias_hh_l0` [4H].

    Raises:
        TypeError: If a weight is neither a tensor nor an array.
        ValueError: If names, shapes, dtypes or devices do not agree, or the activations are others.
    """
    _require_activation("activation", activation, "tanh")
    _require_activation("recurrent_activation", recurrent_activation, "sigmoid")
    required, optional = ("kernel", "recurrent_kernel"), ("bias",)
    if not isinstance(weights, Mapping):
        if len(weights) not in (2, 3):
            raise ValueError(
                "`weights` must be 2 or 3 arrays (`kernel`, `recurrent_kernel` and perhaps `bias`), got "
                f"{len(weights)}: read one layer and direction at a time"
            )
        weights = dict(zip(required + optional, weights, strict=False))
    found = _read(weights, required, optional)
    kernel, recurrent, bias = found["kernel"], found["recurrent_kernel"], found.get("bias")
    _require_dims("kernel", kernel, "(I, 4H)", 2)
    _require_dims("recurrent_kernel", recurrent, "(H, 4H)", 2)
    H = recurrent.shape[0]
    _checks.require_shape("recurrent_kernel", recurrent, "(H, 4H)", (H, 4 * H))
    _checks.require_shape("kernel", kernel, "(I, 4H)", (kernel.shape[0], 4 * H))
    if bias is not None and bias.shape == (8 * H,):
        matrices = (_from_cudnn(kernel), _from_cudnn(recurrent))
        return _entries(layer, reverse, Weights(*matrices, *(half.clone() for half in bias.chunk(2))))
    if bias is not None and bias.shape != (4 * H,):
        raise ValueError(
            f"`bias` must have shape (4H,) = {(4 * H,)}, or (8H,) = {(8 * H,)} of a CuDNNLSTM, got {tuple(bias.shape)}"
        )
    biases = () if bias is None else (bias.clone(), torch.zeros_like(bias))
    return _entries(layer, reverse, Weights(_transposed(kernel), _transposed(recurrent), *biases))


def to_keras(
    lstm: nn.LSTM | Mapping[str, Tensor], *, layer: int = 0, reverse: bool = False, cudnn: bool = False
) -> dict[str, Tensor]:
    """Return the weights of a layer as `keras.layers.LSTM` has them, in the order that `set_weights` takes.

    Args:
        lstm: The layer, parametrized or not, or its `state_dict`.
        layer: Number of the layer in its stack.
        reverse: Whether the reverse direction is meant.
        cudnn: Whether they are for a `CuDNNLSTM`; see `from_keras`.

    Returns:
        `kernel` [I, 4H], `recurrent_kernel` [H, 4H] and `bias`, [4H] or [8H] for a CuDNNLSTM. A layer without bias
        has none, except for a CuDNNLSTM, for which it is zero.

    Raises:
        ValueError: If there is no such layer, or it has a projection, which Keras has not.
    """
    weights = _weights_of(lstm, layer, reverse)
    _refuse_projection(weights, "Keras")
    bias_ih, bias_hh = weights.bias_ih, weights.bias_hh
    if cudnn:
        if bias_ih is None or bias_hh is None:
            bias_ih = bias_hh = weights.weight_ih.new_zeros(4 * weights.hidden_size)
        return {
            "kernel": _to_cudnn(weights.weight_ih),
            "recurrent_kernel": _to_cudnn(weights.weight_hh),
            "bias": torch.cat((bias_ih, bias_hh)),
        }
    found = {"kernel": _transposed(weights.weight_ih), "recurrent_kernel": _transposed(weights.weight_hh)}
    return found if bias_ih is None or bias_hh is None else found | {"bias": bias_ih + bias_hh}


def from_tensorflow(
    weights: Mapping[str, Any],
    *,
    forget_bias: float = 1.0,
    layer: int = 0,
    reverse: bool = False,
    activation: str = "tanh",
) -> dict[str, Tensor]:
    """Return the weights of TensorFlow 1's BasicLSTMCell, LSTMCell, LSTMBlockCell or LSTMBlockFusedCell.

    These compute [x, h] kernel + bias with the columns of i, j (torch's g), f, o side by side, and f + `forget_bias` is
    what goes into the sigmoid (https://www.tensorflow.org/api_docs/python/tf/compat/v1/nn/rnn_cell/LSTMCell). The
    checkpoints of all four are alike. torch adds nothing while running, so `forget_bias` becomes part of `bias_ih`.
    For the LSTM of TensorFlow 2, see `from_keras`.

    Args:
        weights: `kernel` [I + P, 4H], `bias` [4H] and, with `num_proj`, `projection/kernel` [H, P].
        forget_bias: The cell's `forget_bias`: 1 by default there, 0 for a CudnnCompatibleLSTMCell.
        layer: Number of the layer in torch's stack.
        reverse: Whether the names are those of the reverse direction.
        activation: The cell's `activation`, which must be "tanh".

    Returns:
        `weight_ih_l0` [4H, I], `weight_hh_l0` [4H, P], `bias_ih_l0` and `bias_hh_l0` [4H] and, with a projection,
        `weight_hr_l0` [P, H].

    Raises:
        TypeError: If a weight is neither a tensor nor an array.
        ValueError: If names, shapes, dtypes or devices do not agree, there are peepholes, or the activation is another.
    """
    _require_activation("activation", activation, "tanh")
    _refuse_peepholes(weights, ("w_i_diag", "w_f_diag", "w_o_diag", "wci", "wcf", "wco"))
    found = _read(weights, ("kernel", "bias"), ("projection/kernel",))
    kernel, bias, projection = found["kernel"], found["bias"], found.get("projection/kernel")
    _require_dims("kernel", kernel, "(I + P, 4H)", 2)
    H = kernel.shape[1] // 4
    P = H
    if projection is not None:
        _require_dims("projection/kernel", projection, "(H, P)", 2)
        P = projection.shape[1]
        _checks.require_shape("projection/kernel", projection, "(H, P)", (H, P))
    if kernel.shape[1] != 4 * H or kernel.shape[0] <= P:
        raise ValueError(
            f"`kernel` must have shape (I + P, 4H) with P = {P}, I at least 1 and 4H a multiple of 4, got "
            f"{tuple(kernel.shape)}"
        )
    _checks.require_shape("bias", bias, "(4H,)", (4 * H,))
    matrix = _reordered(kernel.T, _TENSORFLOW, _TORCH)
    I = kernel.shape[0] - P
    bias_ih = _reordered(bias, _TENSORFLOW, _TORCH)
    bias_ih[H : 2 * H] += forget_bias
    hr = None if projection is None else _transposed(projection)
    return _entries(
        layer,
        reverse,
        Weights(matrix[:, :I].contiguous(), matrix[:, I:].contiguous(), bias_ih, torch.zeros_like(bias_ih), hr),
    )


def to_tensorflow(
    lstm: nn.LSTM | Mapping[str, Tensor], *, forget_bias: float = 1.0, layer: int = 0, reverse: bool = False
) -> dict[str, Tensor]:
    """Return the weights of a layer as TensorFlow 1's cells have them; see `from_tensorflow`.

    Args:
        lstm: The layer, parametrized or not, or its `state_dict`.
        forget_bias: What the cell will add to the forget gate; it is taken off here.
        layer: Number of the layer in its stack.
        reverse: Whether the reverse direction is meant.

    Returns:
        `kernel` [I + P, 4H], `bias` [4H] and, with a projection, `projection/kernel` [H, P].

    Raises:
        ValueError: If there is no such layer.
    """
    weights = _weights_of(lstm, layer, reverse)
    H = weights.hidden_size
    matrix = torch.cat((weights.weight_ih, weights.weight_hh), 1)
    if weights.bias_ih is None or weights.bias_hh is None:
        bias = matrix.new_zeros(4 * H)
    else:
        bias = weights.bias_ih + weights.bias_hh
    bias[H : 2 * H] -= forget_bias
    found = {
        "kernel": _transposed(_reordered(matrix, _TORCH, _TENSORFLOW)),
        "bias": _reordered(bias, _TORCH, _TENSORFLOW),
    }
    if weights.weight_hr is not None:
        found["projection/kernel"] = _transposed(weights.weight_hr)
    return found


def from_onnx(
    weights: Mapping[str, Any],
    *,
    layer: int = 0,
    reverse: bool = False,
    activations: Iterable[str] = ("Sigmoid", "Tanh", "Tanh"),
    input_forget: int = 0,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """Return the weights of an ONNX LSTM node by torch's names.

    ONNX computes X W^T + H R^T + Wb + Rb with the rows of i, o, f, c below each other
    (https://onnx.ai/onnx/operators/onnx__LSTM.html).

    Args:
        weights: The node's inputs `W` [D, 4H, I], `R` [D, 4H, H] and, if given there, `B` [D, 8H]; D is 2 for
            `direction="bidirectional"`, otherwise 1.
        layer: Number of the layer in torch's stack.
        reverse: With one direction: whether the names are those of the reverse direction.
        activations: The node's attribute.
        input_forget: The node's attribute, which must be 0.
        clip: The node's attribute, which must not be set.

    Returns:
        For each direction `weight_ih_l0` [4H, I], `weight_hh_l0` [4H, H] and, with `B`, `bias_ih_l0` and `bias_hh_l0`
        [4H].

    Raises:
        TypeError: If a weight is neither a tensor nor an array.
        ValueError: If names, shapes, dtypes or devices do not agree, there are peepholes (`P`), or the attributes ask
            for what torch does not compute.
    """
    _refuse_peepholes(weights, ("P",))
    activations = tuple(activations)
    if [name.lower() for name in activations] not in (["sigmoid", "tanh", "tanh"], ["sigmoid", "tanh", "tanh"] * 2):
        raise ValueError(f"`activations` must be 'Sigmoid', 'Tanh', 'Tanh' in each direction, got {activations}")
    if input_forget:
        raise ValueError(f"`input_forget` must be 0, got {input_forget}: torch's input and forget gates are separate")
    if clip is not None:
        raise ValueError(f"`clip` must be None, got {clip}: torch clips nothing before the activations")
    found = _read(weights, ("W", "R"), ("B",))
    W, R, B = found["W"], found["R"], found.get("B")
    _require_dims("W", W, "(D, 4H, I)", 3)
    _require_dims("R", R, "(D, 4H, H)", 3)
    D, H = R.shape[0], R.shape[2]
    if D not in (1, 2) or (D == 2 and reverse):
        raise ValueError(
            f"`R` must have shape (D, 4H, H) with D = 1{'' if reverse else ' or 2'} directions for "
            f"`reverse`={reverse}, got {tuple(R.shape)}"
        )
    _checks.require_shape("R", R, "(D, 4H, H)", (D, 4 * H, H))
    _checks.require_shape("W", W, "(D, 4H, I)", (D, 4 * H, W.shape[2]))
    if B is not None:
        _checks.require_shape("B", B, "(D, 8H)", (D, 8 * H))
    entries: dict[str, Tensor] = {}
    for index in range(D):
        parts = [W[index], R[index], *(() if B is None else B[index].chunk(2))]
        ordered = Weights(*(_reordered(part, _ONNX, _TORCH) for part in parts))
        entries |= _entries(layer, reverse or index == 1, ordered)
    return entries


def to_onnx(lstm: nn.LSTM | Mapping[str, Tensor], *, layer: int = 0) -> dict[str, Tensor]:
    """Return the weights of a layer, in both directions if it has two, as the inputs of an ONNX LSTM node.

    Args:
        lstm: The layer, parametrized or not, or its `state_dict`.
        layer: Number of the layer in its stack.

    Returns:
        `W` [D, 4H, I], `R` [D, 4H, H] and, with biases, `B` [D, 8H]; D is the number of directions.

    Raises:
        ValueError: If there is no such layer, or it has a projection, which ONNX has not.
    """
    directions = [_weights_of(lstm, layer, reverse=False)]
    if _has(lstm, _name("weight_ih", layer, reverse=True)):
        directions.append(_weights_of(lstm, layer, reverse=True))
    for weights in directions:
        _refuse_projection(weights, "ONNX")

    def stacked(field: str) -> Tensor:
        return torch.stack([_reordered(getattr(weights, field), _TORCH, _ONNX) for weights in directions])

    found = {"W": stacked("weight_ih"), "R": stacked("weight_hh")}
    if directions[0].bias_ih is not None:
        found["B"] = torch.cat((stacked("bias_ih"), stacked("bias_hh")), 1)
    return found


def _name(field: str, layer: int, reverse: bool) -> str:
    return f"{field}_l{layer}{'_reverse' if reverse else ''}"


def _entries(layer: int, reverse: bool, weights: Weights) -> dict[str, Tensor]:
    found = zip(weights._fields, weights, strict=True)
    return {_name(field, layer, reverse): weight for field, weight in found if weight is not None}


def _has(lstm: nn.LSTM | Mapping[str, Tensor], name: str) -> bool:
    return name in lstm if isinstance(lstm, Mapping) else hasattr(lstm, name)


def _weights_of(lstm: nn.LSTM | Mapping[str, Tensor], layer: int, reverse: bool) -> Weights:
    """Read one layer and direction. From a module by attribute, so that parametrized weights are what they come to."""
    if not isinstance(lstm, (nn.LSTM, Mapping)):
        raise TypeError(f"`lstm` must be a torch.nn.LSTM or its state_dict, got {type(lstm).__name__}")
    names = [_name(field, layer, reverse) for field in Weights._fields]
    for name in names[:2]:
        if not _has(lstm, name):
            raise ValueError(f"`lstm` must have `{name}`, it has not: check `layer` and `reverse`, and strip prefixes")
    if _has(lstm, _name("norm_ih", layer, reverse)):
        raise ValueError(
            "`lstm` must be without `layer_norm`, got a layer that has it: no other format holds its gains"
        )
    get = lstm.get if isinstance(lstm, Mapping) else lambda name: getattr(lstm, name, None)
    found = [get(name) for name in names]
    return Weights(*(None if weight is None else weight.detach() for weight in found))  # type: ignore[arg-type]


def _read(weights: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]) -> dict[str, Tensor]:
    """Return the arrays as tensors that agree in dtype and device; None counts as not given."""
    given = {name: value for name, value in weights.items() if value is not None}
    if not set(required) <= set(given) <= {*required, *optional}:
        names, more = ", ".join(f"`{name}`" for name in required), ", ".join(f"`{name}`" for name in optional)
        raise ValueError(
            f"`weights` must have {names} and may have {more}, got {', '.join(map(repr, given)) or 'none'}"
        )
    found = {name: _tensor(name, given[name]) for name in (*required, *optional) if name in given}
    first = found[required[0]]
    for name, tensor in found.items():
        _checks.require_like(name, tensor, first.dtype, first.device, f"`{required[0]}`")
    return found


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"`{name}` must be a torch.Tensor or a numpy array, got {type(value).__name__}: try `.numpy()`"
            ) from error
    _checks.require_floating(name, value)
    return value.detach()


def _reordered(tensor: Tensor, source: str, target: str) -> Tensor:
    """Return a copy of a tensor [4H, ...] with its blocks in another order of the gates."""
    blocks = dict(zip(source, tensor.chunk(4), strict=True))
    return torch.cat([blocks[gate] for gate in target])


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T.clone(memory_format=torch.contiguous_format)


def _from_cudnn(kernel: Tensor) -> Tensor:
    """Return [4H, N] from a CuDNNLSTM's [N, 4H]: of each gate the numbers of [H, N], row by row."""
    return torch.cat([gate.reshape(gate.shape[::-1]) for gate in kernel.chunk(4, 1)])


def _to_cudnn(weight: Tensor) -> Tensor:
    return torch.cat([gate.reshape(gate.shape[::-1]) for gate in weight.chunk(4)], 1)


def _require_dims(name: str, tensor: Tensor, letters: str, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"`{name}` must have {dims} dimensions {letters}, got shape {tuple(tensor.shape)}")


def _require_activation(name: str, value: str, only: str) -> None:
    if value != only:
        raise ValueError(f"`{name}` must be {only!r}, which is what torch computes, got {value!r}")


def _refuse_peepholes(weights: Mapping[str, Any], names: Sequence[str]) -> None:
    present = [f"`{name}`" for name in names if weights.get(name) is not None]
    if present:
        raise ValueError(
            f"`weights` must be without peepholes, got {', '.join(present)}: torch's gates do not see the cell; "
            "`fusedrnn.dynamic_rnn` runs such a cell"
        )


def _refuse_projection(weights: Weights, whose: str) -> None:
    if weights.weight_hr is not None:
        raise ValueError(
            f"`lstm` must be without a projection, got `weight_hr` of shape {tuple(weights.weight_hr.shape)}: "
            f"{whose} has no such layer"
        )
