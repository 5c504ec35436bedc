"""What a user may say, and how much memory a process may pin; every option moves a counter."""

import pickle
from dataclasses import replace

import pytest
import torch

from fusedrnn.offloading import OffloadConfig, Offloader
from fusedrnn.offloading.config import process_memory
from fusedrnn.offloading.forecast import forecast

SIZE = 1 << 20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_bytes": -1}, ValueError, r"`min_bytes` must be an integer of at least 0, got -1"),
        ({"ring_slots": 1}, ValueError, r"`ring_slots` must be an integer of at least 2, got 1"),
        ({"prefetch": 0.5}, ValueError, r"`prefetch` must be an integer of at least 0, got 0.5"),
        ({"chunk_bytes": 0}, ValueError, r"`chunk_bytes` must be an integer of at least 1, got 0"),
        ({"low_watermark": 0.9}, ValueError, r"`low_watermark` and `occupancy_limit` must satisfy .* got 0.9 and 0.7"),
        (
            {"occupancy_limit": 1.5},
            ValueError,
            r"`low_watermark` and `occupancy_limit` must satisfy .* got 0.6 and 1.5",
        ),
        ({"on_host_full": "drop"}, ValueError, r"`on_host_full` must be \"keep\" or \"raise\", got 'drop'"),
        ({"occupancy": 0.9}, TypeError, r"`occupancy` must be a function that returns a fraction, got 0.9"),
        ({"host_limit": "110%"}, ValueError, r"`host_limit` must be a number of bytes or a percentage .* got '110%'"),
        ({"host_limit": -1}, ValueError, r"`host_limit` must be a number of bytes or a percentage .* got -1"),
        ({"disk_limit": "101%"}, ValueError, r"`disk_limit` must be a number of bytes or a percentage .* got '101%'"),
        (
            {"spill_dir": "/no/such/folder"},
            ValueError,
            r"`spill_dir` must be a folder .* got '/no/such/folder': make it",
        ),
        ({"spill_dir": __file__}, ValueError, r"`spill_dir` must be a folder in which files can be made"),
        ({"spill_dir": 7}, ValueError, r"`spill_dir` must be a folder in which files can be made, got 7"),
        ({"host_limit": "4 GiB"}, ValueError, r"`host_limit` must be a number of bytes or a percentage .* got '4 GiB'"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        OffloadConfig(**options)


def files(root, contents):
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_is_that_of_the_machine_without_groups(tmp_path):
    whole = process_memory(tmp_path)
    assert whole == process_memory(tmp_path) > 0
    files(tmp_path, {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "max\n"})
    assert process_memory(tmp_path) == whole


def test_the_smallest_limit_of_all_groups_counts(tmp_path):
    files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/memory.max": "3000000\n",
            "sys/fs/cgroup/slice/job/memory.max": "4000000\n",
        },
    )
    assert process_memory(tmp_path) == 3_000_000


def test_groups_of_the_first_version_and_inside_a_container(tmp_path):
    # The path is the host's; inside, only the top exists.
    files(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
        },
    )
    assert process_memory(tmp_path) == 2_000_000


def test_processes_of_one_machine_share_the_limit(monkeypatch):
    alone = OffloadConfig(host_limit="40%").host_bytes()
    assert OffloadConfig(host_limit=1000).host_bytes() == 1000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert OffloadConfig(host_limit=1000).host_bytes() == 250
    assert OffloadConfig(host_limit="40%").host_bytes() == alone // 4
    assert OffloadConfig(disk_limit=1000).disk_bytes() == 250
    assert OffloadConfig().disk_bytes() == 0


def test_a_share_of_the_disk_is_of_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: type("Usage", (), {"free": 8000 if folder == tmp_path else 0})
    )
    assert OffloadConfig(spill_dir=tmp_path).disk_bytes() == 4000
    assert OffloadConfig(spill_dir=tmp_path, disk_limit="10%").disk_bytes() == 800


