"""The functional form: validate, choose a backend, run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedrnn import _checks
from fusedrnn.backends import NAMES, Choice
from fusedrnn.backends.base import Call, Variant, gpu_of, onednn_allowed, tf32_allowed
from fusedrnn.backends.zoneout import draw_seeds
from fusedrnn.cells import LSTM, CellSpec, States, Weights, state_dtype
from fusedrnn.choice import choose
from fusedrnn.compiled import run as run_compiled
from fusedrnn.layout import SequenceLayout
from fusedrnn.offloading import OffloadConfig, OffloadHooks, innermost, offloader
from fusedrnn.stages import run_choice, run_stages


@dataclass(frozen=True)
class Options:
    """How a layer is run; see `fusedrnn.LSTM` for the meaning of each.

    Raises:
        ValueError: If one of them is not among its choices.
    """

    save: str = "auto"
    chunk: int | str = "auto"
    backend: str = "auto"
    offload: OffloadHooks | None = None
    clip_recurrent_grad: float | None = None
    zoneout: float = 0.0
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        _checks.require_choice("save", self.save, ("auto", *LSTM.modes))
        _checks.require_choice("backend", self.backend, ("auto", *NAMES))
        _checks.require_chunk(self.chunk)
        _checks.require_clip(self.clip_recurrent_grad)
        _checks.require_zoneout(self.zoneout)

    def variant(self, cells: bool) -> Variant:
        """Return how the recurrence departs from the cell's equations; `cells` says whether it returns all c."""
        clip = self.clip_recurrent_grad
        return Variant(None if clip is None else float(clip), float(self.zoneout), cells)


