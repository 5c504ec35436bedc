"""Whatever fails, at whichever call: results stay exact, nothing is lost, and the next step is as good as ever."""

import itertools
import warnings

import pytest
import torch

from fusedrnn.offloading import OffloadConfig, OffloadHostFull
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.simulated import SimulatedDevice
from fusedrnn.offloading.stack import ActivationStack

SIZE = 4096
pytestmark = pytest.mark.filterwarnings("ignore:offloading has no pinned host memory left")


class Failing:
    """Fails the calls of one kind whose number is in `at`."""

    def __init__(self, kind, at):
        self.kind, self.at, self.seen = kind, at, 0

    def __call__(self, kind):
        if kind != self.kind:
            return False
        self.seen += 1
        return self.seen in self.at


def scheduler(fail=None, direct=False, **options):
    device = SimulatedDevice(seed=0, fail=fail, direct=direct)
    return Scheduler(device, OffloadConfig(**{"occupancy": lambda: 1.0, "host_limit": 64 * SIZE, **options}))


def step(found, chunks=12):
    """Push and read; every value is checked by the device."""
    device, stack = found.device, ActivationStack(found)
    handles = []
    for value in range(chunks):
        slot = stack.reserve(SIZE)
        device.write(slot.buffer, value)
        handles.append(stack.push(slot))
    while handles:
        handle = handles.pop()
        device.read(handle.get(writable=True), len(handles))
        handle.release()


def check(found, slots=None):
    """Nothing is in use, nothing was wrong."""
    assert found.entries() == []
    found.audit()
    assert found.ring.held == found.ring.free and found.host.used == 0
    assert found.disk is None or found.disk.used == 0
    if slots is not None:
        assert found.ring.held <= slots * SIZE
    found.device.drain()
    assert found.device.races == [] and found.device.wrong == []


@pytest.mark.parametrize("kth", range(1, 9))
@pytest.mark.parametrize("for_good", [False, True])
def test_pinned_allocation_fails(kth, for_good):
    at = range(kth, 10**6) if for_good else {kth}
    found = scheduler(Failing("allocate_host", at))
    # As small as slabs get, so that there are many calls.
    found.host._least = SIZE
    for _ in range(3):
        step(found, 40)
        check(found)
    if for_good or found.host.failures:
        assert found.host.failures > 0 or found.host.calls < kth
    # What was refused is not asked for again.
    calls = found.host.calls
    step(found, 40)
    assert found.host.calls == calls
    check(found)


def test_no_pinned_memory_at_all_is_counted_and_said_once():
    found = scheduler(Failing("allocate_host", range(1, 10**6)))
    with pytest.warns(RuntimeWarning, match=r"no pinned host memory left: .* allocations .* Raise `host_limit`"):
        step(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(found)
    check(found)
    assert found.counters.spills == 0 and found.counters.host_full > 0 and found.counters.ring_grown > 0
    assert found.host.failures > 0


@pytest.mark.parametrize("kth", range(1, 6))
def test_device_allocation_fails_once(kth):
    found = scheduler(Failing("allocate", {kth}))
    if kth == 1:
        # There is nothing yet that could give way, but the second attempt succeeds.
        step(found)
    for _ in range(2):
        step(found)
        check(found, slots=4)
    assert found.counters.device_failures == (1 if kth <= 4 else 0)


@pytest.mark.parametrize("kth", [3, 4])
def test_device_is_full_for_good_and_the_ring_stays_small(kth):
    found = scheduler(Failing("allocate", range(kth, 10**6)))
    for _ in range(3):
        step(found)
        check(found, slots=kth - 1)
    assert found.counters.spills > 0 and found.counters.device_failures > 0


def test_device_is_full_while_nothing_may_be_spilled():
    found = scheduler(Failing("allocate", range(3, 10**6)), host_limit=0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step(found)
    assert "fusedrnn.offload held" in raised.value.__notes__[0]
    del raised
    check(found)


def test_device_is_full_without_pressure():
    found = scheduler(Failing("allocate", range(6, 10**6)), occupancy=lambda: 0.0)
    for _ in range(3):
        step(found)
        check(found)
    assert found.counters.spills > 0


@pytest.mark.parametrize("tier", ["host", "direct", "third"])
@pytest.mark.parametrize("kind", ["record", "wait", "copy"])
def test_an_operation_fails_at_any_call(kind, tier, tmp_path):
    options = {
        "host": {},
        "direct": {"direct": True, "spill_dir": tmp_path},
        "third": {"spill_dir": tmp_path, "host_limit": 3 * SIZE},
    }[tier]
    for kth in itertools.count(1):
        failing = Failing(kind, {kth})
        found = scheduler(failing, **options)
        try:
            step(found)
        except RuntimeError as error:
            message = str(error)
        else:
            if failing.seen < kth:
                break
            # An event after a copy under way is tried twice.
            message = "simulated failure"
        assert "simulated failure" in message
        # The next step is exact, and at the end nothing is missing.
        step(found)
        check(found)
    assert kth > 10


def test_host_full_keeps_or_raises():
    kept = scheduler(host_limit=2 * SIZE)
    step(kept)
    check(kept)
    assert kept.counters.spills == 2 and kept.counters.host_full > 0 and kept.counters.ring_grown > 0
    assert kept.host.reserved == 2 * SIZE

    raising = scheduler(host_limit=2 * SIZE, on_host_full="raise")
    with pytest.raises(
        OffloadHostFull, match=r"no room for a buffer of 4096 bytes: the ring holds .* Raise `host_limit`"
    ):
        step(raising)
    check(raising, slots=4)
    step(raising, chunks=4)
    check(raising, slots=4)


def test_capture_says_what_to_do():
    found = scheduler()
    stack = ActivationStack(found)
    handle = stack.push(stack.reserve(SIZE))
    found.device.capturing = True
    for action in (lambda: stack.reserve(SIZE), handle.get):
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            action()
    # A finalizer in the midst of a capture waits for its end.
    del handle, action
    found.device.capturing = False
    check(found)


def test_a_warning_that_is_an_error_leaves_everything_as_it_is():
    found = scheduler(host_limit=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="0 bytes of at most 0 "):
            step(found)
        check(found)
        step(found)
    check(found)
