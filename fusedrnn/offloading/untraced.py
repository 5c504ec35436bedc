"""Functions that a compiler calls and does not look into."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Return a function that torch.compile leaves as it is; the compiler is only loaded while it compiles."""

    @wraps(function)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            from fusedrnn.offloading.uncompiled import call_uncompiled

            return call_uncompiled(function, *args)
        return function(*args)

    return call  # type: ignore[return-value]
