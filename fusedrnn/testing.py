"""How results are compared: one table of tolerances, float64 as the reference, NaN in fresh memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fusedrnn.offload import OffloadConfig, OffloadHooks

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


def twin(module: nn.LSTM, dtype: torch.dtype = torch.float64) -> nn.LSTM:
    """Return a `torch.nn.LSTM` with the module's weights in another dtype."""
    other = nn.LSTM(
        module.input_size,
        module.hidden_size,
        module.num_layers,
        module.bias,
        module.batch_first,
        module.dropout,
        module.bidirectional,
        module.proj_size,
        dtype=dtype,
    )
    other.load_state_dict(module.state_dict())
    return other.train(module.training)


def results(
    module: nn.LSTM,
    x: Tensor | PackedSequence,
    hx: tuple[Tensor, Tensor] | None = None,
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
    if hx is not None:
        hx = hx[0].detach().to(dtype).requires_grad_(), hx[1].detach().to(dtype).requires_grad_()
    module.zero_grad()
    out, (h, c) = module(x, hx)
    y = out.data if packed is not None else out
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (y, h, c)]
    torch.autograd.backward((y, h, c), grads, retain_graph=retain_graph)
    found: dict[str, Tensor | None] = {"y": y, "h": h, "c": c, "dx": data.grad}
    if hx is not None:
        found |= {"dh0": hx[0].grad, "dc0": hx[1].grad}
    found |= {f"d{name}": weight.grad for name, weight in module.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}


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
