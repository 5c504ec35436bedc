"""Layers that a compiler leaves as they are. Imported only while it compiles, since the import loads the compiler."""

import torch

from fusedrnn.functional import run_layers

run_uncompiled = torch.compiler.disable(
    run_layers, reason="an offloading layer moves its buffers itself, between graphs: compile without fullgraph=True"
)
