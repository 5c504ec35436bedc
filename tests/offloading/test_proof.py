"""The scheduler under random programs, and the proof that the proof would notice: mutants that lack one rule each."""

import functools

import pytest

from fusedrnn.offloading.entry import Entry
from fusedrnn.offloading.proof import run_program
from fusedrnn.offloading.ring import Slot
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.spilling import Spiller
from fusedrnn.offloading.stats import Counters, add_up
from fusedrnn.offloading.transfers import Transfers

SEEDS = 6000
"""Programs in each half of the proof; 100,000 run by `python -m fusedrnn.offloading.proof`."""


@pytest.mark.parametrize("half", [0, 1])
def test_no_race_no_wrong_value_no_host_wait_no_leak(half):
    total = Counters()
    for seed in range(half * SEEDS, (half + 1) * SEEDS):
        outcome = run_program(seed)
        assert outcome.faults == [], f"seed {seed}"
        for name, value in vars(outcome.counters).items():
            if isinstance(value, int):
                setattr(total, name, getattr(total, name) + value)
    # The programs go where the faults would be.
    for name in ("spills", "forwarded", "prefetch_hits", "demand_loads", "unprefetched", "dropped", "host_full"):
        assert getattr(total, name) > 100, name


def test_what_happens_does_not_depend_on_the_interleaving():
    for seed in range(300):
        first, second = (run_program(seed, interleaving=other) for other in (1, 2))
        assert (first.peak, first.operations) == (second.peak, second.operations), f"seed {seed}"
        assert first.counters == second.counters


def mutant(**parts):
    """A scheduler with a part that lacks something."""
    return functools.partial(Scheduler, **parts)


def without_edge(edge):
    class Mutant(Transfers):
        def _wait(self, name, stream, events):
            if name != edge:
                super()._wait(name, stream, events)

    return mutant(transfers=Mutant)


def never_over(edge):
    class Mutant(Transfers):
        def _over(self, name, event):
            if name != edge:
                super()._over(name, event)

    return mutant(transfers=Mutant)


class NoLastUse(Transfers):
    """E7 without the readers."""

    def _last_uses(self, entry):
        entry.readers = []
        return super()._last_uses(entry)


class NoSpillInLastUse(Transfers):
    """E7 without the spill that still reads the slot."""

    def _last_uses(self, entry):
        d2h, entry.d2h = entry.d2h, None
        try:
            return super()._last_uses(entry)
        finally:
            entry.d2h = d2h


class OnlyLastReader(Transfers):
    """E7 with one of several streams that read."""

    def _last_uses(self, entry):
        entry.readers = entry.readers[-1:]
        return super()._last_uses(entry)


class NoHostUse(Transfers):
    """Without E8."""

    def _host_uses(self, entry):
        return ()


class HostFreeAtSpill(Transfers):
    """E8 without the fetch that reads the host slot."""

    def _host_uses(self, entry):
        return (entry.d2h,) if entry.d2h is not None else ()


class MergeForgets(Transfers):
    """E8 lost where neighbouring free ranges of the host are joined."""

    def __init__(self, *args):
        super().__init__(*args)
        put = self.host._put

        def forgetful(free):
            return put(free._replace(events=free.events[:1]))

        self.host._put = forgetful


class CachedStream(Transfers):
    """The compute stream of the first call, for ever."""

    def __init__(self, device, *args):
        super().__init__(device, *args)
        first = device.current
        device.current_stream = lambda: first


class InsideSideStream(Transfers):
    """The producer's event taken from the side stream, as `current_stream()` inside of it would."""

    def spill(self, entry, reason):
        ready, entry.ready = entry.ready, self.device.record(self.spill_stream)
        try:
            return super().spill(entry, reason)
        finally:
            entry.ready = ready


class SlotFreeAtOnce(Transfers):
    """A slot that was reserved, written and never pushed is free without its writer's event."""

    def free_slot(self, slot):
        self.ring.give(slot, ())


class IgnoresAliases(Transfers):
    """A dropped handle's slot is used again though a view of it is alive."""

    def free(self, entry, aliased=False, enough=False):
        super().free(entry, False, enough)


class ReclaimsWhatIsRead(Transfers):
    """A slot that was read may be taken though its reader still refers to it."""

    def is_idle(self, entry):
        return not entry.written and entry.slot is not None


class ReclaimsWhatWasOverwritten(Transfers):
    """A buffer that its reader has overwritten may go to the host."""

    def is_idle(self, entry):
        return entry.slot is not None


class NeverLends(Transfers):
    """Memory read on a stream that is not its own is freed as soon as its reader lets go."""

    def free(self, entry, aliased=False, enough=False):
        if aliased and entry.slot is not None and self.device.holders(entry.slot.buffer):
            entry.readers = [entry.slot.home] * bool(entry.readers)
        super().free(entry, aliased, enough)


