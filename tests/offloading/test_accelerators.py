"""What is asked of a device that this machine does not have, and what where it gives no answer."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from fusedrnn.offloading import OffloadConfig, Offloader, accelerators, device
from fusedrnn.offloading.device import AcceleratorDevice, device_for
from fusedrnn.streaming.transfer import device_of

GPU = torch.device("cuda", 0)
TOTAL = 1000


class Stream:
    """Of a pool of four."""

    made = 0

    def __init__(self, where):
        self.number = Stream.made % 4
        Stream.made += 1

    def __eq__(self, other):
        return self.number == other.number

    __hash__ = None


@pytest.fixture
def gpu(monkeypatch):
    """A module as torch.cuda, on which half of the memory is taken by others."""
    state = SimpleNamespace(free=300, allocated=150, reserved=200, fraction=1.0, fails=False, captures=False)

    def statistics(where):
        if state.fails:
            raise RuntimeError("this allocator has no getDeviceStats")
        return {f"{name}_bytes": {"all": {"current": getattr(state, name)}} for name in ("allocated", "reserved")}

    def fraction(where):
        if state.fails:
            raise RuntimeError("this allocator has no getMemoryFraction")
        return state.fraction

    module = SimpleNamespace(
        mem_get_info=lambda where: (state.free, TOTAL),
        memory_stats_as_nested_dict=statistics,
        get_per_process_memory_fraction=fraction,
        is_current_stream_capturing=lambda: state.captures,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda where: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda where: SimpleNamespace(number=-1))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(accelerators, "_STREAMS", {})
    accelerators.missing.cache_clear()
    yield state
    accelerators.missing.cache_clear()


def test_memory_in_use_is_whatever_is_not_free(gpu):
    found = AcceleratorDevice(GPU)
    # 50 bytes are held in reserve.
    assert (found.memory(), found.allocated()) == (TOTAL, TOTAL - 300 - 50)


def test_others_count_as_far_as_they_leave_less_than_the_fraction(gpu):
    gpu.fraction = 0.6
    found = AcceleratorDevice(GPU)
    # Others have 500 of 1000, of which 400 are not this process's anyhow.
    assert (found.memory(), found.allocated()) == (600, 150 + 100)
    gpu.fraction = 0.4
    assert found.allocated() == 150


def test_an_allocator_without_statistics(gpu):
    gpu.fails = True
    found = AcceleratorDevice(GPU)
    assert (found.memory(), found.allocated()) == (TOTAL, 700)


def test_streams_of_a_device_are_few_and_never_the_same(gpu):
    found = [AcceleratorDevice(GPU) for _ in range(20)]
    streams = {name: found[0].new_stream(name) for name in ("spill", "fetch", "input", "output")}
    assert len({stream.number for stream in streams.values()}) == 4
    assert all(other.new_stream(name) is stream for other in found for name, stream in streams.items())
    accelerators._STREAMS.clear()
    first = accelerators.copy_stream(GPU, "spill")
    for _ in range(3):
        Stream(GPU)
    assert accelerators.copy_stream(GPU, "fetch") != first


@pytest.mark.parametrize("spill", [False, True])
def test_nothing_is_made_while_a_graph_is_captured(gpu, spill, tmp_path):
    gpu.captures = True
    off = Offloader(OffloadConfig(spill_dir=tmp_path if spill else None))
    assert not off.is_active(GPU) and not off._schedulers and not Stream.made
    assert off.stack(GPU).handles() == [] and not off._schedulers


@pytest.mark.parametrize(
    ("message", "host_is_full"),
    [
        ("CUDA error: out of memory", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes", True),
        ("CUDA error: an illegal memory access was encountered\nout of memory", False),
        ("CUDA error: misaligned address", False),
    ],
)
def test_only_want_of_memory_makes_the_host_full(gpu, monkeypatch, message, host_is_full):
    def fails(nbytes, where, pin=False):
        raise RuntimeError(message)

    monkeypatch.setattr(device, "empty_bytes", fails)
    for found in (AcceleratorDevice(GPU), device.ThreadDevice()):
        if host_is_full:
            assert found.allocate_host(5) is None
        else:
            with pytest.raises(RuntimeError, match="CUDA error"):
                found.allocate_host(5)


def test_what_a_device_lacks_is_said(monkeypatch):
    assert device_for(torch.device("cpu")) is None and device_of(torch.device("meta")) is None
    with pytest.warns(RuntimeWarning, match="inactive on meta: copies need streams, events and pinned memory, and"):
        assert Offloader().scheduler(torch.device("meta")) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not accelerators.is_capturing(torch.device("meta"))


def test_a_device_without_streams(gpu, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda where: SimpleNamespace(number=0))
    assert accelerators.missing(GPU) == "it has no streams beside the one that computes"
