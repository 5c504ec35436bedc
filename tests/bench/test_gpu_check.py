"""`make gpu-check` runs on the CPU as far as it can, and what fails in it is seen."""

import argparse
import json
import subprocess

import pytest
import torch

from fusedrnn.bench import gpu_check
from fusedrnn.bench.__main__ import main
from fusedrnn.bench._correctness import Cell
from fusedrnn.bench._peers import contenders, cudnn_algorithm


def test_dry_run(tmp_path, capsys):
    cases = tmp_path / "cases"
    cases.mkdir()
    (cases / "case_right.py").write_text("def check(LSTM, device):\n    assert LSTM(2, 3).hidden_size == 3\n")
    (cases / "case_gpu.py").write_text("def check(LSTM, device):\n    return 'skip: needs a GPU'\n")
    file = tmp_path / "rows.json"
    assert main(["gpu-check", "--dry-run", "--quiet", "--cases", str(cases), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for section in gpu_check.SECTIONS:
        assert section in out
    assert "ok case_right" in out and "skip case_gpu" in out and "all that was run is right" in out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["metric"] for row in rows} == {"forward_seconds_per_step", "seconds_per_step", "peak_bytes"}
    assert {"torch.nn.LSTM", "torch_step", "fusedrnn.LSTM"} <= {row["kernel"] for row in rows}
    assert {row["mode"] for row in rows} >= {"gates, kept", "gates, offloaded"}


def run(**options):
    args = argparse.Namespace(dry_run=True, seconds=60, cases=[], skip=[], json=None, seed=0, quiet=True)
    vars(args).update(options)
    gpu_check.run(args)
    return args.status


def test_a_wrong_result_a_broken_section_and_a_failing_case_are_failures(monkeypatch, capsys, tmp_path):
    only = {"skip": ["bits", "tests", "cases", "speed", "long"]}
    monkeypatch.setattr(gpu_check, "matrix", lambda *_: [Cell("b", "gates", "dense", "float32", "y: error 1")])
    assert run(**only) == 1
    assert "FAILED correctness: 1 of 1 checks" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "matrix", lambda *_: 1 / 0)
    assert run(**only) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    (tmp_path / "case_wrong.py").write_text("def check(LSTM, device):\n    raise AssertionError('off by 3')\n")
    assert run(skip=["correctness", "bits", "tests", "speed", "long"], cases=[str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL case_wrong" in out and "off by 3" in out


def test_refusals_are_no_failures_and_time_that_is_over_is_said(monkeypatch, capsys):
    refused = Cell("b", "gates", "dense", "float64", "refused: it computes float32")
    monkeypatch.setattr(gpu_check, "matrix", lambda *_: [refused, refused._replace(verdict="ok")])
    assert run(skip=["bits", "tests", "cases", "speed", "long"]) == 0
    assert "1 ok, 1 refused" in capsys.readouterr().out
    assert run(seconds=-1) == 0
    assert "correctness: left out, the -1 seconds are over" in capsys.readouterr().out


def test_only_a_peer_may_fail_to_be_timed(monkeypatch, capsys):
    def broken(I, H, **where):
        raise RuntimeError("an illegal memory access")

    only = {"skip": ["correctness", "bits", "cases", "long", "tests"]}
    monkeypatch.setattr(gpu_check, "contenders", lambda device: {"FlashRNN": broken})
    assert run(**only) == 0
    assert "not timed: FlashRNN" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "contenders", lambda device: {"triton_step, gates": broken})
    assert run(**only) == 1


def test_the_tests_stop_when_the_time_is_over(monkeypatch, capsys):
    def late(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(gpu_check.subprocess, "run", late)
    assert run(skip=["correctness", "bits", "cases", "speed", "long"]) == 0
    assert "stopped, the time is over: run -m pytest" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_what_to_do():
    with pytest.raises(SystemExit, match="gpu-check needs a CUDA device; --dry-run"):
        main(["gpu-check"])


@pytest.mark.parametrize(
    ("dtype", "B", "I", "H", "options", "expected"),
    [
        (torch.float16, 16, 768, 768, {}, "persistent"),
        (torch.float16, 16, 768, 768, {"layers": 2}, "standard"),
        (torch.float16, 12, 768, 768, {}, "standard"),
        (torch.float16, 136, 768, 768, {}, "standard"),
        (torch.float16, 16, 768, 768, {"multiprocessors": 80}, "standard"),
        (torch.float16, 16, 100, 768, {}, "standard"),
        (torch.float16, 16, 1152, 1152, {}, "standard"),
        (torch.bfloat16, 16, 768, 768, {}, "standard"),
        (torch.bfloat16, 16, 128, 128, {}, "persistent, small H"),
        (torch.float32, 1, 192, 192, {}, "persistent forward, standard backward"),
        (torch.float64, 16, 128, 128, {}, "standard"),
    ],
)
def test_which_algorithm_cudnn_takes(dtype, B, I, H, options, expected):
    assert cudnn_algorithm(dtype, B, I, H, **options) == expected


def test_contenders_on_a_gpu():
    assert next(iter(contenders("cuda"))) == "torch.nn.LSTM"
    assert {"triton_sequence, gates", "triton_step, hidden"} <= set(contenders("cuda"))
