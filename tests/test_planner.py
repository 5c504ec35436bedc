"""The plan of a step: what it predicts, what it calls best, and how mixed modes compare on the simulated device."""

from dataclasses import replace

import pytest
import torch

import fusedrnn
from fusedrnn.backends import lengths_of
from fusedrnn.backends.base import Call
from fusedrnn.backends.mix import Mode, best_mix, best_moving_mix
from fusedrnn.choice import choose
from fusedrnn.costs import step_seconds
from fusedrnn.machine import PRESETS, machine
from fusedrnn.offloading import OffloadConfig
from fusedrnn.offloading.forecast import forecast
from fusedrnn.testing import full_device

MODES = ("gates", "cells", "hidden")


def small(**options):
    return fusedrnn.plan(8, 64, length=500, batch=4, backend="torch_step", **options)


def test_every_mode_is_compared_and_the_quickest_that_fits_comes_first():
    found = small()
    assert {way.choice.save for way in found.ways} == set(MODES)
    assert all(way.fits for way in found.ways)
    assert found.best.seconds.total == min(way.seconds.total for way in found.ways)
    sizes = {way.choice.save: way.device_bytes for way in found.ways}
    assert sizes["gates"] > sizes["cells"] > sizes["hidden"]
    assert "is best: the quickest of what fits" in str(found)
    assert "torch_step" in str(found)


def test_a_named_mode_is_planned_alone():
    assert [way.choice.save for way in small(save="cells").ways] == ["cells"]


def test_what_fits_nowhere_is_said_with_the_longest_that_would():
    found = small(memory_budget="1MiB", chunk=100)
    assert not found.fits
    assert "nothing fits 1 MiB: hidden needs least" in found.reason
    assert 0 < found.best.longest < 500
    fitting = fusedrnn.plan(
        8, 64, length=found.best.longest, batch=4, backend="torch_step", chunk=100, memory_budget="1MiB"
    )
    assert fitting.fits


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_a_mix_of_modes_uses_what_the_budget_leaves(share):
    most = small(save="gates").best.device_bytes
    found = small(memory_budget=int(share * most), chunk=16)
    mixed = [way for way in found.ways if way.choice.older[0]]
    assert mixed
    assert found.best.device_bytes <= share * most
    assert found.best.seconds.total <= min(way.seconds.total for way in found.ways if way.fits)


def test_offloading_moves_what_does_not_fit():
    kept = fusedrnn.plan(64, 512, length=4000, batch=64, device="h100", save="gates")
    moved = fusedrnn.plan(
        64, 512, length=4000, batch=64, device="h100", save="gates", offload=True,
        memory_budget=kept.best.device_bytes // 2,
    )  # fmt: skip
    assert kept.best.host_bytes == kept.best.moved_bytes == 0
    assert moved.fits
    assert moved.best.device_bytes <= moved.limit < kept.best.device_bytes
    assert moved.best.host_bytes >= moved.best.moved_bytes > 0
    alone = fusedrnn.plan(
        64, 512, length=4000, batch=64, device="h100", save="gates", memory_budget=kept.best.device_bytes // 2
    )
    assert moved.best.longest > 2 * alone.best.longest
    forced = fusedrnn.plan(64, 512, length=4000, batch=64, device="h100", save="gates", offload=full_device())
    assert forced.best.moved_bytes > moved.best.moved_bytes


def test_where_the_link_is_the_slower_one_some_chunks_are_computed_again_instead():
    options = {"length": 4000, "batch": 256, "device": "a100", "dtype": torch.bfloat16, "memory_budget": "12GiB"}
    found = fusedrnn.plan(1024, 1024, **options, offload=True)
    (mixed,) = [way for way in found.ways if way.choice.older[0]]
    single = {way.choice.save: way for way in found.ways if not way.choice.older[0]}
    assert single["gates"].overhead > 0.02
    assert mixed.moved_bytes < single["gates"].moved_bytes
    assert found.best.seconds.total <= min(way.seconds.total for way in found.ways if way.fits)


