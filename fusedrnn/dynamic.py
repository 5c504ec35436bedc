"""`dynamic_rnn`: any cell over time."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedrnn import _checks
from fusedrnn.offloading import OffloadConfig, OffloadHooks, offloader
from fusedrnn.recompute import recompute
from fusedrnn.stepping import Loop

_TORCH_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def dynamic_rnn(
    cell: Callable[[Any, Any], Any],
    inputs: Any,
    initial_state: Any = None,
    sequence_length: Tensor | Sequence[int] | None = None,
    swap_memory: bool | OffloadConfig | OffloadHooks = False,
    time_major: bool = True,
    save: str = "all",
) -> tuple[Any, Any]:
    """Run a cell over time.

    output_t, state_t = cell(input_t, state_{t-1}) for t < sequence_length; past it, output_t = 0 and
    state_t = state_{t-1}, row by row.

    The cell is called with all B rows at every step up to the greatest length, and not beyond. Rows past their length
    see zeros for their input, so that what the padding holds, NaN included, reaches neither results nor gradients.
    Where there is no step to run (T = 0, or no length above 0), one call with zeros tells the shape of the output. A
    cell must not change its arguments in place.

    Args:
        cell: `torch.nn.LSTMCell`, `GRUCell` or `RNNCell`, with h as the output, or any `cell(input, state) -> (output,
            state)`. Output and state are nests (tuples, lists, dicts, named tuples) of tensors [B, ...]; the state
            comes back with the structure, shapes and dtypes with which it went in.
        inputs: Nest of tensors [T, B, ...], or [B, T, ...] without `time_major`.
        initial_state: Nest of tensors [B, ...]. None stands for zeros with torch's cells, and for what the method
            `initial_state(batch, dtype, device)` or `zero_state(batch, dtype, device)` returns with others.
        sequence_length: Steps of each sequence, integers [B] from 0 to T; None for T steps each. The host reads them,
            which waits for the device if they are there.
        swap_memory: Whether tensors saved for the backward pass may move to the host while the device is nearly full;
            an `OffloadConfig` says when and how. What `fusedrnn.offload()` returns counts and explains it, too.
        time_major: Whether time comes first in inputs and outputs.
        save: What is kept for the backward pass. "all": whatever autograd records. "recompute": the states at about
            sqrt(T) borders; the steps between borders are run again in the backward pass, with the random numbers and
            the autocast of the first time, and gradients are equal bit by bit but for the rounding under autocast. The
            parameters of the cell, and leaves that it uses from its first step on, get their gradients; if it uses
            other tensors with a history, `torch.utils.checkpoint` takes over, which is slower and keeps the graph of
            all steps. First derivatives only, and no `torch.func` transforms.

    Returns:
        The outputs, a nest of tensors [T, B, ...] ([B, T, ...] without `time_major`), and the final state, of each row
        after its last step.

    Raises:
        TypeError: If an argument, or what the cell returns, is of a wrong type.
        ValueError: If structures, shapes, lengths, dtypes or devices do not agree.
        RuntimeError: In the backward pass with "recompute", if the cell uses tensors with gradients that it did not use
            in its first step, or if a second derivative is asked for.

    The semantics are those of TensorFlow's `dynamic_rnn` (tensorflow/python/ops/rnn.py). `fusedrnn.LSTM` computes what
    an `nn.LSTMCell` does here, without a call per step.
    """
    if not callable(cell):
        raise TypeError(f"`cell` must be a module or a function `cell(input, state)`, got {type(cell).__name__}")
    _checks.require_choice("save", save, ("all", "recompute"))
    xs, x_spec = _check_inputs(cell, inputs, time_major)
    T, B = xs[0].shape[:2]
    state, state_spec = _check_state(cell, xs, initial_state)
    lengths = None if sequence_length is None else _check_lengths(sequence_length, T, B)
    loop = Loop(_as_step(cell), x_spec, state_spec, lengths, T, B, xs[0].device)
    offload = offloader("swap_memory", swap_memory)
    with nullcontext() if offload is None else offload:
        if not torch.is_grad_enabled():
            results = loop.unrecorded(xs, state)
        elif save == "all":
            results = loop.recorded(xs, state)
        else:
            results = recompute(loop, cell, xs, state)
    assert loop.out_spec is not None
    n = loop.out_spec.num_leaves
    outputs = results[:n] if time_major else [y.transpose(0, 1) for y in results[:n]]
    return loop.out_spec.unflatten(outputs), state_spec.unflatten(results[n:])


def _as_step(cell: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the cell as a function `(input, state) -> (output, state)`."""
    if not isinstance(cell, _TORCH_CELLS):
        return cell
    if isinstance(cell, nn.LSTMCell):

        def lstm_step(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            state = cell(x, state)
            return state[0], state

        return lstm_step

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    return step


def _check_inputs(cell: Any, inputs: Any, time_major: bool) -> tuple[list[Tensor], pytree.TreeSpec]:
    """Check the inputs; return them as a list, time-major, and their structure."""
    order = "T, B" if time_major else "B, T"
    named, spec = pytree.tree_flatten_with_path(inputs)
    if not named:
        raise ValueError("`inputs` must hold at least one tensor, got none")
    first = named[0][1]
    for path, x in named:
        name = f"inputs{pytree.keystr(path)}"
        _checks.require_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(f"`{name}` must have shape ({order}, ...), got {tuple(x.shape)}")
        if x.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"`{name}` must have shape ({order}, ...) with ({order}) = {tuple(first.shape[:2])} as the first of "
                f"the inputs, got {tuple(x.shape)}"
            )
        _checks.require_like(name, x, x.dtype, first.device, "the first of the inputs")
    if isinstance(cell, _TORCH_CELLS):
        _checks.require_tensor("inputs", inputs)
        if inputs.dim() != 3 or inputs.shape[2] != cell.input_size:
            raise ValueError(
                f"`inputs` must have shape ({order}, I) with I = `cell.input_size` = {cell.input_size}, got "
                f"{tuple(inputs.shape)}"
            )
        dtype = inputs.dtype if _checks.under_autocast(inputs) else cell.weight_ih.dtype
        _checks.require_like("inputs", inputs, dtype, cell.weight_ih.device, "the cell's weights")
    return [x if time_major else x.transpose(0, 1) for _, x in named], spec


