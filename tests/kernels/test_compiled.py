"""Every kernel compiles to machine code for every architecture and stays within its limits. No GPU is needed."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusedrnn.kernels._device import A100, B200, H100
from fusedrnn.kernels._sequence import Config, blocks_of
from fusedrnn.kernels.lstm_layer_norm_step import pick

DEVICES = {device.capability: device for device in (A100, H100, B200)}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ELEMENTWISE = ("step forward", "step backward", "recompute", "GRU step forward", "GRU step backward")
WHOLE_ROWS = ("layer norm step forward", "layer norm step backward")
SEQUENCE = ("sequence forward", "sequence backward")
# H, dtype, precision and, by number, which of an architecture's blocks: large and small ones, the target (B=512, H=512
# in bf16: number 4), a width that nothing divides, and float32 with and without matrix instructions.
PROBLEMS = [
    (512, "bf16", "ieee", 4),
    (512, "bf16", "ieee", 0),
    (512, "bf16", "ieee", 2),
    (200, "bf16", "ieee", 3),
    (256, "fp16", "ieee", 5),
    (256, "fp32", "tf32", 3),
    (512, "fp32", "tf32", 1),
]


def blocks(H, dtype, precision, number, device):
    chosen = blocks_of(device.capability, BYTES[dtype], precision)
    return chosen[number].fit(H, BYTES[dtype], device.shared_bytes)


def elementwise_jobs():
    config = {"block_b": 4, "block_h": 128, "num_warps": 4}
    for name in ELEMENTWISE:
        for dtype in ("fp32", "bf16"):
            for capability in DEVICES:
                yield (name, dtype, capability), (name, dtype, capability, 128, "elementwise", config, {})


def whole_rows_jobs():
    for name in WHOLE_ROWS:
        for H, dtype in ((512, "fp32"), (512, "bf16"), (4096, "bf16")):
            for capability in DEVICES:
                config = asdict(pick(64, H))
                yield (name, dtype, capability, H), (name, dtype, capability, H, "elementwise", config, {})


def sequence_jobs():
    def job(name, capability, H, dtype, precision, number, **options):
        config = blocks(H, dtype, precision, number, DEVICES[capability])
        key = (name, capability, H, dtype, precision, config, *options)
        return key, (name, dtype, capability, H, "sequence", asdict(config), {"precision": precision, **options})

    for name in SEQUENCE:
        for capability in DEVICES:
            for problem in PROBLEMS:
                yield job(name, capability, *problem)
        # The widest, packed rows, and float32 without matrix instructions.
        yield job(name, 90, 1024, "bf16", "ieee", 5)
        yield job(name, 80, 1024, "bf16", "ieee", 0)
        yield job(name, 90, 512, "bf16", "ieee", 4, PACKED=True)
        yield job(name, 90, 256, "fp32", "ieee", 0)
        yield job(name, 80, 256, "fp32", "ieee", 1)
    # Nothing kept: no gates, no cells.
    yield job("sequence forward", 90, 512, "bf16", "ieee", 4, STORE_GATES=False, STORE_CELLS=False)


@pytest.fixture(scope="module")
def reports():
    keys, jobs = zip(*elementwise_jobs(), *whole_rows_jobs(), *sequence_jobs(), strict=True)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_table.py")],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(keys, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("key", [key for key, _ in elementwise_jobs()], ids=str)
def test_elementwise_kernels_are_small_and_load_wide(reports, key):
    report = reports[key]
    assert report["stack"] == report["spills"] == 0
    assert report["registers"] <= 64
    assert report["shared"] == 0
    wide = report["wide"]["128" if key[1] == "fp32" else "64"]
    assert wide >= 4, "the four gates should each be one wide load"


@pytest.mark.parametrize("key", [key for key, _ in whole_rows_jobs()], ids=str)
def test_kernels_of_whole_rows_keep_them_in_registers(reports, key):
    report, H = reports[key], key[3]
    assert report["stack"] == report["spills"] == 0
    # Four columns a thread, eight in the widest rows; sixteen warps have 128 registers a thread.
    assert report["registers"] <= (72 if H == 512 else 128)
    assert report["shared"] <= (16 << 10)
    assert report["loop"] == 0, "nothing is loaded twice"
    assert report["wide"]["128"] + report["wide"]["64"] >= 15


@pytest.mark.parametrize("key", [key for key, _ in sequence_jobs()], ids=str)
def test_sequence_kernels_fit_and_keep_the_weights(reports, key):
    name, capability, H, dtype, precision, config, *options = key
    report, size = reports[key], BYTES[dtype]
    assert report["stack"] == report["spills"] == 0
    assert report["shared"] <= config.shared_bytes(H, size) <= DEVICES[capability].shared_bytes
    if dtype == "fp32" and precision == "ieee":
        assert report["matrix"] == ""
    elif capability == 100:
        assert report["matrix"] in ("UTCHMMA", "HMMA")
    else:
        assert report["matrix"] == {80: "HMMA", 90: "HGMMA"}[capability]
    # What a thread loads: its part of W_hh before the loop, and in the loop no more than the step's own data.
    threads, padded = 32 * config.num_warps, config.blocks_k(H) * config.block_k
    tile, weights = config.block_b * config.block_h, 4 * padded * config.block_h * size // threads
    if name == "sequence forward":
        exchanged = config.block_b * padded * size
        own, scalars = 4 * tile * size, 4
    else:
        # The shares of up to sixteen programs at a time, in the loop and after it.
        exchanged = 2 * min(16, -(-H // config.block_h)) * tile * size
        own, scalars = 5 * tile * size + 3 * tile * 4, 8
    assert report["other"] >= weights
    if "PACKED" in options:
        scalars += 24
    assert report["loop"] <= (exchanged + own) // threads + scalars
    # What others stored is loaded past the L1 cache, and a fence for the whole device stands before the arrival.
    assert report["past L1"] >= exchanged // threads
    assert report["fences"] >= 1


def test_the_target_is_on_wgmma_and_its_programs_fit_on_an_h100_at_once():
    """B=512, H=512 in bf16: reports of this choice are tested above."""
    config = Config.pick(512, 512, 2, H100)
    assert config == blocks(512, "bf16", "ieee", 4, H100)
    batch_blocks, hidden_blocks = config.grid(512, 512)
    assert batch_blocks * hidden_blocks <= 132


@pytest.mark.parametrize(
    ("device", "itemsize", "precision", "widest"),
    [(A100, 2, "ieee", 512), (H100, 2, "ieee", 1024), (B200, 2, "ieee", 1024)]
    + [(device, 4, precision, 256) for device in DEVICES.values() for precision in ("ieee", "tf32")],
)
def test_a_choice_fits_and_a_refusal_names_its_limit(device, itemsize, precision, widest):
    for H in [*range(1, 40), *range(40, 2049, 37), 64, 128, 256, 512, 1024]:
        for B in (1, 2, 16, 17, 64, 200, 512, 2000):
            config = Config.pick(B, H, itemsize, device, precision)
            if isinstance(config, str):
                assert B > 16 or widest < H, config
                assert f"B={B}, H={H}" in config
                assert f"on {device.multiprocessors} multi" in config or f"of {device.shared_bytes >> 10}" in config
            else:
                batch_blocks, hidden_blocks = config.grid(B, H)
                assert batch_blocks * hidden_blocks <= device.multiprocessors
                assert batch_blocks * config.block_b >= B and hidden_blocks * config.block_h >= H
                assert config.blocks_k(H) * config.block_k >= H and config.blocks_n(H) * config.block_n >= H
                assert 0 <= config.ahead < config.blocks_k(H)
                assert config.shared_bytes(H, itemsize) <= device.shared_bytes
