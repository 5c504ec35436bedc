"""Whatever the disk refuses, at whichever call: results are exact or an error is clear, and the next step is exact."""

import errno
import gc
import itertools
import os
import warnings

import pytest
import torch

import fusedrnn
from fusedrnn.offloading import OffloadConfig, OffloadHostFull, offload
from fusedrnn.offloading.device import ThreadDevice
from fusedrnn.offloading.scheduler import Scheduler

CPU = torch.device("cpu")
TIERS = ("direct", "third")
WARNED = [
    pytest.mark.filterwarnings("ignore:offloading has no"),
    pytest.mark.filterwarnings("ignore:offloading could not write"),
]
pytestmark = WARNED


class Faulty:
    """Stands for os.pwritev or os.preadv, and lets the calls whose number is in `at` go wrong."""

    def __init__(self, real, at, how):
        self.real, self.at, self.how, self.calls = real, at, how, 0

    def __call__(self, fd, buffers, offset):
        self.calls += 1
        if self.calls not in self.at:
            return self.real(fd, buffers, offset)
        if self.how == "short":
            return self.real(fd, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)
        if self.how == "nothing":
            return 0
        raise OSError(self.how, os.strerror(self.how))


@pytest.fixture
def faulty(monkeypatch):
    def install(name, at, how):
        found = Faulty(getattr(os, name), at, how)
        monkeypatch.setattr(os, name, found)
        return found

    yield install
    monkeypatch.undo()


def layer(folder, tier, **options):
    limit = 1 << 30 if tier == "direct" else 1 << 15
    off = offload(OffloadConfig(occupancy=lambda: 1.0, spill_dir=folder, **{"host_limit": limit, **options}))
    off._schedulers[CPU] = Scheduler(ThreadDevice(direct=tier == "direct"), off.config)
    torch.manual_seed(1)
    return fusedrnn.LSTM(4, 16, save="gates", backend="torch_step", chunk=8, offload=off), off._schedulers[CPU]


X = torch.randn(96, 4, 4, generator=torch.Generator().manual_seed(0))


def gradients(module):
    module.zero_grad()
    module(X)[0].square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def check(scheduler):
    gc.collect()
    assert scheduler.entries() == []
    scheduler.audit()
    assert scheduler.ring.held == scheduler.ring.free and scheduler.host.used == 0
    assert scheduler.disk is None or scheduler.disk.used == 0


@pytest.fixture
def want(tmp_path):
    module, _ = layer(tmp_path, "direct", occupancy_limit=1.0)
    return gradients(module)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO, "nothing"])
def test_a_write_fails_at_any_call(tmp_path, tier, how, want, faulty):
    for kth in itertools.count(1):
        module, scheduler = layer(tmp_path, tier)
        writes = faulty("pwritev", {kth}, how)
        assert all(map(torch.equal, gradients(module), want))
        check(scheduler)
        if writes.calls < kth:
            break
        assert all(map(torch.equal, gradients(module), want))
        check(scheduler)
        assert scheduler.stats().disk_failures <= 1
    assert kth > 5


@pytest.mark.parametrize("tier", TIERS)
def test_every_write_fails(tmp_path, tier, want, faulty):
    module, scheduler = layer(tmp_path, tier)
    faulty("pwritev", range(1, 10**6), errno.EIO)
    assert all(map(torch.equal, gradients(module), want))
    found = scheduler.stats()
    assert found.disk_failures >= 3 and found.ring_grown > 0
    assert "could not be written to files" in module.offloader.explain()
    check(scheduler)


def test_what_fails_is_said_once(tmp_path, faulty):
    module, _ = layer(tmp_path, "direct")
    faulty("pwritev", range(1, 10**6), errno.ENOSPC)
    with pytest.warns(
        RuntimeWarning, match=rf"could not write to {tmp_path} \(`spill_dir`\): .*No space left .* on another disk"
    ):
        gradients(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(module)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_short_calls_go_on_where_they_stopped(tmp_path, tier, name, want, faulty):
    module, scheduler = layer(tmp_path, tier)
    calls = faulty(name, range(1, 10**6, 2), "short")
    assert all(map(torch.equal, gradients(module), want))
    assert calls.calls > 5 and scheduler.stats().disk_failures == 0
    check(scheduler)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", [errno.EIO, "nothing"])
def test_a_read_that_fails_once_is_tried_again(tmp_path, tier, how, want, faulty):
    for kth in itertools.count(1):
        module, scheduler = layer(tmp_path, tier)
        reads = faulty("preadv", {kth}, how)
        assert all(map(torch.equal, gradients(module), want))
        check(scheduler)
        assert scheduler.stats().disk_failures == 0
        if reads.calls < kth:
            break
    assert kth > 5


@pytest.mark.parametrize("tier", TIERS)
def test_a_read_that_fails_for_good_is_an_error_and_the_next_step_exact(tmp_path, tier, want, faulty):
    for kth in (1, 2, 4):
        module, scheduler = layer(tmp_path, tier)
        reads = faulty("preadv", range(kth, 10**6), errno.EIO)
        with pytest.raises(
            RuntimeError, match=rf"{tmp_path} \(`spill_dir`\) cannot be read back: .* Run the step again"
        ):
            gradients(module)
        reads.at = ()
        check(scheduler)
        assert scheduler.stats().disk_failures == 1
        assert all(map(torch.equal, gradients(module), want))
        check(scheduler)


def test_data_lost_after_a_write_is_never_read_as_good(tmp_path, want, faulty, monkeypatch):
    """The system may report late that it could not write what it had taken."""
    from fusedrnn.offloading import disk

    def fail(fd, start, nbytes, flags):
        if flags == disk._FINISH:
            raise OSError(errno.EIO, "late")

    monkeypatch.setattr(disk, "_sync", fail)
    monkeypatch.setattr(disk, "_BEHIND", 0)
    module, scheduler = layer(tmp_path, "direct")
    assert all(map(torch.equal, gradients(module), want))
    assert scheduler.stats().disk_failures > 0


@pytest.mark.parametrize("tier", TIERS)
def test_no_room_in_the_file_system(tmp_path, tier, want, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    module, scheduler = layer(tmp_path, tier)
    with pytest.warns(RuntimeWarning, match=r"offloading has no (room left in|pinned host memory left: .*in files)"):
        assert all(map(torch.equal, gradients(module), want))
    check(scheduler)
    assert scheduler.stats().disk_peak == 0 and scheduler.stats().ring_grown > 0
    raising, scheduler = layer(tmp_path, tier, on_host_full="raise")
    with pytest.raises(OffloadHostFull, match=r"Raise `(disk|host)_limit`"):
        gradients(raising)
    check(scheduler)


def test_a_file_system_that_reserves_nothing(tmp_path, want, monkeypatch):
    def unsupported(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    module, scheduler = layer(tmp_path, "direct")
    assert all(map(torch.equal, gradients(module), want))
    assert scheduler.stats().disk_writes > 5


@pytest.mark.parametrize("tier", TIERS)
def test_a_graph_that_is_dropped_leaves_nothing(tmp_path, tier, want):
    module, scheduler = layer(tmp_path, tier)
    for _ in range(5):
        module(X)
    y = module(X)[0]
    y.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("on purpose")))
    with pytest.raises(ValueError, match="on purpose"):
        y.sum().backward()
    del y
    check(scheduler)
    assert all(map(torch.equal, gradients(module), want))
