"""`fusedrnn-bench calibrate`: what it measures is saved where `fusedrnn.machine` finds it, and predicts passes."""

import json
from functools import partial

import pytest
import torch

from fusedrnn.backends.base import Call
from fusedrnn.bench import _passes, _rates, _speeds, calibrate
from fusedrnn.bench.__main__ import main
from fusedrnn.costs import fresh_bytes, step_seconds
from fusedrnn.machine import machine, path_of, uncalibrated

TINY = ["calibrate", "--quiet", "--quick", "--batch", "2", "1", "--units", "8", "4"]
MODES = {
    *(("lstm", "onednn", mode) for mode in ("gates", "hidden")),
    *(("lstm", "torch_step", mode) for mode in ("gates", "cells", "hidden")),
    *(("gru", "torch_step", mode) for mode in ("gates", "hidden")),
    *(("layer_norm_lstm", "torch_step", mode) for mode in ("gates", "cells", "hidden")),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    monkeypatch.setattr(_rates, "_BLOCK", 1 << 20)
    monkeypatch.setattr(_rates._speeds, "disk", partial(_speeds.disk, nbytes=1 << 20))
    quick = calibrate.Effort((1,), (4,), seconds=0.001, rounds=1)
    monkeypatch.setitem(calibrate.EFFORTS, ("cpu", True), quick)
    return path_of("cpu")


def test_what_is_measured_is_saved_and_used(cache, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert not cache.parent.exists()
    assert main([*TINY, "--spill-dir", str(tmp_path), "--json", str(file)]) == 0
    found, before = machine("cpu"), uncalibrated("cpu")
    assert {(s.cell, s.backend, s.save) for s in found.measured} == MODES
    for mode in MODES:
        own = [s for s in found.measured if (s.cell, s.backend, s.save) == mode]
        sizes = sorted((s.B, s.I, s.H) for s in own)
        assert sizes == [(1, 4, 4), (1, 8, 8), (2, 2, 8), (2, 4, 4), (2, 8, 8), (2, 32, 8)]
    assert found.source.startswith("measured by fusedrnn-bench calibrate on 20") and found.name
    measured = ("half_flops", "float32_flops", "float64_flops", "memory_bytes_per_second", "launch_latency")
    for name in (*measured, "disk_bytes_per_second", "step_latency"):
        assert getattr(found, name) != getattr(before, name), name
    out = capsys.readouterr().out
    assert f"saved to {cache}" in out and "lstm, float32" in out and "GFLOP/s" in out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * len(found.measured)
    sample = next(s for s in found.measured if s.backend == "onednn" and (s.B, s.I, s.H) == (2, 8, 8))
    call = Call(50, 2, 8, 8, 8, 1, 1, torch.float32, "cpu")
    assert step_seconds(found, call, "onednn", sample.save).forward == pytest.approx(sample.forward)


def test_output_goes_where_it_is_asked_for(cache, tmp_path):
    file = tmp_path / "here" / "mine.json"
    assert main([*TINY, "--output", str(file)]) == 0
    assert json.loads(file.read_text())["version"] == 1
    assert not cache.exists() and machine("cpu") == uncalibrated("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--units", "8", "-1"], "--units must be at least 1, got -1"),
        (["--spill-dir", "nowhere"], "--spill-dir must be a folder that exists, got nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, cache, never):
    with pytest.raises(SystemExit, match=message):
        main(["calibrate", "--quiet", *options])


@pytest.fixture
def never(monkeypatch):
    """Nothing may be measured."""

    def passes(*args):
        raise AssertionError("it measures")

    monkeypatch.setattr(_passes.Runner, "passes", passes)


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path, monkeypatch, never):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SystemExit, match=r"cannot write to .*file/fusedrnn \(.*\): pass --output .* XDG_CACHE_HOME"):
        main(TINY)