def _check_state(cell: Any, xs: list[Tensor], state: Any) -> tuple[list[Tensor], pytree.TreeSpec]:
    """Check or make the initial state; return it as a list, and its structure."""
    B, x = xs[0].shape[1], xs[0]
    name = "initial_state"
    if isinstance(cell, _TORCH_CELLS):
        lstm = isinstance(cell, nn.LSTMCell)
        if state is None:
            h = x.new_zeros(B, cell.hidden_size)
            state = (h, h) if lstm else h
        elif lstm:
            if not isinstance(state, (tuple, list)) or len(state) != 2:
                raise TypeError(f"`initial_state` must be a tuple (h, c) for an LSTMCell, got {type(state).__name__}")
            state = tuple(state)
        else:
            _checks.require_tensor(name, state)
    elif state is None:
        makers = (getattr(cell, method, None) for method in ("initial_state", "zero_state"))
        make = next(filter(callable, makers), None)
        if make is None:
            raise ValueError(
                "`initial_state` must be given for a cell without a method `initial_state(batch, dtype, device)` or "
                "`zero_state(batch, dtype, device)`, got None"
            )
        name = f"cell.{make.__name__}(...)"
        floating = (leaf.dtype for leaf in xs if leaf.is_floating_point() or leaf.is_complex())
        state = make(B, next(floating, torch.get_default_dtype()), x.device)
    named, spec = pytree.tree_flatten_with_path(state)
    for path, tensor in named:
        leaf = f"{name}{pytree.keystr(path)}"
        _checks.require_tensor(leaf, tensor)
        if isinstance(cell, _TORCH_CELLS):
            _checks.require_shape(leaf, tensor, "(B, H)", (B, cell.hidden_size))
            dtype = tensor.dtype if _checks.under_autocast(x) else x.dtype
            _checks.require_like(leaf, tensor, dtype, x.device, "`inputs`")
        elif tensor.dim() == 0 or tensor.shape[0] != B:
            raise ValueError(f"`{leaf}` must have shape (B, ...) with B = {B}, got {tuple(tensor.shape)}")
        _checks.require_like(leaf, tensor, tensor.dtype, x.device, "`inputs`")
    return [tensor for _, tensor in named], spec


def _check_lengths(sequence_length: Any, T: int, B: int) -> list[int]:
    """Check the lengths; return them as a list."""
    if isinstance(sequence_length, Tensor):
        dtype = sequence_length.dtype
        if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
            raise TypeError(f"`sequence_length` must hold integers, got {dtype}: convert it with `.long()`")
        _checks.require_shape("sequence_length", sequence_length, "(B,)", (B,))
        lengths = sequence_length.tolist()
    elif isinstance(sequence_length, Sequence) and all(type(length) is int for length in sequence_length):
        lengths = list(sequence_length)
        if len(lengths) != B:
            raise ValueError(f"`sequence_length` must have shape (B,) = ({B},), got ({len(lengths)},)")
    else:
        raise TypeError(
            "`sequence_length` must be a tensor or a list of integers, got "
            f"{type(sequence_length).__name__} {sequence_length!r}"
        )
    for row, length in enumerate(lengths):
        if not 0 <= length <= T:
            raise ValueError(f"`sequence_length` must lie between 0 and T = {T}, got {length} for sequence {row}")
    return lengths
