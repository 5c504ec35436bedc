"""What a plan says of offloading against what a device made of threads counts."""

import pytest
import torch

import fusedrnn
from fusedrnn.memory import footprint
from fusedrnn.testing import full_device

LSTM, GRU = "lstm", "gru"
MAKES = {LSTM: fusedrnn.LSTM, GRU: fusedrnn.GRU}

# T, B, I, H, layers, then the options of the layer.
SHAPES = [
    (LSTM, (400, 4, 8, 64, 1), {"save": "gates"}),
    (LSTM, (400, 4, 8, 64, 1), {"save": "cells"}),
    (LSTM, (400, 4, 8, 64, 1), {"save": "hidden", "chunk": 20}),
    (LSTM, (300, 8, 32, 32, 2), {"save": "gates", "chunk": 30}),
    (LSTM, (240, 8, 32, 32, 2), {"save": "hidden", "bidirectional": True, "chunk": 60}),
    (LSTM, (250, 2, 8, 128, 3), {"save": "cells", "chunk": 16}),
    (LSTM, (250, 2, 8, 128, 1), {"save": "gates", "dtype": torch.bfloat16}),
    (LSTM, (250, 2, 8, 64, 1), {"save": "hidden", "dtype": torch.float64, "proj_size": 16}),
    (GRU, (333, 4, 8, 64, 1), {"save": "gates"}),
    (GRU, (200, 4, 64, 32, 2), {"save": "hidden", "chunk": 10}),
]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(("cell", "sizes", "options"), SHAPES, ids=lambda value: str(value).replace(" ", ""))
def test_planned_and_counted_bytes_agree_within_two_percent(cell, sizes, options, tier, tmp_path):
    T, B, I, H, layers = sizes
    # Outputs, which the user holds, are too small to be taken for the layer's.
    config = full_device(spill_dir=tmp_path if tier == "disk" else None, chunk_bytes=4 << 20)
    own = {"chunk": 25, "backend": "torch_step", **options, "offload": config}
    planned = fusedrnn.plan(I, H, layers, length=T, batch=B, cell=cell, **own)
    module = MAKES[cell](I, H, layers, **own)
    x = torch.randn(T, B, I, dtype=options.get("dtype", torch.float32))
    for _ in range(2):
        module(x)[0].float().sum().backward()
    way, counted = planned.best, module.offloader.stats()
    whole = footprint(planned.call, way.choice)
    pairs = {
        "device": (way.device_bytes - (whole.peak - whole.saved), counted.device_peak),
        "host": (way.host_bytes, module.offloader.scheduler(x.device).host.reserved if tier == "host" else 0),
        "disk": (way.disk_bytes, counted.disk_peak),
        "moved": (2 * way.moved_bytes, counted.spilled_bytes),
    }
    assert counted.spills > 0
    assert all(0.98 * real <= said <= 1.02 * real for said, real in pairs.values()), pairs
