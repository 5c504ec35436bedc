"""`fusedrnn-bench doctor`: what it finds on machines made up for it, and what it says to do about each bad sign."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from fusedrnn.backends import BACKENDS, triton_base
from fusedrnn.bench import _facts, _speeds, _support, doctor
from fusedrnn.bench.__main__ import main
from fusedrnn.kernels._device import B200, H100
from fusedrnn.offloading import config
from fusedrnn.offloading.device import ThreadDevice

GIB = 1 << 30
GPU = _facts.Gpu(0, "H100", H100, integrated=False, usable=80 * GIB, allocated=8 * GIB, reserved=9 * GIB, free=70 * GIB)


def by_name(facts):
    assert len({fact.name for fact in facts}) == len(facts)
    return {fact.name: fact for fact in facts}


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_command_shows_all_it_writes(tmp_path, capsys):
    file = tmp_path / "facts.json"
    assert main(["doctor", "--quiet", "--json", str(file), "--dir", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    out = " ".join(capsys.readouterr().out.split())
    for row in rows:
        assert set(row) == {"section", "name", "text", "value", "advice", "date"}
        assert row["section"] in out and row["name"] in out and row["advice"] in out
    assert {row["section"] for row in rows} == set(doctor._checks(tmp_path))
    assert "what to do" in out
    assert list(tmp_path.iterdir()) == [file]


def test_a_check_that_breaks_says_so_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    def broken(*_):
        raise OSError("no such [file]")

    monkeypatch.setattr(_facts, "memory", broken)
    monkeypatch.setattr(_speeds, "disk", lambda folder: [_facts.Fact("folder", "the last check has run")])
    file = tmp_path / "facts.json"
    assert main(["doctor", "--quiet", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "OSError: no such [file]" in out and "this check broke" in out and "the last check has run" in out
    rows = {row["section"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert "Traceback" in rows["host memory"]["value"] and "in broken" in rows["host memory"]["value"]


def test_without_a_bad_sign_nothing_is_to_be_done(capsys):
    doctor.show({"a": [_facts.Fact("b", "c")]})
    assert "nothing: no bad sign" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused():
    with pytest.raises(SystemExit, match="--dir must be a folder that exists, got /nowhere/at/all"):
        main(["doctor", "--dir", "/nowhere/at/all"])


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (5, "5 bytes"),
        (64 << 10, "64 KiB"),
        (1023 << 10, "1,023 KiB"),
        (3 << 19, "1.5 MiB"),
        (80 << 30, "80 GiB"),
        (2 << 40, "2,048 GiB"),
    ],
)
def test_sizes_in_words(nbytes, text):
    assert _facts.size(nbytes) == text


@pytest.mark.parametrize(
    ("changes", "name", "advice"),
    [
        ({}, "cuda:0", ""),
        ({}, "cuda:0 memory", ""),
        ({"integrated": True}, "cuda:0", "leave `offload` off"),
        ({"free": 31 * GIB}, "cuda:0 memory", r"others hold 40 GiB.*set_per_process_memory_fraction\(0.5, 0\)"),
        ({"free": 31 * GIB, "usable": 40 * GIB}, "cuda:0 memory", ""),
        ({"free": 31 * GIB, "integrated": True}, "cuda:0 memory", ""),
    ],
)
def test_devices(changes, name, advice):
    fact = by_name(_facts.devices([replace(GPU, **changes)]))[name]
    assert re.fullmatch(f".*{advice}.*" if advice else "", fact.advice)


def test_what_is_said_of_a_device():
    found = by_name(_facts.devices([GPU]))
    assert "H100, compute capability 9.0, 132 multiprocessors, 227 KiB" in found["cuda:0"].text
    assert found["cuda:0 memory"].text == "occupancy 10% of 80 GiB, 70 GiB free"
    assert "no CUDA device" in _facts.devices([])[0].text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.57  Release Build\n", "565.57"),
    ],
)
def test_driver(tmp_path, text, version):
    assert _facts.driver(tmp_path) == ""
    write(tmp_path, "proc/driver/nvidia/version", text)
    assert _facts.driver(tmp_path) == version


@pytest.mark.parametrize(
    ("installed", "cuda", "gpus", "advice"),
    [
        (False, None, [], ""),
        (False, "12.8", [], ""),
        (True, "12.8", [GPU], ""),
        (True, None, [], "built without CUDA"),
        (True, "12.8", [], "too old for CUDA 12.8"),
    ],
)
def test_torch_and_driver(tmp_path, installed, cuda, gpus, advice):
    if installed:
        write(tmp_path, "proc/driver/nvidia/version", "Module  550.54.15")
    found = by_name(_facts.installed(tmp_path, gpus, cuda))
    assert bool(found["torch"].advice) == bool(advice) and advice in found["torch"].advice
    assert found["NVIDIA driver"].text == ("550.54.15" if installed else "none")
    assert torch.__version__ in found["torch"].text


def test_triton_that_is_missing_or_does_not_load(monkeypatch, tmp_path):
    assert by_name(_facts.installed(tmp_path, [GPU]))["Triton"].advice == ""
    monkeypatch.setitem(sys.modules, "triton", None)
    fact = by_name(_facts.installed(tmp_path, [GPU]))["Triton"]
    assert "does not load" in fact.text and fact.advice == "install it again"
    monkeypatch.setattr(_facts, "triton_version", lambda: "")
    assert "pip install triton" in by_name(_facts.installed(tmp_path, [GPU]))["Triton"].advice
    fact = by_name(_facts.installed(tmp_path, []))["Triton"]
    assert fact.text == "not installed" and fact.advice == ""


@pytest.mark.parametrize(
    ("cores", "threads", "environ", "gpus", "advice"),
    [
        (8, 8, {}, [], ""),
        (8, 4, {}, [], ""),
        (8, 1, {}, [], ""),
        (8, 1, {"OMP_NUM_THREADS": "1"}, [GPU], ""),
        (8, 1, {"OMP_NUM_THREADS": "1"}, [], "set OMP_NUM_THREADS=8"),
        (8, 1, {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, [], ""),
        (8, 16, {}, [GPU], "on 8 cores: set OMP_NUM_THREADS=8"),
        (8, 16, {"LOCAL_WORLD_SIZE": "2"}, [], "set OMP_NUM_THREADS=4"),
    ],
)
def test_threads(tmp_path, cores, threads, environ, gpus, advice):
    fact = by_name(_facts.processor(tmp_path, environ, gpus, cores, threads))["threads"]
    assert bool(fact.advice) == bool(advice) and advice in fact.advice
    assert fact.value == threads


def test_a_cgroup_limits_the_cores(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/a\n0::/a/b\n")
    assert _facts.cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert _facts.cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", "250000 100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "400000 100000\n")
    assert _facts.cpu_quota(tmp_path) == 2.5
    found = by_name(_facts.processor(tmp_path, {}, [], 8, 8))
    assert found["cores"].value == 2 and "limited to 2.5 by a cgroup" in found["cores"].text
    assert "set OMP_NUM_THREADS=2" in found["threads"].advice


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 64 GiB, 40 of them available, in a cgroup of 32."""
    write(
        tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\nHugePages: 0\n"
    )
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", str(32 * GIB))
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}[name])
    monkeypatch.setattr(config, "process_memory", lambda: _facts.process_memory(tmp_path))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def test_host_memory(machine, monkeypatch):
    found = by_name(_facts.memory(machine, [GPU]))
    assert found["memory"].text == "64 GiB, 40 GiB available"
    assert found["cgroup limit"].value == 32 * GIB
    assert found["host_limit"].value == 16 * GIB and found["host_limit"].text == "50% is 16 GiB"
    assert found["huge pages"].text.startswith("never")
    assert not any(fact.advice for fact in found.values())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    fact = by_name(_facts.memory(machine, [GPU, GPU]))["host_limit"]
    assert fact.value == 4 * GIB and "for each of 4 processes" in fact.text and fact.advice == ""


