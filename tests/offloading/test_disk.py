"""Files as the tier below memory: nothing but the place of bytes changes, and nothing is left behind."""

import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn.offloading import OffloadConfig, Offloader, offload
from fusedrnn.offloading.device import ThreadDevice
from fusedrnn.offloading.disk import Extent
from fusedrnn.offloading.forecast import forecast
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.stack import ActivationStack

CPU = torch.device("cpu")
SIZE = 1 << 16
TIERS = ("direct", "third")


def config(folder, tier="direct", **options):
    limit = {} if tier == "direct" else {"host_limit": 4 * SIZE}
    return OffloadConfig(**{"occupancy": lambda: 1.0, "spill_dir": folder, **limit, **options})


def put_in(off, tier, delay=None):
    """Let an offloader have the device of a tier: with "third", buffers go to the file by way of the host."""
    scheduler = Scheduler(ThreadDevice(delay, direct=tier == "direct"), off.config)
    off._schedulers[CPU] = scheduler
    return scheduler


def step(scheduler, chunks=40, nbytes=SIZE):
    """Push, read, and compare every byte."""
    stack, handles = ActivationStack(scheduler), []
    for value in range(chunks):
        slot = stack.reserve(nbytes)
        slot.buffer.fill_(value)
        handles.append(stack.push(slot))
    while handles:
        handle = handles.pop()
        buffer = handle.get(writable=True)
        assert bool((buffer == len(handles)).all())
        buffer.fill_(255)
        del buffer
        handle.release()


def check(scheduler):
    gc.collect()
    assert scheduler.entries() == []
    scheduler.audit()
    assert scheduler.ring.held == scheduler.ring.free and scheduler.host.used == 0
    assert scheduler.disk is None or scheduler.disk.used == 0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("nbytes", [SIZE, SIZE - 100, 3000])
def test_every_byte_comes_back(tmp_path, tier, nbytes):
    scheduler = put_in(Offloader(config(tmp_path, tier, host_limit=4 * nbytes + 1024)), tier)
    for _ in range(3):
        step(scheduler, nbytes=nbytes)
        check(scheduler)
    found = scheduler.stats()
    assert found.disk_writes > 90 and found.disk_reads > 90
    assert found.disk_written_bytes == found.disk_writes * nbytes and found.disk_read_bytes == found.disk_reads * nbytes
    assert found.disk_peak > 30 * nbytes and found.disk_failures == found.disk_full == 0
    assert found.ring_grown == 0 and found.device_peak == 4 * nbytes
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tier", TIERS)
def test_slow_copies_change_nothing(tmp_path, tier):
    delays = iter([0.0, 0.003, 0.0, 0.001] * 10**4)
    scheduler = put_in(Offloader(config(tmp_path, tier)), tier, lambda: next(delays))
    step(scheduler)
    check(scheduler)


def lstm(off):
    torch.manual_seed(1)
    return fusedrnn.LSTM(16, 32, save="gates", backend="torch_step", chunk=8, offload=off)


def gradients(module, x):
    module.zero_grad()
    y, finals = module(x)
    (y.square().sum() + sum(final.sum() for final in finals)).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_of_a_layer_are_those_without_bit_by_bit(tmp_path, tier):
    x = torch.randn(200, 8, 16)
    want = gradients(lstm(False), x)
    off = offload(config(tmp_path, tier, host_limit=1 << 17))
    scheduler = put_in(off, tier)
    module = lstm(off)
    for _ in range(3):
        assert all(map(torch.equal, gradients(module, x), want))
        check(scheduler)
    assert scheduler.stats().disk_writes > 30 and scheduler.stats().disk_reads > 30


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_of_any_module_are_those_without_bit_by_bit(tmp_path, tier):
    net = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64)

    def run(context):
        net.zero_grad()
        with context:
            loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in net.parameters()]
        loss.backward()
        return once + [parameter.grad.clone() for parameter in net.parameters()]

    want = run(torch.enable_grad())
    off = offload(config(tmp_path, tier, chunk_bytes=SIZE, min_bytes=1024))
    scheduler = put_in(off, tier)
    for _ in range(3):
        assert all(map(torch.equal, run(off), want))
        check(scheduler)
    assert scheduler.stats().disk_writes > 10 and scheduler.stats().disk_reads > 10