def lstm(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    weight_hr: Tensor | None = None,
    *,
    reverse: bool = False,
    resets: Tensor | None = None,
    save: str = "auto",
    chunk: int | str = "auto",
    backend: str = "auto",
    offload: bool | OffloadConfig | OffloadHooks = False,
    clip_recurrent_grad: float | None = None,
    return_cells: bool = False,
    memory_budget: int | str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Run one LSTM layer in one direction.

    i, f, o = sigmoid(.), g = tanh(.) of W_ih x_t + b_ih + W_hh h_{t-1} + b_hh; c_t = f c_{t-1} + i g;
    h_t = W_hr (o tanh(c_t)), without W_hr where no projection is given. The order of the gates is torch's: i, f, g, o.

    Args:
        x: Input [T, B, I].
        state: h0 [B, P] and c0 [B, H], P being the width of the output (H without a projection); None for zeros.
        weight_ih: [4H, I].
        weight_hh: [4H, P].
        bias_ih: [4H], or None.
        bias_hh: [4H], or None; both biases are given or neither.
        weight_hr: Projection [P, H], or None.
        reverse: Run from the last step to the first.
        resets: bool [T, B], true where the state starts anew, at zero, before a step; see `fusedrnn.LSTM.forward`.
        save: What is kept for the backward pass; see `fusedrnn.LSTM`.
        chunk: Timesteps per chunk, or "auto"; see `fusedrnn.LSTM`.
        backend: Who computes it; see `fusedrnn.LSTM`.
        offload: Whether activations may move to the host; see `fusedrnn.LSTM`.
        clip_recurrent_grad: Bound of the gradients between steps, or None; see `fusedrnn.LSTM`.
        return_cells: Whether all cell states are returned, too; see `fusedrnn.LSTM.forward`.
        memory_budget: Most bytes that a step may take, or None; see `fusedrnn.LSTM`.

    Returns:
        y [T, B, P], and the final states (h [B, P], c [B, H]); with `return_cells` also c_t of all steps [T, B, H].

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If shapes, dtypes or devices do not agree, or nothing keeps to the budget.
        RuntimeError: If no backend can run the call; the message has every backend's reasons.
    """
    budget = _checks.budget_bytes(memory_budget)
    options = Options(save, chunk, backend, offloader("offload", offload), clip_recurrent_grad, memory_budget=budget)
    _check_input(x, "(T, B, I)", 3)
    weights = Weights(weight_ih, weight_hh, bias_ih, bias_hh, weight_hr)
    H, P = _check_weights(x, weights)
    layout = SequenceLayout(x.shape[0], x.shape[1])
    states = None
    if state is not None:
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"`state` must be a tuple (`h0`, `c0`), got {type(state).__name__}")
        shapes = (layout.batch, P), (layout.batch, H)
        h0, c0 = check_states(state, LSTM.states, ("(B, P)", "(B, H)"), shapes, x)
        states = h0[None], c0[None]
    (y, *cells), (h, c), _ = run_layers(
        LSTM,
        x,
        states,
        [weights],
        layout,
        options,
        reverse=reverse,
        resets=check_resets(resets, layout, x),
        cells=return_cells,
    )
    return (y, (h[0], c[0]), cells[0]) if cells else (y, (h[0], c[0]))


def run_layers(
    cell: CellSpec,
    x: Tensor,
    states: States | None,
    layers: Sequence[Weights],
    layout: SequenceLayout,
    options: Options,
    *,
    directions: int = 1,
    dropout: float = 0.0,
    reverse: bool = False,
    resets: Tensor | None = None,
    sums: Mapping[int, Tensor] | None = None,
    training: bool = False,
    seeds: Tensor | None = None,
    cells: bool = False,
) -> tuple[States, States, Choice | None]:
    """Run a stack of layers whose arguments have been checked.

    Args:
        cell: What each layer computes.
        x: Input [T, B, I], or rows [rows, I] where the layout is packed.
        states: The cell's states, each [layers * directions, B, width], or None for zeros.
        layers: Weights, layer by layer, forward before reverse.
        layout: Where the rows lie.
        options: How to run.
        directions: 1, or 2 for bidirectional layers.
        dropout: Probability of dropout between layers; 0 when evaluating.
        reverse: With one direction: run from the last step to the first.
        resets: bool [T, B], true where the states start anew before a step, or None.
        sums: For a part of a sequence: sums of the gradients of weights by id(weight), to which a backend that runs
            chunk by chunk adds, so that autograd gets none from it; the final states stay in the dtype in which they
            are carried.
        training: Whether zoneout is drawn.
        seeds: int64 [layers * directions], from which it is drawn; None for fresh ones.
        cells: Whether the cell states of the last layer are an output, too.

    Returns:
        The outputs, the final states, and who ran it (None while compiling).
    """
    if torch.compiler.is_compiling() and (options.offload is not None or options.memory_budget is not None):
        from fusedrnn.uncompiled import run_uncompiled

        return run_uncompiled(
            cell,
            x,
            states,
            layers,
            layout,
            options,
            directions=directions,
            dropout=dropout,
            reverse=reverse,
            resets=resets,
            sums=sums,
            training=training,
            seeds=seeds,
            cells=cells,
        )
    x, states, layers, autocast = _under_autocast(x, states, layers)
    states = initial_states(cell, x, states, layers, layout.batch)
    compiling = torch.compiler.is_compiling()
    variant = options.variant(cells)
    if seeds is None and training and variant.zoneout:
        seeds = draw_seeds(len(layers), x.device)
    choice = None
    saving: AbstractContextManager[Any] = nullcontext()
    if not compiling:
        call = _describe(cell, x, states, layers, layout, directions)
        call = replace(call, resets=resets is not None, variant=variant, dropout=dropout)
        offload = (innermost() or options.offload) if call.grad and not call.transformed else None
        moving = None
        if offload is not None and offload.is_active(x.device):
            saving, moving = offload.hooks(), offload.config
        choice = choose(call, options.backend, options.save, options.chunk, options.memory_budget, moving)
    with autocast, saving:
        if choice is None:
            run_stage = partial(_compiled, cell, options, resets)
            out, states = run_stages(x, states, layers, directions, dropout, reverse, variant, seeds, run_stage)
        else:
            out, states = run_choice(
                cell,
                choice,
                x,
                states,
                layers,
                layout,
                directions=directions,
                dropout=dropout,
                reverse=reverse,
                resets=resets,
                variant=variant,
                seeds=seeds,
                offload=offload,
                sums=sums,
            )
    return out, states if sums is not None else tuple(state.to(x.dtype) for state in states), choice


def initial_states(cell: CellSpec, x: Tensor, states: States | None, layers: Sequence[Weights], batch: int) -> States:
    """Return the initial states in the dtypes in which they are carried with x's; zeros where none are given."""
    dtypes = [x.dtype] + [state_dtype(x.dtype)] * (len(cell.states) - 1)
    if states is not None:
        return tuple(state.to(dtype) for state, dtype in zip(states, dtypes, strict=True))
    widths = [layers[0].output_size] + [layers[0].hidden_size] * (len(cell.states) - 1)
    return tuple(
        x.new_zeros((len(layers), batch, width), dtype=dtype) for width, dtype in zip(widths, dtypes, strict=True)
    )


def _compiled(
    cell: CellSpec,
    options: Options,
    resets: Tensor | None,
    parts: list[tuple[Weights, ...]],
    reverses: list[bool],
    variant: Variant,
    seeds: Tensor | None,
    x: Tensor,
    states: States,
) -> tuple[States, States]:
    """Run one stage as an operator of torch.library."""
    how = options.backend, options.save, options.chunk
    return run_compiled(cell, parts, reverses, resets, variant, seeds, x, states, *how)


def check_states(
    states: Sequence[Any], names: Sequence[str], letters: Sequence[str], shapes: Sequence[tuple[int, ...]], x: Tensor
) -> States:
    """Return the states after checking that they are tensors of the given shapes, of x's dtype and on its device."""
    autocast = _checks.under_autocast(x)
    for name, tensor, word, shape in zip(names, states, letters, shapes, strict=False):
        _checks.require_tensor(f"{name}0", tensor)
        _checks.require_shape(f"{name}0", tensor, word, shape)
        _checks.require_like(f"{name}0", tensor, tensor.dtype if autocast else x.dtype, x.device, "the input")
    return tuple(states)


def check_resets(resets: Any, layout: SequenceLayout, x: Tensor) -> Tensor | None:
    """Return the resets [T, B] after checking them, or None."""
    if resets is None:
        return None
    _checks.require_tensor("resets", resets)
    _checks.require_shape("resets", resets, "(T, B)", (layout.steps, layout.batch))
    if resets.dtype != torch.bool:
        raise ValueError(f"`resets` must be of dtype bool, got {resets.dtype}: compare it, as in `dones != 0`")
    _checks.require_like("resets", resets, torch.bool, x.device, "the input")
    return resets


def _check_input(x: Tensor, letters: str, dims: int) -> None:
    _checks.require_tensor("x", x)
    _checks.require_floating("x", x)
    if x.dim() != dims:
        raise ValueError(f"`x` must have {dims} dimensions {letters}, got shape {tuple(x.shape)}")


def _check_weights(x: Tensor, weights: Weights) -> tuple[int, int]:
    """Check one layer's weights against each other and the input; return (H, P)."""
    for name, weight in zip(weights._fields, weights, strict=True):
        if weight is not None:
            _checks.require_tensor(name, weight)
            autocast = _checks.under_autocast(x)
            _checks.require_like(name, weight, weight.dtype if autocast else x.dtype, x.device, "`x`")
    if weights.weight_ih.dim() != 2 or weights.weight_ih.shape[0] % 4 or not weights.weight_ih.shape[0]:
        raise ValueError(f"`weight_ih` must have shape (4H, I), got {tuple(weights.weight_ih.shape)}")
    if weights.weight_hh.dim() != 2:
        raise ValueError(f"`weight_hh` must have shape (4H, P), got {tuple(weights.weight_hh.shape)}")
    H, P = weights.weight_ih.shape[0] // LSTM.gates, weights.output_size
    _checks.require_shape("weight_ih", weights.weight_ih, "(4H, I)", (4 * H, x.shape[-1]))
    _checks.require_shape("weight_hh", weights.weight_hh, "(4H, P)", (4 * H, P if weights.weight_hr is not None else H))
    if (weights.bias_ih is None) != (weights.bias_hh is None):
        raise ValueError("`bias_ih` and `bias_hh` must both be given or both be None, got one of them")
    for name in ("bias_ih", "bias_hh"):
        bias = getattr(weights, name)
        if bias is not None:
            _checks.require_shape(name, bias, "(4H,)", (4 * H,))
    if weights.weight_hr is not None:
        _checks.require_shape("weight_hr", weights.weight_hr, "(P, H)", (P, H))
    return H, P


def _under_autocast(
    x: Tensor, states: States | None, layers: Sequence[Weights]
) -> tuple[Tensor, States | None, Sequence[Weights], AbstractContextManager]:
    """Apply autocast: under it, everything but float64 is converted to its dtype, and the layers run without it."""
    if not _checks.under_autocast(x):
        return x, states, layers, nullcontext()
    device = x.device.type
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)

    x = x if x.dtype == torch.float64 else x.to(dtype)
    layers = [Weights(*map(cast, weights)) for weights in layers]  # type: ignore[arg-type]
    return x, states, layers, torch.autocast(device, enabled=False)


def _describe(
    cell: CellSpec, x: Tensor, states: States, layers: Sequence[Weights], layout: SequenceLayout, directions: int
) -> Call:
    """Collect what the choice of a backend depends on."""
    grad = torch.is_grad_enabled() and (
        x.requires_grad
        or any(state.requires_grad for state in states)
        or any(weight is not None and weight.requires_grad for weights in layers for weight in weights)
    )
    return Call(
        T=layout.steps,
        B=layout.batch,
        I=x.shape[-1],
        H=layers[0].hidden_size,
        P=layers[0].output_size,
        layers=len(layers) // directions,
        directions=directions,
        dtype=x.dtype,
        device=x.device.type,
        packed=layout.batch_sizes is not None,
        grad=grad,
        transformed=_transformed(),
        gpu=gpu_of(x.device),
        cell=cell,
        tf32=x.is_cuda and tf32_allowed(),
        onednn=onednn_allowed(),
    )


def _transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
