"""How results are compared: one table of tolerances, float64 as the reference, NaN in fresh memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fusedrnn.offloading import OffloadConfig, OffloadHooks

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (2e-4, 2e-6),
}
"""Per dtype: relative and absolute tolerance against float64; the absolute one is in units of the largest value."""


def assert_close(actual: Tensor, exact: Tensor, name: str, dtype: torch.dtype | None = None) -> None:
    """Raise AssertionError unless `actual` agrees with `exact` within the tolerance of its dtype (or `dtype`)."""
    actual, exact = actual.detach(), exact.detach()
    relative, absolute = TOLERANCES[dtype or actual.dtype]
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if exact.numel():
        scale = max(1.0, float(exact.abs().max()))
        difference = (actual.double() - exact.double()).abs()
        allowed = absolute * scale + relative * exact.double().abs()
        worst = float((difference - allowed).max())
        assert worst <= 0, f"{name}: off by {float(difference.max()):.3g}, {worst:.3g} more than allowed"


def assert_no_worse_than_torch(
    actual: Tensor, theirs: Tensor, exact: Tensor, name: str, factor: float = 2.0, floor: float | None = None
) -> None:
    """Raise AssertionError if the error of `actual` against `exact` is above `factor` times that of `theirs`.

    Errors are root mean squares; `floor`, by default half a unit in the last place of the dtype at the largest value,
    keeps a lucky `theirs` from being the measure.
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"

    def error(tensor: Tensor) -> float:
        return float((tensor.detach().double() - exact.double()).pow(2).mean().sqrt())

    if floor is None:
        floor = torch.finfo(actual.dtype).eps / 2 * float(exact.abs().max())
    ours, limit = error(actual), factor * max(error(theirs), floor)
    assert ours <= limit, f"{name}: error {ours:.3g}, allowed {limit:.3g} ({factor} times torch's)"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory from `torch.empty` and its like with NaN, so that what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def twin(module: nn.RNNBase, dtype: torch.dtype = torch.float64) -> nn.RNNBase:
    """Return torch's own LSTM or GRU with the module's weights in another dtype.

    A layer with `layer_norm`, of which torch has none, gets one of its own class that autograd records step by step.
    """
    names = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
    options = {name: getattr(module, name) for name in names}
    other: nn.RNNBase
    if getattr(module, "layer_norm", False):
        kind: Any = type(module)
        other = kind(
            module.input_size, module.hidden_size, **options, layer_norm=True, backend="reference", dtype=dtype
        )
    elif isinstance(module, nn.LSTM):
        other = nn.LSTM(module.input_size, module.hidden_size, **options, proj_size=module.proj_size, dtype=dtype)
    else:
        other = nn.GRU(module.input_size, module.hidden_size, **options, dtype=dtype)
    other.load_state_dict(module.state_dict())
    return other.train(module.training)


def results(
    module: nn.RNNBase,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """Run a module forward and backward, with a random gradient for each output; return every result by name.

    Gradients of a seed are the same for every dtype, so that results of two modules can be compared.
    """
    dtype = next(module.parameters()).dtype
    packed = x if isinstance(x, PackedSequence) else None
    data = (x.data if isinstance(x, PackedSequence) else x).detach().to(dtype).requires_grad_()
    x = data if packed is None else PackedSequence(data, *packed[1:])
    single = isinstance(hx, Tensor)
    given = () if hx is None else (hx,) if isinstance(hx, Tensor) else hx
    states = tuple(state.detach().to(dtype).requires_grad_() for state in given)
    module.zero_grad()
    out, after = module(x, (states[0] if single else states) if states else None)
    outputs = (out if packed is None else out.data, *((after,) if isinstance(after, Tensor) else after))
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    torch.autograd.backward(outputs, grads, retain_graph=retain_graph)
    found: dict[str, Tensor | None] = dict(zip("yhc", outputs, strict=False)) | {"dx": data.grad}
    found |= {f"d{name}0": state.grad for name, state in zip("hc", states, strict=False)}
    found |= {f"d{name}": weight.grad for name, weight in module.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}


def assert_agrees_with_float64(module: nn.RNNBase, x: Tensor | PackedSequence, hx: Any = None) -> None:
    """Raise AssertionError unless a layer's results, as `results` returns them, agree with those of its `twin`."""
    with poisoned():
        ours = results(module, x, hx)
    exact = results(twin(module), x, hx)
    assert ours.keys() == exact.keys()
    for name in exact:
        assert_close(ours[name], exact[name], name)


def full_device(**options: Any) -> OffloadConfig:
    """Return a configuration as for a device that is full: all that may be spilled is, down to small tensors.

    Args:
        **options: Fields of `OffloadConfig` that shall differ.
    """
    small: dict[str, Any] = {"occupancy": lambda: 1.0, "min_bytes": 256, "ring_slots": 2, "chunk_bytes": 1024}
    return OffloadConfig(**small | options)


def offload_all() -> OffloadHooks:
    """Return a `fusedrnn.offload()` for which the device is full, so that offloading can be tried on any machine."""
    return OffloadHooks(full_device())
