"""`fusedrnn-bench offload` and `timeline`: what they print, and that forecasts keep to their bounds."""

import json

import pytest
import torch

from fusedrnn.bench import offload, timeline
from fusedrnn.bench.__main__ import main


@pytest.mark.parametrize("x", [0.25, 0.5, 0.9])
def test_a_link_that_is_fast_enough_costs_nothing(x):
    """Virtual time: no machine is timed."""
    ratio, _, found = offload.overhead(x, chunks=256, ring=4, prefetch=2, share=0.0)
    assert ratio <= 1.01
    assert found.peak == 4 * offload.CHUNK


@pytest.mark.parametrize("x", [1.5, 2.0, 3.0])
def test_a_slow_link_is_used_to_its_bound(x):
    ratio, least, found = offload.overhead(x, chunks=256, ring=4, prefetch=2, share=0.5)
    assert least == max(1.0, x / 2)
    assert ratio <= 1.02 * least
    assert found.peak <= 128 * offload.CHUNK


def test_the_scheduler_s_own_time_is_measured():
    found = offload.scheduler_seconds(2, chunks=16)
    assert len(found) == 2 and all(0 < seconds < 1 for seconds in found)


def test_offload_command(tmp_path, capsys):
    file = tmp_path / "rows.json"
    options = ["--chunks", "32", "--length", "64", "--batch", "4", "--units", "16", "--repeats", "1"]
    assert main(["offload", "--quiet", "--json", str(file), *options]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["mode"] for row in rows} == {
        "simulated", "no device", "fusedrnn.offload", "no offloading", "save_on_cpu"
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "needs a GPU for its" in out and "us" in out


def test_peers_that_need_a_gpu_say_so_and_absent_ones_too():
    assert offload.contenders("cpu")["torchtune"] == "needs a GPU for its streams"
    assert offload.contenders("cuda")["TRL"] == "not installed" or callable(offload.contenders("cuda")["TRL"])


def test_timeline_draws_every_stream(capsys):
    assert main(["timeline", "--chunks", "8", "--width", "80"]) == 0
    out = capsys.readouterr().out
    for stream in timeline.ROWS:
        line = next(line for line in out.splitlines() if line.startswith(stream))
        assert "█" in line and len(line) <= 80
    assert "forward" in out and "of the time without offloading" in " ".join(out.split())


def test_timeline_shows_when_a_stream_was_busy():
    work = [timeline.Work("compute", "", 0.0, 1.0), timeline.Work("compute", "", 3.0, 4.0)]
    assert timeline._cells(work, 4.0, 8) == [0, 0, None, None, None, None, 1, 1]


def test_timeline_errors(monkeypatch):
    with pytest.raises(SystemExit, match="--copy must be above 0, got 0"):
        main(["timeline", "--copy", "0"])
    with pytest.raises(SystemExit, match="--ring must be at least 2, got 1"):
        main(["timeline", "--ring", "1"])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"--png needs matplotlib: pip install fusedrnn\[plot\]"):
        main(["timeline", "--chunks", "4", "--png", "unused.png"])


def test_real_passes_agree_bit_by_bit():
    """What is timed side by side computes the same."""
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8)
    found = []
    for context in (offload.contenders("cpu")["no offloading"], offload.contenders("cpu")["save_on_cpu"]):
        torch.manual_seed(1)
        module = offload.fusedrnn.LSTM(8, 8, save="gates", backend="torch_step")
        with context():
            y = module(x)[0]
        found.append(torch.autograd.grad(y.sum(), list(module.parameters())))
    assert all(map(torch.equal, *found))


def test_offload_command_with_a_disk(tmp_path, capsys):
    file = tmp_path / "rows.json"
    options = ["--disk", str(tmp_path), "--length", "4000", "--batch", "8", "--units", "64", "--repeats", "1"]
    assert main(["offload", "--quiet", "--json", str(file), *options]) == 0
    rows = {(row["mode"], row["metric"]): row for row in map(json.loads, file.read_text().splitlines())}
    assert rows["on the disk", "written_bytes"]["p50"] > 0 == rows["in memory", "written_bytes"]["p50"]
    assert "MiB/s" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json"]


def test_stream_command_with_a_disk(tmp_path, capsys):
    options = ["--lengths", "64", "2000", "--batch", "32", "--inputs", "3", "--units", "16", "--repeats", "1"]
    assert main(["stream", "--quiet", "--spill-dir", str(tmp_path), *options]) == 0
    assert "states between segments go to" in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []
