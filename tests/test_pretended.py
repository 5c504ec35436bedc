"""The device path on a pretended GPU, which behaves as CUDA does but for its speed; see tests/pretended/cuda.py."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRETENDED = ROOT / "tests" / "pretended"

NOTICED_BY = {
    "E1": ["mlp", "recurrent"],
    "E2": ["reused_host"],
    "E3": ["recurrent", "overwritten"],
    "E4": ["interleaved"],
    "E5": ["recurrent", "overwritten"],
    "E6": ["recurrent", "interleaved"],
    "E7": ["overwritten"],
    "home": ["flushed"],
    "adopted": ["foreign_memory"],
}
"""Kinds of programs that show the absence of an edge, so that few are enough."""


def _builder():
    spec = spec_from_file_location("pretended_build", PRETENDED / "build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pretend(pytestconfig):
    """Build the device once, and return a function that runs Python on it."""
    builder = _builder()
    if builder.compiler() is None:
        pytest.skip("the pretended device needs a C++ compiler: c++ or g++ on PATH, or $CXX")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PRETENDED),
        "PRETENDED_CACHE": str(pytestconfig.cache.mkdir("pretended")),
    }
    done = subprocess.run(
        [sys.executable, str(PRETENDED / "build.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=environment | variables, cwd=ROOT, capture_output=True, text=True, timeout=900,
        )  # fmt: skip

    return run


def _gpu_tests(pretend, choice, *options):
    done = pretend(
        "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", *options, "tests/test_gpu.py", "-k", choice
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]


def test_layers_on_the_device_agree_with_torch(pretend):
    _gpu_tests(pretend, "results_and_gradients or gru or resets or ten_runs or another_stream or wrong_device")


def test_offloading_on_the_device_passes_the_tests_of_a_gpu(pretend):
    _gpu_tests(pretend, "(offload or disk) and not cells and not gates")


def test_passes_can_be_captured_on_the_device(pretend):
    # The test keeps a captured graph's nodes and runs a pass on another stream, of which torch warns.
    _gpu_tests(pretend, "captured", "-W", "ignore:The AccumulateGrad node's stream")


@pytest.mark.skipif("PRETENDED_SLOW" not in os.environ, reason="takes two minutes: set PRETENDED_SLOW=1")
@pytest.mark.parametrize("choice", ["peak_memory or offsets", "(cells or gates) and offload"])
def test_what_takes_long_on_the_device_passes_the_tests_of_a_gpu(pretend, choice):
    _gpu_tests(pretend, choice)


@pytest.mark.parametrize("devices", [1, 2])
def test_random_programs_on_the_device_change_no_bit(pretend, devices):
    done = pretend(PRETENDED / "programs.py", "--seeds", 24, "--first", 1000 * devices, "--devices", devices)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("edge", NOTICED_BY)
def test_programs_notice_a_missing_edge(pretend, edge):
    kinds = [word for kind in NOTICED_BY[edge] for word in ("--kind", kind)]
    done = pretend(PRETENDED / "programs.py", "--seeds", 25, "--without", edge, "--until-fault", *kinds)
    assert done.returncode == 1 and "seed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_calls_of_other_threads_spoil_a_capture_in_global_mode_alone(pretend):
    done = pretend(PRETENDED / "selftest.py", "captures")
    assert done.returncode == 0, done.stderr[-2000:]


def test_freed_memory_goes_at_once_to_the_stream_it_was_allocated_on(pretend):
    done = pretend(PRETENDED / "selftest.py", "reuse")
    assert done.returncode == 0, done.stderr[-2000:]


def test_failures_and_limits_of_the_device_are_as_set(pretend):
    done = pretend(PRETENDED / "selftest.py", "failures")
    assert done.returncode == 0, done.stderr[-2000:]


def test_devices_and_streams_are_those_of_torch_accelerator_too(pretend):
    done = pretend(PRETENDED / "selftest.py", "accelerator", PRETENDED_DEVICES="2")
    assert done.returncode == 0, done.stderr[-2000:]
