"""Layers that a compiler leaves as they are. Imported only while it compiles, since the import loads the compiler."""

from collections.abc import Callable
from typing import Any

import torch

from fusedrnn.functional import run_layers
from fusedrnn.streaming import run_streamed

run_uncompiled = torch.compiler.disable(
    run_layers, reason="an offloading layer moves its buffers itself, between graphs: compile without fullgraph=True"
)

run_streamed_uncompiled = torch.compiler.disable(
    run_streamed, reason="a streamed sequence reads and copies on threads of its own: compile without fullgraph=True"
)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


call_uncompiled = torch.compiler.disable(
    _call, reason="offload() moves saved tensors itself, between graphs: compile without fullgraph=True, or inside it"
)
