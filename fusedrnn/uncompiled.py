"""Layers that a compiler leaves as they are. Imported only while it compiles, since the import loads the compiler."""

import torch

from fusedrnn.functional import run_layers
from fusedrnn.streaming import run_streamed

run_uncompiled = torch.compiler.disable(
    run_layers, reason="an offloading layer moves its buffers itself, between graphs: compile without fullgraph=True"
)

run_streamed_uncompiled = torch.compiler.disable(
    run_streamed, reason="a streamed sequence reads and copies on threads of its own: compile without fullgraph=True"
)