class DropsWithoutWaiting(Transfers):
    """Memory goes back to the allocator before its last users are done."""

    def __init__(self, *args):
        super().__init__(*args)
        drop = self.ring.drop
        self.ring.drop = lambda slot, events: drop(slot, ())


class FreesTwice(Transfers):
    """What has ended is given back once more."""

    def free(self, entry, aliased=False, enough=False):
        nbytes = entry.nbytes
        super().free(entry, aliased, enough)
        self.ring.held -= nbytes


class WaitsOnTheHost(Transfers):
    """Correct, but the host waits for a copy."""

    def retire(self, entry):
        if entry.d2h is not None:
            self.device.synchronize(entry.d2h)
        super().retire(entry)


class HostFreeBeforeWrite(Transfers):
    """E13 without the write or read."""

    def _host_uses(self, entry):
        io, entry.io = entry.io, None
        try:
            return super()._host_uses(entry)
        finally:
            entry.io = io


class RangeFreeAtOnce(Transfers):
    """Without E15."""

    def _disk_uses(self, entry):
        return ()


class SpillsWithoutItsFetch(Transfers):
    """A spill of what came from the host before, ordered after its producer alone."""

    def spill(self, entry, reason):
        h2d, entry.h2d = entry.h2d, None
        entry.readers = [] if h2d is None else entry.readers
        super().spill(entry, reason)


class BelievesEveryWrite(Transfers):
    """Gives up the copy in memory whether the write has succeeded or not."""

    def __init__(self, device, *args):
        super().__init__(device, *args)
        device.failure = lambda event: None


class FreshSlotUnordered(Spiller):
    """A fetch into memory that the allocator has only ordered before the compute stream."""

    def grow(self, nbytes):
        slot = super().grow(nbytes)
        if slot is not None:
            slot.free = ()
        return slot


class NeverEnds(Scheduler):
    kinds: tuple[type, ...]

    def end(self, owner):
        if not isinstance(owner.item, self.kinds):
            super().end(owner)


class NoFinalizer(NeverEnds):
    """Handles that are dropped give nothing back."""

    kinds = (Entry,)


class NoSlotFinalizer(NeverEnds):
    """Slots that are never pushed give nothing back."""

    kinds = (Slot,)


def named(part, *mutants):
    return [pytest.param(mutant(**{part: found}), id=found.__name__) for found in mutants]


MUTANTS = [
    *(pytest.param(without_edge(f"E{number}"), id=f"E{number}") for number in range(1, 8)),
    *named(
        "transfers",
        NoLastUse,
        NoSpillInLastUse,
        OnlyLastReader,
        NoHostUse,
        HostFreeAtSpill,
        MergeForgets,
        CachedStream,
        InsideSideStream,
        SlotFreeAtOnce,
        IgnoresAliases,
        ReclaimsWhatIsRead,
        ReclaimsWhatWasOverwritten,
        NeverLends,
        DropsWithoutWaiting,
        FreesTwice,
        WaitsOnTheHost,
    ),
    *named("spiller", FreshSlotUnordered),
    *(pytest.param(found, id=found.__name__) for found in (NoFinalizer, NoSlotFinalizer)),
]


DISK_MUTANTS = [
    *(pytest.param(without_edge(edge), id=edge) for edge in ("E9", "E10", "E11")),
    *(pytest.param(never_over(edge), id=edge) for edge in ("E12", "E14")),
    *named("transfers", HostFreeBeforeWrite, RangeFreeAtOnce, SpillsWithoutItsFetch, BelievesEveryWrite),
]


@pytest.mark.parametrize("disk", ["direct", "third"])
def test_no_fault_with_a_disk(disk):
    total = Counters()
    for seed in range(600):
        outcome = run_program(seed, disk=disk)
        assert outcome.faults == [], f"seed {seed}"
        total = add_up([total, outcome.counters])
    names = ["spills", "forwarded", "prefetch_hits", "demand_loads", "dropped"]
    if disk == "third":
        names += ["disk_writes", "disk_reads", "disk_waits", "disk_full"]
    for name in names:
        assert getattr(total, name) > 100, name
    assert total.disk_failures > 10


@pytest.mark.parametrize("mutant", DISK_MUTANTS)
def test_mutant_of_the_disk_tier_is_caught(mutant):
    for seed in range(SEEDS):
        try:
            if run_program(seed, mutant, disk="third").faults:
                return
        except (AssertionError, RuntimeError):
            return
    pytest.fail(f"not noticed in {SEEDS} programs")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant):
    for seed in range(SEEDS):
        try:
            if run_program(seed, mutant).faults:
                return
        except AssertionError:
            return
    pytest.fail(f"not noticed in {SEEDS} programs")
