"""One wording for every complaint about an argument: its name, what must hold, what came, and what to do."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def require_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}")


def require_shape(name: str, tensor: Tensor, letters: str, shape: Sequence[int]) -> None:
    """Raise ValueError unless `tensor` has this shape; `letters` is the shape in words, such as "(T, B, I)"."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"`{name}` must have shape {letters} = {tuple(shape)}, got {tuple(tensor.shape)}")


def require_like(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, model: str) -> None:
    """Raise ValueError unless `tensor` has the dtype and device of `model`, the name of what it must agree with."""
    if tensor.dtype != dtype:
        raise ValueError(
            f"`{name}` must have the dtype of {model} = {dtype}, got {tensor.dtype}: convert it with `.to({dtype})`"
        )
    if tensor.device != device:
        raise ValueError(
            f"`{name}` must be on the device of {model} = {device}, got {tensor.device}: move it with `.to('{device}')`"
        )


def require_floating(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` holds float16, bfloat16, float32 or float64."""
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"`{name}` must be of dtype float16, bfloat16, float32 or float64, got {tensor.dtype}: convert it with "
            "`.float()`"
        )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def require_chunk(value: Any) -> None:
    """Raise ValueError unless `value` is "auto" or a number of timesteps."""
    if value != "auto" and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise ValueError(f'`chunk` must be "auto" or a number of timesteps of at least 1, got {value!r}')


def require_clip(value: Any) -> None:
    """Raise ValueError unless `value` is None or a number above 0."""
    if value is not None and not (_is_number(value) and value > 0):
        raise ValueError(f"`clip_recurrent_grad` must be None or a number above 0, got {value!r}")


def require_zoneout(value: Any) -> None:
    """Raise ValueError unless `value` is a probability below 1."""
    if not (_is_number(value) and 0 <= value < 1):
        raise ValueError(f"`zoneout` must be a probability of at least 0 and below 1, got {value!r}")


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def budget_bytes(value: Any) -> int | None:
    """Return a memory budget in bytes, or None where there is none.

    Raises:
        ValueError: If `value` is neither None, nor a number of bytes, nor a string such as "2GiB".
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]I?B|)", value.strip().upper()) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f'`memory_budget` must be None, a number of bytes, or a string such as "512MiB" or "2GiB", got {value!r}'
        )
    return int(float(match[1]) * _UNITS[match[2]])


def size(nbytes: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def under_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for the tensor's device, so that dtypes need not agree."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