def run(**options):
    """Counters and peaks of a step with 64 buffers of one MiB on a device that is full."""
    config = OffloadConfig(**{"occupancy": lambda: 1.0, "host_limit": 1 << 30, **options})
    return forecast([SIZE] * 64, 1e-3, 1e-3, config=config, bytes_per_second=4e9)


def test_every_option_moves_a_counter():
    plain = run()
    counters = plain.counters
    assert counters.spills > 50 and counters.loads > 50
    assert run(min_bytes=SIZE).counters.spills == 0
    assert run(min_bytes=SIZE - 1).counters.spills == counters.spills
    assert run(occupancy=lambda: 0.65).counters.spills == 0
    assert run(occupancy=lambda: 0.65, occupancy_limit=0.62).counters.spills > 0
    assert run(ring_slots=8).peak == 2 * plain.peak == 8 * SIZE
    assert run(prefetch=0).counters.demand_loads > counters.demand_loads
    with pytest.warns(RuntimeWarning, match="no pinned host memory left"):
        full = run(host_limit=4 * SIZE)
    assert full.counters.spills == 4 and full.counters.host_full > 0 and full.host_peak <= 4 * SIZE
    asked = []
    run(occupancy=lambda: asked.append(None) or 1.0)
    assert len(asked) == 64


def test_no_schedule_could_move_fewer_bytes():
    """Read newest first, the newest that fit never need to move: all older ones do, once each way."""
    found = run(ring_slots=4).counters
    most = 64 * SIZE
    assert most - 4 * SIZE <= found.spilled_bytes <= most - 2 * SIZE
    assert found.loaded_bytes == found.spilled_bytes - found.forwarded * SIZE
    # With a memory that holds half of them, about half of them move.
    config = OffloadConfig(host_limit=1 << 30, occupancy_limit=1.0, low_watermark=0.9)
    half = forecast([SIZE] * 64, 1e-3, 1e-3, config=config, memory=32 * SIZE, bytes_per_second=1e12, steps=2)
    assert half.peak <= 32 * SIZE
    assert 32 * SIZE <= half.counters.spilled_bytes / 2 <= 35 * SIZE


def test_a_hysteresis_between_the_marks():
    """Pressure that has begun ends at the low mark, not at the limit."""
    levels = iter([0.75] * 8 + [0.65] * 56)
    going_on = run(occupancy=lambda: next(levels)).counters.spills
    levels = iter([0.75] * 8 + [0.55] * 56)
    ended = run(occupancy=lambda: next(levels)).counters.spills
    assert ended < going_on


def test_configurations_are_values():
    assert OffloadConfig() == OffloadConfig(min_bytes=2048) and hash(OffloadConfig()) == hash(OffloadConfig())


def test_the_low_mark_follows_the_limit_unless_it_is_given():
    assert OffloadConfig().low_watermark == OffloadConfig(occupancy_limit=1.0).low_watermark == 0.6
    low = OffloadConfig(occupancy_limit=0.35)
    assert low.low_watermark == pytest.approx(0.3) and OffloadConfig(occupancy_limit=0.0).low_watermark == 0
    for other in (replace(OffloadConfig(), occupancy_limit=0.35), pickle.loads(pickle.dumps(low))):
        assert other == low and hash(other) == hash(low) and repr(other) == repr(low)
    assert replace(low, occupancy_limit=0.7) == OffloadConfig() == OffloadConfig(low_watermark=0.6)
    with pytest.raises(ValueError, match=r"got 0\.6 and 0\.5"):
        OffloadConfig(occupancy_limit=0.5, low_watermark=0.6)


def test_a_folder_that_is_gone_is_named(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    off = Offloader(OffloadConfig(spill_dir=folder))
    folder.rmdir()
    with pytest.raises(ValueError, match=r"`spill_dir` must be a folder .*gone"):
        off.scheduler(torch.device("cpu"))