def test_other_sizes_are_compared_with_what_is_predicted(cache, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibrate, "CHECKED", (("lstm", 20, 2, 3, 5, 1, 1), ("gru", 10, 1, 4, 4, 2, 2)))
    file = tmp_path / "rows.json"
    assert main(["calibrate", "--quiet", "--quick", "--check", "--json", str(file)]) == 0
    assert not cache.exists()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    predicted = {row["shape"]: row["p50"] for row in rows if row["metric"] == "seconds" and row["mode"] == "predicted"}
    call = Call(20, 2, 3, 5, 5, 1, 1, torch.float32, "cpu")
    step = step_seconds(uncalibrated("cpu"), call, "onednn", "gates")
    assert predicted["T=20, B=2, I=3, H=5, float32, cpu"] == pytest.approx(20 * (step.forward + step.backward))
    assert len(predicted) == 2
    out = capsys.readouterr().out
    assert "ratio" in out and "none measured" in out


def test_the_sizes_that_are_checked_are_not_those_of_the_grid():
    grid = calibrate.EFFORTS["cpu", False]
    assert not {(B, I, H) for _, _, B, I, H, *_ in calibrate.CHECKED} & {
        (B, H, H) for B in grid.batches for H in grid.units
    }


@pytest.mark.parametrize(
    ("backend", "save", "B", "seconds", "expected"),
    [
        ("torch_step", "hidden", 64, 1e-3, 1024),  # four chunks of 256 steps are nearest to a second
        ("torch_step", "hidden", 64, 1e-2, 100),  # a chunk would take 2.6 s
        ("torch_step", "hidden", 64, 7e-3, 256),
        ("torch_step", "hidden", 1, 1e-2, 100),  # a chunk would take 164 s
    ],
)
def test_a_pass_consists_of_whole_chunks_unless_one_takes_too_long(backend, save, B, seconds, expected):
    class Runner:
        def passes(self, call, backend, save, count):
            return [(call.T * seconds / 2,) * 2] * count

    call = _passes.describe("cpu", torch.float32, "lstm", 1 << 20, B, 16, 16)
    assert calibrate._length(Runner(), call, backend, save, 1.0) == expected


def test_interpreted_kernels_are_not_measured(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    points = list(calibrate._points("cpu", calibrate.Effort((1,), (4,))))
    assert {(call.cell.name, backend, save) for call, backend, save in points} == MODES


def test_a_pass_is_so_short_that_its_memory_is_kept():
    class Runner:
        def passes(self, call, backend, save, count):
            return [(1e-9, 1e-9)]

    call = _passes.describe("cpu", torch.float32, "lstm", 1 << 20, 16, 128, 128)
    for save in ("gates", "hidden"):
        T = calibrate._length(Runner(), call, "onednn", save, 1.0)
        assert fresh_bytes(_passes.describe("cpu", torch.float32, "lstm", T, 16, 128, 128), "onednn", save) == 0
        assert T >= 100


def test_machines_that_are_busy_are_called_so(monkeypatch, capsys):
    monkeypatch.setattr(calibrate.os, "getloadavg", lambda: (3.2, 0, 0))
    calibrate._say_if_busy()
    assert "the load of the last minute was 3.2: if others use this machine" in capsys.readouterr().out
    monkeypatch.setattr(calibrate.os, "getloadavg", lambda: (0.1, 0, 0))
    calibrate._say_if_busy()
    assert capsys.readouterr().out == ""


def test_nothing_is_run_again_when_the_time_is_over(monkeypatch):
    runs = []

    class Runner:
        def __init__(self, device):
            pass

        def passes(self, call, backend, save, count):
            runs.append((backend, save))
            return [(1.0, 2.0)] * count

    monkeypatch.setattr(calibrate, "Runner", Runner)
    with calibrate.progress(True) as bar:
        samples = calibrate._samples("cpu", calibrate.Effort((1,), (4,), rounds=5, limit=0.0), bar)
    assert len(runs) == 2 * len(samples)
    assert all(s.backward == 2 * s.forward for s in samples)
