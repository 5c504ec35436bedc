"""The call that a compiler does not look into. Imported only while it compiles, since the import loads the compiler."""

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


call_uncompiled = torch.compiler.disable(
    _call, reason="offload() moves saved tensors itself, between graphs: compile without fullgraph=True, or inside it"
)
