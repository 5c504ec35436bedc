"""Figures of machines, the file of those that were measured, and what timesteps take by both."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from fusedrnn import machine as machines
from fusedrnn.backends.base import Call
from fusedrnn.cells import GRU, LSTM
from fusedrnn.costs import StepSeconds, fresh_bytes, fresh_seconds, step_seconds
from fusedrnn.kernels._device import DeviceInfo
from fusedrnn.machine import PRESETS, Machine, Sample, machine, path_of, read, rough, uncalibrated, write

SIZES = {"B": (1, 4, 16), "H": (32, 64, 256)}


def seconds_of(B, H):
    return 1e-6 * (3 + B * H / 100)


def sampled(**changes):
    """Samples of a grid whose seconds are known."""
    fields = {"cell": "lstm", "backend": "onednn", "save": "hidden", "dtype": "float32"} | changes
    return tuple(
        Sample(**fields, B=B, I=H, H=H, forward=seconds_of(B, H), backward=3 * seconds_of(B, H))
        for B in SIZES["B"]
        for H in SIZES["H"]
    )


def call(B=4, H=64, I=None, **changes):
    fields = {"T": 100, "P": H, "layers": 1, "directions": 1, "dtype": torch.float32, "device": "cpu"} | changes
    return Call(B=B, H=H, I=H if I is None else I, **fields)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = path_of("cpu")
    path.parent.mkdir()
    return path


# Machines by name.


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_complete_and_consistent(name):
    found = PRESETS[name]
    assert found.name == name and found.measured == () and found.source
    assert found.float64_flops <= found.float32_flops <= found.tf32_flops
    assert found.eta_recurrent < found.eta_product < 1
    if found.device == "cpu":
        assert found.info is None and found.memory is None and fresh_seconds(found, 1 << 30) > 0
        return
    assert machine(name) is found
    assert found.info.memory == found.memory >= 24 << 30
    assert found.tf32_flops < found.half_flops
    assert found.link_bytes_per_second < found.memory_bytes_per_second
    assert fresh_seconds(found, 1 << 30) == 0


def test_all_named_machines_are_there():
    assert set(PRESETS) == {"a100", "h100", "h200", "b200", "rtx4090", "rtx3090", "l40s", "gh200", "cpu"}


def test_a_machine_is_itself():
    own = replace(PRESETS["h100"], name="mine")
    assert machine(own) is own


@pytest.mark.parametrize("word", ["h300", "cuda:99", "cuda:x", "", "xpu"])
def test_an_unknown_name_is_refused_with_the_known_ones(word):
    with pytest.raises(ValueError, match=rf"`device` must be one of 'a100', 'h100', .*'cuda:N'.*got '{word}'"):
        machine(word)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", None),
    ],
)
def test_a_device_without_a_file_has_the_preset_of_its_name_and_its_own_memory(driver, name, monkeypatch, tmp_path):
    info = DeviceInfo(80, 54, 99 << 10, 40 << 30)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machines, "device_name", lambda device: driver)
    monkeypatch.setattr(machines, "device_info", lambda device: info)
    found = machine(torch.device("cuda", 1))
    assert (found.info, found.memory, found.device) == (info, 40 << 30, "cuda")
    if name is None:
        assert found == rough(driver, info)
        assert found.half_flops == PRESETS["a100"].half_flops / 2
    else:
        assert found == replace(PRESETS[name], info=info, memory=info.memory)


def test_products_of_a_processor_grow_with_its_threads(cache, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert machine("cpu") == machine(torch.device("cpu"))
    assert machine("cpu").flops_per_second(torch.float32) == 3 * PRESETS["cpu"].float32_flops
    assert machine("cpu").memory_bytes_per_second == PRESETS["cpu"].memory_bytes_per_second


@pytest.mark.parametrize(
    ("dtype", "tf32", "name"),
    [
        (torch.float64, True, "float64_flops"),
        (torch.float32, False, "float32_flops"),
        (torch.float32, True, "tf32_flops"),
        (torch.bfloat16, False, "half_flops"),
        (torch.float16, True, "half_flops"),
    ],
)
def test_products_by_dtype(dtype, tf32, name):
    assert PRESETS["a100"].flops_per_second(dtype, tf32) == getattr(PRESETS["a100"], name)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "fast", None])
def test_a_figure_that_cannot_be_is_refused(value):
    with pytest.raises(ValueError, match=r"`eta_product` must be positive and finite, got"):
        replace(PRESETS["cpu"], eta_product=value)
    with pytest.raises(ValueError, match=r"`measured` must have positive sizes and seconds"):
        replace(PRESETS["cpu"], measured=(Sample("lstm", "onednn", "hidden", "float32", 1, 1, 1, 1.0, value),))


# Files.


def measured_here():
    return replace(uncalibrated("cpu"), name="here", measured=sampled(), source="measured")


def test_what_was_measured_is_read_again(cache):
    write(measured_here(), "cpu", cache)
    assert read(cache, "cpu") == machine("cpu") == machine(torch.device("cpu")) == measured_here()
    assert machine("cpu") is machine("cpu")
    header = json.loads(cache.read_text())
    assert header["torch"] == torch.__version__ and header["threads"] == torch.get_num_threads()
    assert header["date"].startswith("20") and header["device"]
    assert [file.name for file in cache.parent.iterdir()] == ["machine-cpu.json"]


def test_a_gpu_is_read_again_with_what_backends_ask(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = replace(PRESETS["h100"], measured=sampled(backend="triton_step", dtype="bfloat16"))
    path = path_of("cuda", {"XDG_CACHE_HOME": str(tmp_path)})
    assert path == tmp_path / "fusedrnn" / "machine-nvidia-h100-80gb-hbm3.json"
    path.parent.mkdir()
    write(found, "cuda", path)
    assert read(path, "cuda") == found


def test_a_file_that_changes_is_read_anew(cache):
    write(measured_here(), "cpu", cache)
    assert machine("cpu").name == "here"
    write(replace(measured_here(), name="there"), "cpu", cache)
    os.utime(cache, ns=(1, 1))
    assert machine("cpu").name == "there"
    cache.unlink()
    assert machine("cpu") == uncalibrated("cpu")


def change(content, path, value):
    *way, last = path
    for key in way:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 0, "it is for version 0, here it is 1"),
        (("device",), "another", "it is for device another, here it is"),
        (("threads",), 99, "it is for threads 99, here it is"),
        (("machine", "eta_product"), -1.0, "it is broken .*`eta_product` must be positive"),
        (("machine", "measured", 0, 7), 0.0, "it is broken .*`measured` must have positive"),
        (("machine", "measured", 0), [1, 2], "it is broken .TypeError"),
        (("machine", "surprise"), 1, "it is broken .TypeError"),
        (("machine",), 5, "it is broken .TypeError"),
    ],
)
def test_a_file_that_does_not_hold_is_left_alone_with_one_warning(path, value, message, cache):
    write(measured_here(), "cpu", cache)
    content = json.loads(cache.read_text())
    change(content, path, value)
    cache.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match=rf"machine-cpu.json is not used: {message}.*`fusedrnn-bench calibrate`"):
        assert machine("cpu") == uncalibrated("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine("cpu") == uncalibrated("cpu")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"version": 1}', "\0"])
def test_a_file_that_is_none_is_left_alone(text, cache):
    cache.write_text(text)
    with pytest.warns(RuntimeWarning, match="is not used: it cannot be read"):
        assert machine("cpu") == uncalibrated("cpu")


@pytest.mark.parametrize("folder", ["", "relative"])
def test_a_cache_that_is_no_absolute_path_is_not_heeded(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("cpu", {"XDG_CACHE_HOME": folder}) == tmp_path / ".cache" / "fusedrnn" / "machine-cpu.json"


def test_a_user_without_a_home_has_nothing_measured(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert machine("cpu") == uncalibrated("cpu")


def test_an_import_reads_no_file():
    code = "import sys, fusedrnn; print(sorted(m for m in sys.modules if m in ('fusedrnn.machine', 'fusedrnn.costs')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# Seconds from samples.


@pytest.fixture
def known():
    return measured_here()


@pytest.mark.parametrize("B", SIZES["B"])
@pytest.mark.parametrize("H", SIZES["H"])
def test_a_measured_size_takes_what_was_measured(B, H, known):
    found = step_seconds(known, call(B, H), "onednn", "hidden")
    assert asdict(found) == pytest.approx({"forward": seconds_of(B, H), "backward": 3 * seconds_of(B, H)}, rel=1e-12)


@pytest.mark.parametrize("size", ["B", "H"])
def test_between_and_beyond_what_was_measured_seconds_grow_steadily(size, known):
    found = [step_seconds(known, call(**{size: n}), "onednn", "hidden") for n in range(1, 600)]
    assert all(a.forward <= b.forward and a.backward <= b.backward for a, b in pairwise(found))
    low, high = SIZES[size][0], SIZES[size][-1]
    assert found[low].forward < found[high - 2].forward < found[-1].forward
    # Far beyond, no steeper than what a step consists of.
    assert found[-1].forward <= found[high - 1].forward * (600 / high) ** {"B": 1, "H": 2}[size]


def test_half_way_between_two_sizes_lies_the_geometric_mean(known):
    found = step_seconds(known, call(8, 128), "onednn", "hidden")
    corners = [seconds_of(B, H) for B in (4, 16) for H in (64, 256)]
    assert found.forward == pytest.approx(torch.tensor(corners).double().log().mean().exp().item())


def test_a_grid_may_have_gaps(known):
    holes = replace(known, measured=tuple(s for s in known.measured if (s.B, s.H) != (16, 256)))
    assert step_seconds(holes, call(4, 256), "onednn", "hidden").forward == pytest.approx(seconds_of(4, 256))
    one = replace(known, measured=known.measured[:1])
    assert step_seconds(one, call(4, 256), "onednn", "hidden").forward == pytest.approx(seconds_of(1, 32))


def test_layers_and_directions_multiply(known):
    one = step_seconds(known, call(), "onednn", "hidden")
    three = step_seconds(known, call(layers=3), "onednn", "hidden")
    both = step_seconds(known, call(directions=2), "onednn", "hidden")
    assert three.forward == pytest.approx(3 * one.forward) and both.backward == pytest.approx(2 * one.backward)
    # The second layer of two directions reads both outputs.
    wide = step_seconds(known, call(I=128), "onednn", "hidden")
    deep = step_seconds(known, call(layers=2, directions=2), "onednn", "hidden")
    assert deep.forward == pytest.approx(2 * (one.forward + wide.forward))


@pytest.mark.parametrize(("save", "products"), [("gates", 2), ("hidden", 3)])
def test_another_width_costs_the_products_of_the_input_at_the_speed_of_large_ones(save, products, known):
    known = replace(known, measured=sampled(save=save), eta_product=0.5, float32_flops=1e9)
    narrow, wide = (step_seconds(known, call(4, 64, I), "onednn", save) for I in (64, 100))
    more = 2 * 4 * 256 * (100 - 64) / 0.5e9
    assert wide.forward - narrow.forward == pytest.approx(more)
    assert wide.backward - narrow.backward == pytest.approx(products * more)


def test_another_width_costs_what_samples_of_such_say(known):
    wide = Sample("lstm", "onednn", "hidden", "float32", 4, 256, 64, 2 * seconds_of(4, 64), 7 * seconds_of(4, 64))
    known = replace(known, measured=(*known.measured, wide))
    assert step_seconds(known, call(4, 64, 256), "onednn", "hidden").forward == pytest.approx(wide.forward)
    assert step_seconds(known, call(4, 64, 256), "onednn", "hidden").backward == pytest.approx(wide.backward)
    half = step_seconds(known, call(4, 64, 160), "onednn", "hidden")
    assert half.forward == pytest.approx(1.5 * seconds_of(4, 64))
    # What is narrower has samples of its own where there are some.
    narrow = replace(wide, I=16, forward=0.8 * seconds_of(4, 64))
    both = replace(known, measured=(*known.measured, narrow))
    assert step_seconds(both, call(4, 64, 16), "onednn", "hidden").forward == pytest.approx(narrow.forward)
    assert step_seconds(both, call(4, 64, 160), "onednn", "hidden").forward == pytest.approx(half.forward)
    # With hardly any input the recurrence is left.
    least = step_seconds(known, call(4, 64, 1), "onednn", "hidden")
    assert 0.5 * seconds_of(4, 64) <= least.forward < seconds_of(4, 64)


def test_samples_are_of_the_cell_the_backend_and_the_mode_and_of_the_nearest_dtype():
    slow = tuple(replace(s, forward=10 * s.forward) for s in sampled(dtype="bfloat16"))
    others = tuple(
        replace(s, forward=1.0)
        for changes in ({"save": "gates"}, {"backend": "torch_step"}, {"cell": "gru"})
        for s in sampled(**changes)
    )
    known = replace(measured_here(), measured=(*others, *sampled(), *slow))
    for dtype, factor in ((torch.float32, 1), (torch.float64, 1), (torch.bfloat16, 10), (torch.float16, 10)):
        found = step_seconds(known, call(dtype=dtype), "onednn", "hidden")
        assert found.forward == pytest.approx(factor * seconds_of(4, 64)), dtype
    assert step_seconds(known, call(cell=GRU), "torch_step", "hidden").forward < 1e-3


# Seconds by the formula.


def plain(**changes):
    """A machine of which nothing but the given figures counts: the others cost next to nothing."""
    fields = {
        **dict.fromkeys(
            ("memory_bytes_per_second", "half_flops", "tf32_flops", "float32_flops", "float64_flops"), 1e30
        ),
        **dict.fromkeys(("link_bytes_per_second", "disk_bytes_per_second"), 1e30),
        **dict.fromkeys(("link_latency", "step_latency", "launch_latency"), 1e-30),
        **{"eta_recurrent": 0.5, "eta_product": 0.8},
    }
    return Machine("plain", None, "cuda", None, **fields | changes)


def close(found, forward, backward):
    assert found.forward == pytest.approx(forward) and found.backward == pytest.approx(backward)


@pytest.mark.parametrize(
    ("backend", "seconds"),
    [("triton_sequence", 7e-6), ("triton_step", 6e-6), ("torch_step", 45e-6), ("reference", 120e-6)],
)
def test_small_steps_take_their_latency(backend, seconds):
    slow = plain(step_latency=7e-6, launch_latency=3e-6)
    close(step_seconds(slow, call(1, 8), backend, "gates"), seconds, 2 * seconds)
    close(step_seconds(slow, call(1, 8, layers=2, directions=2), backend, "gates"), 4 * seconds, 8 * seconds)


@pytest.mark.parametrize(("save", "again"), [("gates", 0), ("cells", 1), ("hidden", 1)])
def test_large_steps_take_their_products(save, again):
    # 2 x 4 x 256 x 64 operations are a product; half of the speed for single steps, 0.8 of it for whole chunks.
    product, found = 2 * 4 * 256 * 64, step_seconds(plain(float32_flops=1e6), call(), "triton_step", save)
    single, large = product / 0.5e6, product / 0.8e6
    close(found, single + large, single + 3 * large + 2 * again * large)


def test_products_follow_dtype_width_and_cell():
    speeds = plain(float32_flops=1e6, half_flops=4e6, eta_recurrent=1.0, eta_product=1.0)
    full = step_seconds(speeds, call(), "triton_step", "gates")
    half = step_seconds(speeds, call(dtype=torch.bfloat16), "triton_step", "gates")
    assert full.forward == pytest.approx(4 * half.forward)
    gru = step_seconds(speeds, call(cell=GRU), "triton_step", "gates")
    assert gru.forward * LSTM.gates == pytest.approx(full.forward * GRU.gates)
    wide = step_seconds(speeds, call(I=192), "triton_step", "gates")
    close(wide, 2 * full.forward, full.backward * (1 + 1 + 3 + 3) / 4)
    projected = step_seconds(speeds, call(P=16), "triton_step", "gates")
    assert projected.forward == pytest.approx((2 * 4 * 256 * (64 + 16) + 2 * 4 * 64 * 16) / 1e6)


@pytest.mark.parametrize(("backend", "weights"), [("triton_sequence", 0), ("triton_step", 256 * 64 * 4)])
def test_steps_between_take_the_traffic_of_memory(backend, weights):
    slow = plain(memory_bytes_per_second=1e6)
    numbers = 11 * 4 * 64 * 4
    close(step_seconds(slow, call(), backend, "gates"), (weights + numbers) / 1e6, (weights + 2 * numbers) / 1e6)
    close(step_seconds(slow, call(), backend, "cells"), (weights + numbers) / 1e6, (weights + 2 * numbers) / 1e6)
    close(step_seconds(slow, call(), backend, "hidden"), (weights + numbers) / 1e6, (weights + 3 * numbers) / 1e6)


def test_onednn_runs_a_chunk_again():
    slow = plain(step_latency=7e-6)
    assert step_seconds(slow, call(), "onednn", "hidden") == StepSeconds(pytest.approx(7e-6), pytest.approx(21e-6))


# Memory that is mapped anew.


MIB = 1 << 20


@pytest.mark.parametrize(
    ("backend", "save", "changes", "expected"),
    [
        ("onednn", "hidden", {"T": 1023}, 0),
        ("onednn", "hidden", {"T": 1024}, 2 * 32 * MIB),
        ("onednn", "hidden", {"T": 1024, "device": "cuda"}, 0),
        ("onednn", "hidden", {"T": 1024, "I": 64}, 32 * MIB),
        ("torch_step", "gates", {"T": 1024}, 2 * 32 * MIB),
        ("onednn", "hidden", {"T": 1024, "layers": 3}, 2 * 32 * MIB),
        ("onednn", "hidden", {"T": 1024, "layers": 2, "directions": 2}, 3 * 64 * MIB + 32 * MIB),
        ("onednn", "gates", {"T": 68}, 0),
        ("onednn", "gates", {"T": 128}, 9 * 4 * MIB),
        ("onednn", "gates", {"T": 128, "I": 64}, 9 * 4 * MIB),
        ("onednn", "gates", {"T": 64, "I": 256}, (6 * 2 + 3 * 4) * MIB),
        ("onednn", "gates", {"T": 128, "layers": 2, "directions": 2}, 2 * (9 * 4 + 6 * 4 + 3 * 8) * MIB),
        ("onednn", "gates", {"T": 256}, (9 + 8) * 8 * MIB),
    ],
)
def test_blocks_that_the_allocator_does_not_keep_are_counted(backend, save, changes, expected):
    assert fresh_bytes(call(**{"B": 64, "H": 128} | changes), backend, save) == expected


def test_mapping_costs_by_bytes():
    assert fresh_seconds(plain(fresh_seconds_per_byte=2e-10), 10**9) == pytest.approx(0.2)