def test_the_cpu_offloads_where_there_is_a_folder(tmp_path):
    off = Offloader(OffloadConfig(spill_dir=tmp_path))
    stack = off.stack(CPU)
    handle = stack.push(stack.reserve(SIZE))
    assert handle.get().shape == (SIZE,)
    # Asked of the process itself: far from full.
    found = off.stats()
    assert found.occupancy_asked == 1 and 0 < found.occupancy_peak < 0.7 and found.spills == 0


def test_the_process_s_memory_is_what_counts(tmp_path):
    device = ThreadDevice()
    before = device.allocated()
    # Not a tensor, whose memory may have been this process's before.
    filled = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(64):
        filled.write(b"1" * (1 << 20))
    assert 0.9 < (device.allocated() - before) / len(filled) < 1.1
    full = Offloader(OffloadConfig(spill_dir=tmp_path, occupancy_limit=0.0, low_watermark=0.0))
    step(full.scheduler(CPU))
    assert full.stats().disk_writes > 0


def test_memory_stays_bounded_while_the_sequence_grows(tmp_path):
    peaks = []
    for chunks in (16, 128):
        scheduler = put_in(Offloader(config(tmp_path)), "direct")
        step(scheduler, chunks)
        peaks.append(scheduler.stats().device_peak)
        assert scheduler.stats().disk_peak > (chunks - 8) * SIZE
    assert peaks[0] == peaks[1] == 4 * SIZE


def test_the_system_keeps_nothing_of_a_file(tmp_path):
    """Pages of the page cache would fill the machine's memory in place of the process's."""
    nbytes, block = 64 << 20, 4 << 20
    extent = Extent(tmp_path, nbytes)
    memory = torch.randint(256, (block,), dtype=torch.uint8)
    for start in range(0, nbytes, block):
        extent.write(start, memory.data_ptr(), block)
    assert cached(extent, nbytes) <= 12 << 20
    back = torch.empty_like(memory)
    for start in range(0, nbytes, block):
        extent.read(start, back.data_ptr(), block)
        assert torch.equal(back, memory)
    assert cached(extent, nbytes) <= 12 << 20


