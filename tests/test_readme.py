"""The README's table of what is supported is computed here, so that it cannot lie; its Python runs."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import Call, Variant
from fusedrnn.cells import LSTM as CELL
from fusedrnn.kernels._device import H100

LSTM = BACKENDS["lstm"]
README = (Path(__file__).parents[1] / "README.md").read_text()
CPU = Call(T=100, B=4, I=8, H=16, P=16, layers=1, directions=1, dtype=torch.float32, device="cpu", onednn=True)
GPU = replace(CPU, device="cuda", gpu=H100, onednn=False)
FEATURES = {
    "bfloat16, float16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "several layers, both directions, dropout": {"layers": 3, "directions": 2},
    "projection (`proj_size`)": {"P": 8},
    "packed sequences": {"packed": True},
    "empty input": {"T": 0},
    "`torch.func` transforms, forward mode": {"transformed": True},
    "`resets=`": {"resets": True},
    "`clip_recurrent_grad=`": {"variant": Variant(clip=1.0)},
    "`return_cells=True`": {"variant": Variant(cells=True)},
    "`zoneout=`": {"variant": Variant(zoneout=0.1)},
}


def table() -> str:
    rows = {"CUDA": [not backend.refusals(GPU) for backend in LSTM.values()]}
    rows["CPU"] = [not backend.refusals(CPU) for backend in LSTM.values()]
    for feature, changes in FEATURES.items():
        rows[feature] = [
            any(not backend.refusals(replace(call, **changes)) for call in (CPU, GPU)) for backend in LSTM.values()
        ]
    for save in CELL.modes:
        rows[f'`save="{save}"`'] = [save in backend.saves for backend in LSTM.values()]
    rows["`fusedrnn.GRU`"] = [name in BACKENDS["gru"] for name in LSTM]
    rows["`fusedrnn.LSTM(layer_norm=True)`"] = [name in BACKENDS["layer_norm_lstm"] for name in LSTM]
    lines = ["| | " + " | ".join(f"`{name}`" for name in LSTM) + " |", "|---" * (len(LSTM) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join("yes" if cell else "-" for cell in cells) + " |" for name, cells in rows.items()
    ]
    return "\n".join(lines)


def test_table_of_support(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert table() in README, f"the README's table should be:\n{table()}"


def test_python_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_make_target_and_command_named_exists():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
