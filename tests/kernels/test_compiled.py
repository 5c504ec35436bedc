"""Every kernel compiles to machine code for every architecture and stays within its limits. No GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ARCHITECTURES = (80, 90, 100)
STEP = {
    "_forward_kernel": {
        "module": "fusedrnn.kernels.lstm_step",
        "element": ["pre_ptr", "h_ptr"],
        "float": ["c_prev_ptr", "c_ptr"],
        "ints": ["n", "H", "stride_pre_n", "stride_c_prev_n", "stride_h_n", "stride_c_n"],
        "constants": {"STORE_GATES": True},
    },
    "_backward_kernel": {
        "module": "fusedrnn.kernels.lstm_step",
        "element": ["gates_ptr", "dy_ptr", "dh_ptr", "dgates_ptr"],
        "float": ["c_prev_ptr", "c_ptr", "dc_ptr"],
        "ints": ["n", "H", *(f"stride_{name}_n" for name in ("gates", "c_prev", "c", "dy", "dh", "dc", "dgates"))],
        "constants": {"HAS_DY": True, "HAS_DH": True},
    },
    "_recompute_kernel": {
        "module": "fusedrnn.kernels.lstm_recompute",
        "element": ["pre_ptr"],
        "float": ["c0_ptr", "c_ptr"],
        "ints": ["K", "B", "H", "row_start", "row_step", "stride_pre_n", "stride_c0_n", "stride_c_n"],
        "constants": {"SCAN": True, "PACKED": False},
    },
}


def jobs():
    for kernel, spec in STEP.items():
        for dtype in ("fp32", "bf16"):
            for capability in ARCHITECTURES:
                signature = dict.fromkeys(spec["element"], f"*{dtype}")
                signature |= dict.fromkeys(spec["float"], "*fp32") | dict.fromkeys(spec["ints"], "i32")
                if kernel == "_recompute_kernel":
                    signature |= {"offsets_ptr": "*i64", "batches_ptr": "*i32"}
                constants = spec["constants"] | {"BLOCK_B": 4, "BLOCK_H": 128}
                yield (kernel, dtype, capability), (spec["module"], kernel, signature, constants, capability)


@pytest.fixture(scope="module")
def reports():
    keys, specs = zip(*jobs(), strict=True)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_table.py")],
        input=json.dumps(specs),
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(keys, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("key", [key for key, _ in jobs()], ids=str)
def test_elementwise_kernels_are_small_and_load_wide(reports, key):
    report = reports[key]
    assert report["stack"] == report["spills"] == 0
    assert report["registers"] <= 64
    assert report["shared"] == 0
    wide = report["wide"]["128" if key[1] == "fp32" else "64"]
    assert wide >= 4, "the four gates should each be one wide load"
