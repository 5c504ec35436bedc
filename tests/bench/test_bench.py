"""The benchmarks run, say what they measured in rows that parse, and refuse to time what is wrong."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fusedrnn
from fusedrnn.bench import _measure, _report, packed
from fusedrnn.bench.__main__ import COMMANDS, main

COLUMNS = {
    *("kernel", "mode", "metric", "shape", "p20", "p50", "p80"),
    *("device", "torch", "triton", "commit", "date"),
}
TINY = {
    "train": ["--length", "60", "--steps", "3", "--batch", "2", "--hidden", "8", "--layers", "2"],
    "long": ["--batch", "2", "--units", "8", "--lengths", "4", "--repeats", "1", "--modes", "torch", "auto"],
    "setup": ["--batch", "2", "--units", "8", "--lengths", "3"],
    "packed": ["--longest", "12", "--batch", "3", "--input", "3", "--units", "8", "--repeats", "1", "--bidirectional"],
    "stream": ["--lengths", "64", "128", "--batch", "2", "--inputs", "3", "--units", "4", "--repeats", "1"],
    "plan": ["--length", "64", "--batch", "2", "--inputs", "3", "--units", "8", "--backend", "torch_step", "--check"],
    "shapes": ["--size", "6", "2", "3", "8", "--repeats", "2"],
}


@pytest.mark.parametrize("command", TINY)
def test_command_runs_and_its_rows_have_all_columns(command, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main([command, "--quiet", "--json", str(file), *TINY[command]]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        assert set(row) == COLUMNS
        assert row["p20"] <= row["p50"] <= row["p80"]
        assert row["torch"] == torch.__version__
    assert {row["kernel"] for row in rows} & {"fusedrnn.LSTM", "fusedrnn.plan"}


def test_training_lets_the_loss_fall_and_is_the_same_for_both_contenders():
    from fusedrnn.bench.train import Config, train

    options = {"length": 100, "steps": 12, "batch": 4, "hidden": 32, "layers": 1, "lr": 1e-2, "seed": 0}
    runs = {
        kernel: train(
            Config(kernel, **options, device="cpu", options={"save": "hidden"} if kernel == _measure.OURS else {})
        )
        for kernel in (_measure.OURS, _measure.TORCH)
    }
    for result in runs.values():
        assert result.bits[-1] < result.bits[0] - 1
    for ours, theirs in zip(*(result.bits for result in runs.values()), strict=True):
        assert abs(ours - theirs) < 1e-3


def test_every_command_exists():
    for name in COMMANDS:
        assert (Path(_report.__file__).parent / f"{name.replace('-', '_')}.py").exists(), name


def test_a_wrong_contender_is_not_timed(monkeypatch, capsys):
    class Wrong(fusedrnn.LSTM):
        def forward(self, x, hx=None):
            y, state = super().forward(x, hx)
            return y * 1.0001, state

    def make(job):
        return Wrong(job.I, job.H)

    job = _measure.Job("auto", 1, 1, 1, 1)
    with pytest.raises(_measure.NumericsError, match=r"y is off by .* no times are shown"):
        _measure.check_numerics([job], make)
    monkeypatch.setattr(_measure.Job, "module", make)
    monkeypatch.setattr("fusedrnn.bench.shapes.check_numerics", lambda jobs: _measure.check_numerics(jobs, make))
    assert main(["shapes", "--quiet", *TINY["shapes"]]) == 1
    out = capsys.readouterr().out
    assert "is wrong" in out and "ratio" not in out


def test_the_clock_is_read_after_the_device_has_finished():
    order = []
    found = _measure.times(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, lambda: order.append("wait"), warm_up=1
    )
    assert order == ["wait", "a", "wait", "wait", "b", "wait"] * 3
    assert {name: len(values) for name, values in found.items()} == {"a": 2, "b": 2}


ALLOCATE = """
import sys, torch
from fusedrnn.bench import _measure
size = int(sys.argv[1]) << 20
torch.ones(1)
print(_measure.peak_bytes(lambda: torch.ones(size // 4)))
"""


def test_peak_memory_sees_a_known_allocation():
    done = subprocess.run([sys.executable, "-c", ALLOCATE, "200"], capture_output=True, text=True, check=True)
    assert 180 << 20 <= int(done.stdout) <= 220 << 20


def test_percentiles_are_interpolated():
    assert _report.percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx((2.0, 3.5, 5.0))


def test_training_with_offloading_gives_the_same_losses(tmp_path, capsys):
    file = tmp_path / "rows.json"
    # Ten chunks of 4 MiB, so that the ring is not enough.
    sizes = ["--length", "2560", "--steps", "2", "--batch", "8", "--hidden", "128"]
    assert main(["train", "--quiet", "--offload", "--json", str(file), *sizes]) == 0
    assert "all 2 losses are the same, bit by bit" in capsys.readouterr().out
    moved = {
        row["mode"]: row["p50"]
        for row in map(json.loads, file.read_text().splitlines())
        if row["metric"] == "moved_bytes_per_step"
    }
    assert moved["auto"] == 0 and moved["auto, offload"] > 0


def test_a_loss_that_offloading_changes_is_an_error(monkeypatch, capsys):
    from fusedrnn.bench import train

    results = iter([train.Result([2.0], [1.0], 0, 0, ""), train.Result([2.5], [1.0], 0, 0, "")])
    monkeypatch.setattr(train, "_run", lambda config, report: next(results))
    assert main(["train", "--quiet", "--offload", *TINY["train"]]) == 1
    assert "offloading changed the losses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2000,1500,62", (2000, 1500, 62)),
        ("3,9,1", (9, 3, 1)),
        ("7", (7,)),
        ("2000:62:1", (2000,)),
        ("2:10:5", (10, 8, 6, 4, 2)),
    ],
)
def test_lengths_as_a_list_or_a_range(text, found):
    assert packed.lengths(text) == found


def test_a_range_of_lengths_has_both_ends():
    found = packed.lengths("2000:62:32")
    assert len(found) == 32 and (found[0], found[-1]) == (2000, 62)
    assert {a - b for a, b in pairwise(found)} <= {62, 63}


@pytest.mark.parametrize("text", ["", "3,x", "5,0", "2000:62", "2000:62:0", "2000:62:-1", "1:2:3:4", "9:-9:3"])
def test_lengths_that_are_none_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["packed", f"--lengths={text}"])
    assert f"2000,1500,62 or FROM:TO:COUNT such as 2000:62:32, got {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "3,2", "--batch", "3"], "--batch must be the number of --lengths, 2, or left out, got 3"),
        (["--longest", "0"], "--longest and --batch must be at least 1, got 0 and None"),
        (["--batch", "0"], "--longest and --batch must be at least 1, got 2000 and 0"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(SystemExit, match=message):
        main(["packed", *options])


@pytest.mark.parametrize("option", ["--mode", "--save"])
def test_packed_runs_the_lengths_and_the_mode_that_are_asked_for(option, tmp_path, capsys):
    file = tmp_path / "rows.json"
    options = ["--lengths", "4,7,2", option, "hidden", "--input", "3", "--units", "8", "--repeats", "1"]
    assert main(["packed", "--quiet", "--json", str(file), *options]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["shape"] for row in rows} == {"longest=7 B=3 rows=13 I=3 H=8 L=1 float32"}
    assert {row["mode"] for row in rows if row["kernel"] == _measure.OURS} == {"packed, hidden"}
    assert "3 sequences of 7 to 2 steps: 62% of the padded rows" in capsys.readouterr().out


def test_the_mode_reaches_the_layer(monkeypatch):
    made = []

    class Watched(fusedrnn.LSTM):
        def __init__(self, *args, **options):
            made.append(options["save"])
            super().__init__(*args, **options)

    monkeypatch.setattr(packed.fusedrnn, "LSTM", Watched)
    sizes = packed.Sizes((4, 2), 3, 8, bidirectional=False, save="cells")
    packed._step(f"{_measure.OURS}, packed", sizes, "cpu", 0)()
    assert made == ["cells"]


def test_packed_results_that_are_wrong_are_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(packed, "twin", lambda module: fusedrnn.LSTM(5, 16).double())
    assert main(["packed", "--quiet", *TINY["packed"][:-1]]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "fusedrnn.LSTM on packed input is wrong" in out and "no times are shown" in out and "padded rows" not in out


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device, capsys):
    with pytest.raises(SystemExit):
        main(["setup", "--device", device])
    assert f"must be cpu, or cuda or cuda:N of the {torch.cuda.device_count()} CUDA devices" in capsys.readouterr().err