def cached(extent, nbytes):
    """Bytes of a file in the page cache, by mincore(2)."""
    import ctypes
    import mmap

    pages = (ctypes.c_ubyte * (nbytes // 4096))()
    with mmap.mmap(extent._fd, nbytes) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(nbytes), pages) == 0
        del view
    return sum(page & 1 for page in pages) * 4096


SPILLS = """
import sys, torch, fusedrnn
layer = fusedrnn.LSTM(16, 32, save="gates", backend="torch_step", chunk=8,
    offload=fusedrnn.OffloadConfig(occupancy=lambda: 1.0, spill_dir=sys.argv[1]))
x = torch.randn(400, 8, 16)
for k in range(10**6):
    layer(x)[0].sum().backward()
    if k == 0:
        print("running", flush=True)
"""


def test_nothing_is_left_after_a_kill(tmp_path):
    for pause in (0.0, 0.05, 0.12):
        with subprocess.Popen([sys.executable, "-c", SPILLS, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "running\n"
            time.sleep(pause)
            assert os.listdir(tmp_path) == []
            process.send_signal(signal.SIGKILL)
        assert os.listdir(tmp_path) == []


def test_files_go_with_their_offloader(tmp_path):
    scheduler = put_in(Offloader(config(tmp_path)), "direct")
    step(scheduler)
    held = scheduler.host.reserved
    assert held > 30 * SIZE and scheduler.trim_host() == held and scheduler.host.reserved == 0
    step(scheduler)
    open_files = len(os.listdir("/proc/self/fd"))
    del scheduler
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < open_files


def test_without_nameless_files_the_name_goes_at_once(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    scheduler = put_in(Offloader(config(tmp_path)), "direct")
    step(scheduler)
    check(scheduler)
    assert scheduler.stats().disk_writes > 30 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("tier", TIERS)
def test_every_option_moves_a_counter(tmp_path, tier):
    def run(**options):
        scheduler = put_in(Offloader(config(tmp_path, tier, **options)), tier)
        step(scheduler)
        check(scheduler)
        return scheduler.stats()

    assert run(spill_dir=tmp_path).disk_writes > 30
    assert run(occupancy=lambda: 0.0).disk_writes == 0
    assert run(min_bytes=SIZE).disk_writes == 0
    with pytest.warns(RuntimeWarning, match=r"offloading has no (room left|pinned host memory left)"):
        full = run(disk_limit=8 * SIZE)
    assert full.disk_peak == 8 * SIZE and full.ring_grown > 0


def test_words_and_trace_show_the_disk(tmp_path):
    for tier, rows in (
        ("direct", {"compute", "to the disk", "from the disk"}),
        ("third", {"compute", "to the host", "from the host", "to the disk", "from the disk"}),
    ):
        off = Offloader(config(tmp_path, tier, trace=True))
        scheduler = put_in(off, tier)
        step(scheduler)
        found = off.stats()
        text = off.explain()
        assert f"with files in {tmp_path}" in text and f"{found.disk_writes} were written to files" in text
        off.export_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        boxes = [event for event in events if event["ph"] == "X"]
        assert {names[event["tid"]] for event in boxes} == rows
        assert sum(names[event["tid"]] == "to the disk" for event in boxes) == found.disk_writes
        (tmp_path / "trace.json").unlink()


def forecast_with(tmp_path, disk_bytes_per_second, host_chunks, chunks=128):
    return forecast(
        [1 << 20] * chunks,
        1e-3,
        1e-3,
        config=OffloadConfig(
            occupancy=lambda: 1.0, spill_dir=tmp_path, disk_limit=1 << 40, host_limit=host_chunks << 20
        ),
        bytes_per_second=50e9,
        disk_bytes_per_second=disk_bytes_per_second,
        steps=2,
    )


def test_a_disk_that_is_fast_enough_costs_nothing(tmp_path):
    """Virtual time: no machine is timed."""
    found = forecast_with(tmp_path, 2e9, host_chunks=8)
    assert (found.forward + found.backward) / 256e-3 < 1.01
    assert found.peak == 4 << 20 and found.host_peak == 8 << 20
    assert found.counters.ring_grown == found.counters.host_full == 0
    # The newest that fit on device and host never move; all others cross once each way.
    assert (128 - 4 - 8) <= found.counters.disk_writes / 2 <= 128 - 4
    assert found.counters.disk_reads <= found.counters.disk_writes


@pytest.mark.parametrize("host_chunks", [8, 32])
def test_a_slow_disk_is_used_to_its_bound(tmp_path, host_chunks):
    found = forecast_with(tmp_path, 0.5e9, host_chunks)
    least = (128 - 4 - host_chunks) * (1 << 20) / 0.5e9
    assert least < found.forward < 1.05 * least and found.backward < 1.05 * least
    assert found.counters.disk_waits > 0 and found.counters.ring_grown == 0


def test_states_of_a_streamed_sequence_go_there(tmp_path):
    def run(off):
        torch.manual_seed(1)
        layer = fusedrnn.LSTM(4, 16, chunk=8, offload=off)
        loss, _ = layer(x, chunk_loss=lambda y, at: y.square().sum())
        loss.backward()
        return [parameter.grad for parameter in layer.parameters()]

    x = torch.randn(8000, 32, 4)
    off = offload(OffloadConfig(occupancy=lambda: 1.0, spill_dir=tmp_path))
    assert all(map(torch.equal, run(off), run(False)))
    found = off.stats()
    # Of a thousand segments, in copies that are worth a disk's while.
    assert 0 < found.disk_writes < 70 and found.disk_written_bytes > 2 << 20
    check(off.scheduler(CPU))
