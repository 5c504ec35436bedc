"""Turning torch's LSTM and GRU layers of a model into ours where they are, and back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fusedrnn.modules import GRU, LSTM
from fusedrnn.offloading import OffloadConfig, OffloadHooks

_OURS: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: LSTM, nn.GRU: GRU}
"""Torch's layers, and what each becomes."""

_DEVICES = ("cpu", "cuda", "meta")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Conversion:
    """What `convert` or `convert_back` did; `print` shows it as a table.

    Args:
        model: The model, the same object that was given.
        converted: Names of the layers that were converted, as `model.named_modules()` has them; "" is the model
            itself. A layer that occurs several times has its first name.
        skipped: Names of the recurrent layers that stayed what they were, with the reason.
    """

    model: nn.Module = field(repr=False)
    converted: tuple[str, ...]
    skipped: dict[str, str]

    def __str__(self) -> str:
        """Return one line for each recurrent layer."""
        rows = [(name or "(the model)", "converted") for name in self.converted]
        rows += [(name or "(the model)", f"kept: {reason}") for name, reason in self.skipped.items()]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{len(self.converted)} of {len(rows)} recurrent layers converted"]
        return "\n".join([*lines, *(f"  {name:{width}}  {what}" for name, what in rows)])


def convert(
    model: nn.Module,
    *,
    save: str = "auto",
    chunk: int | str = "auto",
    backend: str = "auto",
    offload: bool | OffloadConfig | OffloadHooks = False,
) -> Conversion:
    """Make every `torch.nn.LSTM` in a model a `fusedrnn.LSTM`, and every `torch.nn.GRU` a `fusedrnn.GRU`, in place.

    Each layer stays the same object with the same parameters and only changes its class. So whatever holds on to it
    keeps working: optimizers, hooks of every kind, weight tying, pruning, parametrizations, a layer used in two places,
    attributes set on it, its training flag. The model may itself be such a layer.

    What stays as it is, with the reason in the report: subclasses of torch's layers, which may compute something else
    (`fully_shard` makes such ones: convert first), layers whose `forward` was replaced, scripted and quantized layers,
    other recurrent layers, and weights on devices or of dtypes for which there is no backend. Layers that are not
    registered in the model, such as those in a plain list, cannot be found. `quantize_dynamic` and whatever else asks
    for exactly `torch.nn.LSTM` no longer finds one; `convert_back` first.

    Args:
        model: The model, which is changed.
        save: What is kept of each timestep for the backward pass; see `fusedrnn.LSTM`.
        chunk: Timesteps per chunk, or "auto"; see `fusedrnn.LSTM`.
        backend: Who computes it; see `fusedrnn.LSTM`.
        offload: Whether activations may move to the host; see `fusedrnn.LSTM`.

    Returns:
        The model, and which layers were converted and which not and why.

    Raises:
        TypeError: If `model` is not a module, or an option is of a wrong type.
        ValueError: If an option is not among its choices. The model is then as it was.
    """
    options = {"save": save, "chunk": chunk, "backend": backend, "offload": offload}
    for theirs, ours in _OURS.items():
        _additions(theirs, ours, options)  # complains about the options before anything is changed

    def visit(module: nn.Module) -> str | None:
        base = _base(module)
        additions = _additions(base, _OURS[base], options)
        taken = [f"`{name}`" for name in additions if hasattr(module, name)]
        if taken:
            return f"it has {', '.join(taken)} of its own, which fusedrnn.{_OURS[base].__name__} would replace"
        _change_class(module, _OURS[base])
        vars(module).update(additions)
        return None

    return _walk(model, _refusal, visit)


def convert_back(model: nn.Module) -> Conversion:
    """Make every layer of ours in a model torch's own, in place: the inverse of `convert`.

    Options are forgotten. Everything else stays, as in `convert`.

    Args:
        model: The model, which is changed.

    Returns:
        The model, and which layers were converted and which not and why: subclasses of ours and layers with
        `layer_norm` stay.

    Raises:
        TypeError: If `model` is not a module.
    """
    back = {ours: theirs for theirs, ours in _OURS.items()}

    def refusal(module: nn.Module) -> str | None:
        if not isinstance(module, tuple(back)):
            return ""
        if getattr(module, "layer_norm", False):
            return "it has `layer_norm`, which torch's layer has not"
        return None if _base(module) in back else _subclass(module)

    def visit(module: nn.Module) -> None:
        ours = _base(module)
        for name in _additions(back[ours], ours, {}):
            vars(module).pop(name, None)
        _change_class(module, back[ours])

    return _walk(model, refusal, visit)


def _walk(
    model: nn.Module, refusal: Callable[[nn.Module], str | None], visit: Callable[[nn.Module], str | None]
) -> Conversion:
    """Visit every module that is not refused; a reason from either counts, "" for modules that are not meant."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    converted, skipped = [], {}
    for name, module in list(model.named_modules()):
        reason = refusal(module)
        if reason is None:
            reason = visit(module)
        if reason is None:
            converted.append(name)
        elif reason:
            skipped[name] = reason
    return Conversion(model, tuple(converted), skipped)


def _refusal(module: nn.Module) -> str | None:
    """Return why a module is not converted, "" if it is no recurrent layer, None if it may be."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        recurrent = module.original_name in {"LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"}
        return "it is compiled by torch.jit: convert the model before" if recurrent else ""
    if kind.__module__.startswith("torch.ao.") and kind.__name__ in {"LSTM", "GRU"}:
        return f"it is quantized, a {kind.__module__}.{kind.__name__}"
    for ours in _OURS.values():
        if isinstance(module, ours):
            return f"it is a fusedrnn.{ours.__name__} already"
    if not isinstance(module, tuple(_OURS)):
        wanted = " or ".join(f"torch.nn.{theirs.__name__}" for theirs in _OURS)
        return f"it is of {kind}, not a {wanted}" if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) else ""
    if _base(module) not in _OURS:
        return _subclass(module)
    if "forward" in vars(module):
        return "its `forward` was replaced"
    for name, weight in module.named_parameters():
        if weight.device.type not in _DEVICES:
            return f"`{name}` is on {weight.device}, only {', '.join(_DEVICES[:-1])} are supported"
        if weight.dtype not in _DTYPES:
            return f"`{name}` is of {weight.dtype}, only {', '.join(map(str, _DTYPES))} are supported"
    return None


def _subclass(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__} is a subclass, which may compute something else"


def _is_parametrized(module: nn.Module) -> bool:
    """Whether torch put a class made for this module in place of its own, one with a property for each weight."""
    return type(module).__module__ == parametrize.__name__


def _base(module: nn.Module) -> type[nn.Module]:
    """Return the module's class as it was before parametrization."""
    kind = type(module)
    return kind.__bases__[0] if _is_parametrized(module) else kind


def _change_class(module: nn.Module, base: type[nn.Module]) -> None:
    kind: type = base
    if _is_parametrized(module):
        # Not by changing the bases of the class that is there: deep copies of a module share it.
        kind = type(f"Parametrized{base.__name__}", (base,), dict(vars(type(module))))
    module.__class__ = kind


def _additions(theirs: type[nn.Module], ours: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that our layer with these options has and torch's has not.

    They are read off a layer that our class itself made, so that only it knows what they are. On the meta device
    initial values cost nothing and draw nothing from the random number generator.
    """
    plain = vars(theirs(1, 1, device="meta"))
    return {name: value for name, value in vars(ours(1, 1, device="meta", **options)).items() if name not in plain}