def test_a_host_without_room_is_a_plan_that_does_not_fit():
    found = fusedrnn.plan(
        64, 512, length=4000, batch=64, device="h100", save="gates", memory_budget="1GiB",
        offload=OffloadConfig(host_limit=1 << 20),
    )  # fmt: skip
    assert not found.fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "`length` must be an integer of at least 1, got 0"),
        ({"batch": 2.5}, "`batch` must be an integer of at least 1, got 2.5"),
        ({"cell": "rnn"}, "`cell` must be one of 'lstm', 'gru', 'layer_norm_lstm', got 'rnn'"),
        ({"cell": "gru", "save": "cells"}, "`save` must be one of 'auto', 'gates', 'hidden', got 'cells'"),
        ({"device": "h1000"}, "`device` must be one of 'a100'"),
        (
            {"memory_budget": "2 gibibytes"},
            '`memory_budget` must be None, a number of bytes, or a string such as "512M',
        ),
        ({"memory_budget": 0}, "`memory_budget` must be None"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        fusedrnn.plan(8, 16, **{"length": 10, "batch": 2} | options)


# Mixed modes on the simulated device.

SHAPES = [
    ("h100", torch.bfloat16, 64, 512),
    ("h100", torch.bfloat16, 256, 2048),
    ("a100", torch.float32, 16, 1024),
    ("rtx4090", torch.float32, 4, 128),
    ("gh200", torch.bfloat16, 256, 1024),
]


def chunks_of(modes, lengths, mix):
    """Return the mode of each chunk of a mix, and its bytes."""
    chosen = [modes[mix.older[1] if k < mix.older[0] else mix.save] for k in range(len(lengths))]
    return chosen, [int(n * mode.nbytes) or 1 for n, mode in zip(lengths, chosen, strict=True)]


def virtual_seconds(modes, lengths, mix):
    """Return the seconds of a step on the simulated device, whose memory holds what a mix saves and no more."""
    chosen, sizes = chunks_of(modes, lengths, mix)
    seconds = [n * mode.seconds for n, mode in zip(lengths, chosen, strict=True)]
    found = forecast(sizes, seconds, seconds, config=OffloadConfig(occupancy_limit=1.0), memory=sum(sizes))
    assert not found.moved
    return found.forward + found.backward


def modes_of(device, dtype, B, H):
    """Return a call on a preset, and its modes by name."""
    call, modes = Call(2000, B, H, H, H, 1, 1, dtype, "cuda", gpu=PRESETS[device].info), {}
    for save in MODES:
        seconds = step_seconds(PRESETS[device], call, "triton_step", save)
        modes[save] = Mode(save, call.step_bytes(save), seconds.forward + seconds.backward, seconds.forward)
    return call, modes


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(("device", "dtype", "B", "H"), SHAPES)
def test_no_single_mode_is_quicker_within_the_same_memory(device, dtype, B, H, share):
    call, modes = modes_of(device, dtype, B, H)
    lengths = lengths_of(call, 32)
    limit = share * call.T * modes["gates"].nbytes
    mix = best_mix(list(modes.values()), lengths, limit)
    assert mix.nbytes <= limit
    ours = virtual_seconds(modes, lengths, mix)
    singles = [best_mix([mode], lengths, limit, mixed=False) for mode in modes.values()]
    theirs = min(virtual_seconds(modes, lengths, single) for single in singles if single)
    assert ours <= theirs * (1 + 1e-9)


def test_a_mix_beats_every_single_mode_where_there_is_room_for_some_gates():
    modes = [Mode("gates", 5.0, 3.0), Mode("cells", 1.0, 4.0), Mode("hidden", 0.0, 4.5)]
    mix = best_mix(modes, [10] * 10, 250.0)
    assert (mix.save, mix.older) == ("gates", (7, "cells"))
    assert (mix.nbytes, mix.seconds) == (220.0, 370.0)
    assert best_mix(modes, [10] * 10, 50.0).older == (5, "hidden")
    assert best_mix(modes, [10] * 10, 500.0)[:2] == ("gates", (0, "gates"))
    assert best_mix(modes[:2], [10] * 10, 99.0) is None


def moving_seconds(modes, lengths, mix, limit, link):
    """Return the seconds of a step on a simulated device that has the ring's slots beyond a limit."""
    chosen, sizes = chunks_of(modes, lengths, mix)
    forward = [n * mode.forward for n, mode in zip(lengths, chosen, strict=True)]
    backward = [n * (mode.seconds - mode.forward) for n, mode in zip(lengths, chosen, strict=True)]
    config = OffloadConfig(occupancy_limit=1.0, low_watermark=1.0, host_limit=1 << 50)
    memory = int(limit) + config.ring_slots * max(sizes)
    found = forecast(sizes, forward, backward, config=config, memory=memory, bytes_per_second=link, steps=2)
    return found.forward + found.backward


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("slower", [1, 4])
@pytest.mark.parametrize(("device", "dtype", "B", "H"), SHAPES)
def test_no_single_mode_is_quicker_where_the_rest_may_move(device, dtype, B, H, slower, share):
    call, modes = modes_of(device, dtype, B, H)
    lengths, link = lengths_of(call, 32), PRESETS[device].link_bytes_per_second / slower
    limit = share * call.T * modes["gates"].nbytes

    def seconds(candidates):
        mix = best_moving_mix(candidates, lengths, limit, 1e18, link)
        return moving_seconds(modes, lengths, mix, limit, link)

    assert seconds(list(modes.values())) <= 1.02 * min(seconds([mode]) for mode in modes.values())


def test_what_moves_is_weighed_against_computing_it_again():
    modes = [Mode("gates", 4.0, 2.0, 1.0), Mode("hidden", 1.0, 3.0, 1.0)]
    lengths = [10] * 16
    # All of it moves beside the computation; half of it does; nothing but what is small does.
    assert best_moving_mix(modes, lengths, 100.0, 1e9, 10.0)[:2] == ("gates", (0, "gates"))
    save, older, nbytes, seconds = best_moving_mix(modes, lengths, 320.0, 1e9, 1.0)
    assert save == "gates" and older[1] == "hidden" and 0 < older[0] < 16
    assert nbytes > 320 and seconds < 16 * 30
    assert best_moving_mix(modes, lengths, 160.0, 1e9, 1e-6)[:2] == ("hidden", (0, "hidden"))
    # A host without room.
    assert best_moving_mix(modes, lengths, 160.0, 0.0, 10.0)[:2] == ("hidden", (0, "hidden"))
    assert best_moving_mix(modes, lengths, 100.0, 0.0, 10.0) is None


@pytest.mark.parametrize(("link", "older"), [(1e12, (0, "gates")), (1e3, (13, "hidden"))])
def test_a_layer_that_may_offload_weighs_the_link(monkeypatch, tmp_path, link, older):
    where = replace(machine("cpu"), disk_bytes_per_second=link, measured=())
    monkeypatch.setattr("fusedrnn.machine.machine_with", lambda info: where)
    monkeypatch.setattr("fusedrnn.choice._CPU_GATES_BYTES", 20_000)
    choose.cache_clear()
    layer = fusedrnn.LSTM(8, 64, backend="torch_step", chunk=10, offload=full_device(spill_dir=tmp_path))
    x = torch.randn(160, 2, 8)
    try:
        found = layer(x)[0]
        call = Call(160, 2, 8, 64, 64, 1, 1, torch.float32, "cpu")
        chosen = choose(call, "torch_step", "auto", 10, None, layer.offloader.config)
    finally:
        choose.cache_clear()
    assert chosen.older == older
    assert "MiB may move at" in layer.explain()
    found.sum().backward()
    plain = fusedrnn.LSTM(8, 64, backend="torch_step", chunk=10, save="gates")
    plain.load_state_dict(layer.state_dict())
    plain(x)[0].sum().backward()
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
