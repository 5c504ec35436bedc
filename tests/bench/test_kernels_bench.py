"""`fusedrnn-bench kernels`, in a process of its own: other tests of this one interpret the kernels."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# Not imported here: kernels that are to be interpreted need to be the first to import it.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def bench(*options, **environment):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "fusedrnn.bench", "kernels", "--quiet", *options],
        capture_output=True,
        text=True,
        env=env | {"COLUMNS": "300"} | environment,
    )


def test_reports_refusals_rows_and_the_table_of_choices(tmp_path):
    rows, choices = tmp_path / "rows.json", tmp_path / "CONFIGS.md"
    done = bench(
        *(
            "--units",
            "32",
            "4096",
            "--batch",
            "16",
            "--dtypes",
            "bf16",
            "--arch",
            "sm_80",
            "--only",
            "sequence",
            "recompute",
        ),
        *("--json", str(rows), "--markdown", str(choices)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in ("sequence forward", "sequence backward", "recompute"):
        assert f"{kernel}, by compile report" in done.stdout
    assert "not measured" in done.stdout and "B=16, H=4096 with 16-bit weights would need" in done.stdout
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    by_name = {(row["kernel"], row["metric"]): row["p50"] for row in found if row["shape"] == "B=16 H=32 bf16"}
    assert by_name["sequence forward", "spills"] == by_name["sequence backward", "spills"] == 0
    assert by_name["sequence forward", "programs"] == 2
    assert 0 < by_name["sequence forward", "floor_seconds"] <= by_name["sequence forward", "model_seconds"] < 1e-4
    assert all(row["device"] == "sm_80, by compile report" for row in found)
    lines = [line for line in choices.read_text().splitlines() if line.startswith("| ") and "sm_80" in line]
    assert len(lines) == 2
    assert "16x16x4" in lines[0] and "HMMA" in lines[0] and "refused" in lines[1]


def test_interpreted_kernels_have_no_report():
    done = bench(TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "unset TRITON_INTERPRET" in done.stderr