def test_host_memory_bad_signs(machine):
    assert "set LOCAL_WORLD_SIZE" in by_name(_facts.memory(machine, [GPU, GPU]))["host_limit"].advice
    write(machine, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    assert f"host_limit={4 * GIB}" in by_name(_facts.memory(machine, [GPU]))["host_limit"].advice
    (machine / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    (machine / "sys/kernel/mm/transparent_hugepage/enabled").unlink()
    found = by_name(_facts.memory(machine, [GPU]))
    assert found["cgroup limit"].text == "none" and "huge pages" not in found


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("TRITON_INTERPRET", "1", "unset it but for tests"),
        ("TRITON_INTERPRET", "true", "unset it but for tests"),
        ("TRITON_INTERPRET", "0", ""),
        ("CUDA_LAUNCH_BLOCKING", "1", "no copy runs beside a kernel: unset it"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "set it to 8"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", ""),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", "unset it"),
    ],
)
def test_variables(name, value, advice):
    assert not any(fact.advice for fact in _facts.switches({}, [GPU]))
    fact = by_name(_facts.switches({name: value}, [GPU]))[name]
    assert fact.text == f"={value}" and bool(fact.advice) == bool(advice) and advice in fact.advice


def test_tf32_is_as_torch_s_switches_say():
    def text(gpus):
        return by_name(_facts.switches({}, gpus))["float32 products"].text

    assert text([GPU]).startswith("ours multiply in float32")
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert text([GPU]).startswith("ours multiply in TF32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert "none" in text([])


def test_backends_on_the_cpu_have_their_reasons():
    found = by_name(_support.backends([]))
    cells = [cell.upper() for cell in BACKENDS]
    assert set(found) == {f"cpu {cell} {dtype}" for cell in cells for dtype in ("float32", "bfloat16")}
    fact = found["cpu LSTM bfloat16"]
    assert fact.value["auto"] == "torch_step" and fact.value["refused"]["torch_step"] == []
    assert "not onednn: it computes float32, the input is bfloat16" in fact.text
    assert not any(fact.advice for fact in found.values())


def test_backends_on_a_gpu(monkeypatch):
    twins = [GPU, replace(GPU, index=1), replace(GPU, index=2, info=B200)]
    found = by_name(_support.backends(twins))
    assert {name.split()[0] for name in found} == {"cpu", "cuda:0", "cuda:2"}
    assert found["cuda:0 LSTM bfloat16"].value["auto"] == "triton_sequence"
    assert found["cuda:0 GRU float32"].value["auto"] == "triton_step"
    # Choices are cached by what they depend on, so each case is another device.
    old = replace(GPU, info=replace(B200, memory=B200.memory + 1))
    # Not at the top: the tests of kernels must be the first to import it, with the interpreter's switch set.
    from fusedrnn.kernels import _sequence

    monkeypatch.setattr(_sequence, "_TRITON", (3, 6))
    assert (
        "too old for the fastest kernels: take 3.9" in by_name(_support.backends([old]))["cuda:0 LSTM float32"].advice
    )
    monkeypatch.setattr(triton_base, "_installed", lambda: False)
    bare = replace(GPU, info=replace(H100, memory=H100.memory + 1))
    fact = by_name(_support.backends([bare]))["cuda:0 LSTM float32"]
    assert fact.value["auto"] == "torch_step" and "not triton_step: Triton is not installed" in fact.text


def test_what_fits_the_persistent_kernels():
    assert "no CUDA device" in _support.fits([])[0].text
    found = by_name(_support.fits([GPU, replace(GPU, index=1)]))
    assert set(found) == {f"cuda:0 {dtype} B={B} H={H}" for dtype in ("bfloat16", "float32") for B, H in _support.FITS}
    for fact in found.values():
        if fact.value:
            assert int(fact.text.split(", ")[1].split()[0]) <= H100.multiprocessors
        else:
            assert fact.text.startswith("no: a chunk in one launch needs every program to run at once")
    assert found["cuda:0 bfloat16 B=64 H=256"].value and not found["cuda:0 float32 B=64 H=1024"].value


@pytest.mark.parametrize("gpu", [None, GPU, replace(GPU, integrated=True)])
def test_a_link_s_speed(gpu):
    seconds = 0.005
    found = by_name(_speeds.link(ThreadDevice(lambda: seconds), "link", (1 << 20, 4 << 20), gpu))
    slow = found["link 4 MiB"]
    for nbytes, fact in ((1 << 20, found["link 1 MiB"]), (4 << 20, slow)):
        assert fact.value["bytes"] == nbytes
        assert min(fact.value["to_host"], fact.value["to_device"]) > 0
        assert max(fact.value["to_host"], fact.value["to_device"]) <= nbytes / seconds
    assert ("PCIe link" in slow.advice) == (gpu is GPU)
    assert ("link pinning" in found) == (gpu is not None)


class Full(ThreadDevice):
    """A device without memory."""

    def allocate(self, nbytes):
        raise torch.OutOfMemoryError("none")


class Unpinnable(ThreadDevice):
    """A device whose host has no memory."""

    def allocate_host(self, nbytes):
        return None


@pytest.mark.parametrize(("device", "advice"), [(Full, "free some"), (Unpinnable, "offloading cannot run")])
def test_a_link_without_memory(device, advice):
    (fact,) = _speeds.link(device(), "link", (1 << 20,), GPU)
    assert "no 1 MiB" in fact.text and advice in fact.advice


def test_a_disk_s_speed(tmp_path, monkeypatch):
    found = by_name(_speeds.disk(tmp_path, nbytes=1 << 20))
    assert found["write"].value > 0 and "1 MiB with fsync" in found["write"].text
    assert found["read"].value is None or found["read"].value > 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(_speeds, "_cached", lambda descriptor: True)
    assert "from the page cache" in by_name(_speeds.disk(tmp_path, nbytes=1 << 20))["read"].text


def test_a_disk_without_room_and_one_that_is_memory(tmp_path, monkeypatch):
    write(
        tmp_path,
        "proc/self/mountinfo",
        f"1 1 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path} rw shared:1 - tmpfs t rw\n",
    )
    assert _speeds.filesystem(tmp_path / "proc", tmp_path) == "tmpfs"
    assert _speeds.filesystem(tmp_path.parent, tmp_path) == "ext4"
    assert _speeds.filesystem(tmp_path, tmp_path / "nowhere") == ""
    assert "pass --dir" in by_name(_speeds.disk(tmp_path, 1 << 20, root=tmp_path))["folder"].advice
    monkeypatch.setattr(_speeds.shutil, "disk_usage", lambda folder: type("", (), {"free": 3 << 20}))
    assert "free some space" in by_name(_speeds.disk(tmp_path))["speed"].advice
