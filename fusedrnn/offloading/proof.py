"""Random programs against the scheduler on the simulated device: every one must be free of races and of wrong values.

    python -m fusedrnn.offloading.proof --seeds 100000
    python -m fusedrnn.offloading.proof --seeds 20000 --disk third
    python -m fusedrnn.offloading.proof --pretended     # whole models on a pretended GPU instead; needs a checkout

A program pushes buffers of several sizes on one or two stacks and streams, under a ring, a host pool and an occupancy
that are drawn too, and then reads them in one of the ways in which a backward pass can go, or not at all.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import fusedrnn
from fusedrnn.offloading.config import OffloadConfig
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.simulated import SimulatedDevice, View
from fusedrnn.offloading.stack import ActivationStack, OffloadHandle
from fusedrnn.offloading.stats import Counters

DISKS = ("none", "direct", "third")
"""No disk; one that takes the host's place, as on a CPU; one below the host."""
_SIZES = (4096, 4096, 4096, 4096, 3000, 8192, 2048)


@dataclass
class Outcome:
    """What a program showed.

    Args:
        races: Accesses that no edge orders, in words.
        wrong: Values read that are not those pushed.
        host_waits: How often the host waited in the steady state, but for the disk.
        leaks: What was still held at the end.
        peak: Most bytes of device memory at any moment.
        operations: Operations that were put on streams.
        counters: What the scheduler counted.
    """

    races: list[str]
    wrong: list[str]
    host_waits: int
    leaks: list[str]
    peak: int
    operations: int
    counters: Counters = field(default_factory=Counters)

    @property
    def faults(self) -> list[str]:
        """Everything that must not be."""
        waits = [f"the host waited {self.host_waits} times"] if self.host_waits else []
        return self.races + self.wrong + self.leaks + waits


def run_program(
    seed: int,
    scheduler: Callable[[Any, OffloadConfig], Scheduler] = Scheduler,
    interleaving: int | None = None,
    disk: str = "none",
) -> Outcome:
    """Run one random program.

    Args:
        seed: Draws the program.
        scheduler: What is put to the proof.
        interleaving: Draws the order in which the device runs the streams, `seed` if None.
        disk: One of `DISKS`; with a disk the host may wait for that alone.

    Raises:
        AssertionError: If bytes are lost or counted twice, or streams wait for each other for ever.
    """
    draw = random.Random(seed)
    direct, faulty = disk == "direct", random.Random(seed)
    fail = None if disk == "none" or seed % 4 else lambda kind: kind == "write" and faulty.random() < 0.1
    device = SimulatedDevice(seed if interleaving is None else interleaving, direct=direct, fail=fail)
    config = _config(draw)
    if disk != "none":
        # Tight files, too, and a host that is hardly ever large enough.
        limits = (1 << 30, 4096 * draw.randint(0, 8), 4096 * draw.randint(1, 3))
        config = replace(config, spill_dir=tempfile.gettempdir(), disk_limit=draw.choice(limits))
        if config.host_bytes() >= 1 << 30:
            config = replace(config, host_limit=4096 * draw.randint(1, 5))
    program = _Program(draw, device, scheduler(device, config))
    with warnings.catch_warnings():
        # That a host pool drawn too small is full is no news.
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(draw.randint(1, 3)):
            program.step()
        return program.outcome()


def _config(draw: random.Random) -> OffloadConfig:
    kind = draw.choice(("full", "full", "full", "varying", "empty"))
    varying = random.Random(draw.random())
    occupancy = {"full": lambda: 1.0, "empty": lambda: 0.0, "varying": lambda: varying.choice((0.5, 0.65, 0.9))}[kind]
    return OffloadConfig(
        ring_slots=draw.randint(2, 6),
        prefetch=draw.randint(0, 4),
        # Tight pools are where a host slot is used again while a copy still reads it.
        host_limit=draw.choice((1 << 30, 4096 * draw.randint(0, 6), 4096 * draw.randint(1, 3), 8192)),
        occupancy=occupancy,
    )


class _Program:
    def __init__(self, draw: random.Random, device: SimulatedDevice, scheduler: Scheduler):
        self._draw, self._device, self._scheduler = draw, device, scheduler
        self._streams = [device.current, device.new_stream("other")]
        self._switches = draw.random() < 0.4
        self._value = 0
        self._unreleased: list[OffloadHandle] = []

    def step(self) -> None:
        """Run a forward pass, and what follows it."""
        draw, scheduler = self._draw, self._scheduler
        size = draw.choice(_SIZES)
        stacks = [self._stack(size) for _ in range(draw.choice((1, 1, 2)))]
        pushed: list[tuple[int, OffloadHandle]] = []
        for _ in range(draw.randint(1, 14)):
            self._may_switch()
            pushed.append(self._push(draw.choice(stacks), size if draw.random() < 0.8 else draw.choice(_SIZES)))
        scheduler.audit()
        if draw.random() < 0.4:
            scheduler.flush()
            scheduler.audit()
        mode = draw.choice((self._backward, self._backward, self._twice, self._partly, self._shuffled, self._not))
        mode(pushed)
        pushed.clear()
        self._unreleased.clear()
        scheduler.audit()

    def outcome(self) -> Outcome:
        """Finish, and say what was seen."""
        scheduler, device = self._scheduler, self._device
        host_waits = device.host_waits
        leaks = [f"entry {entry.sequence} is {entry.state}" for entry in scheduler.entries()]
        if scheduler.ring.held != scheduler.ring.free:
            leaks.append(f"{scheduler.ring.held - scheduler.ring.free} bytes of the ring are in use")
        if scheduler.host.used:
            leaks.append(f"{scheduler.host.used} bytes of the host are in use")
        if scheduler.disk is not None and scheduler.disk.used:
            leaks.append(f"{scheduler.disk.used} bytes of the disk are in use")
        scheduler.flush()
        device.drain()
        scheduler.trim_host()
        leaks += [f"{left} bytes are left" for left in (device.in_use, device.host_in_use, device.disk_in_use) if left]
        return Outcome(
            device.races, device.wrong, host_waits, leaks, device.peak, device.operations, scheduler.counters
        )

    def _stack(self, size: int) -> ActivationStack:
        return ActivationStack(self._scheduler, self._draw.choice((0, 0, 5 * size, 20 * size)))

    def _push(self, stack: ActivationStack, nbytes: int) -> tuple[int, OffloadHandle]:
        self._value += 1
        slot = stack.reserve(nbytes)
        self._device.write(slot.buffer, self._value)
        if self._draw.random() < 0.05:
            # As if the forward pass had been interrupted here.
            del slot
            slot = stack.reserve(nbytes)
            self._device.write(slot.buffer, self._value)
        handle = stack.push(slot)
        self._device.progress(self._draw.randrange(4))
        return self._value, handle

    def _read(self, value: int, handle: OffloadHandle, last: bool) -> None:
        self._may_switch()
        writable = last and self._draw.random() < 0.5
        buffer = handle.get(writable)
        self._device.read(buffer, value)
        if writable:
            self._device.write(buffer, -value)
        del buffer
        if last and self._draw.random() < 0.9:
            handle.release()
        elif last and self._draw.random() < 0.5:
            self._unreleased.append(handle)
        self._device.progress(self._draw.randrange(4))

    def _read_aside(self, value: int, handle: OffloadHandle) -> None:
        """Read on a stream for which the present one does not wait afterwards."""
        device, before = self._device, self._device.current
        aside = self._streams[before is self._streams[0]]
        device.join(aside)
        device.read(handle.get(), value)
        device.current = before

    def _may_switch(self) -> None:
        # As a user does it who changes streams between passes, and in their midst.
        if self._switches and self._draw.random() < 0.2:
            self._device.join(self._draw.choice(self._streams))

    def _backward(self, pushed: list[tuple[int, OffloadHandle]]) -> None:
        while pushed:
            self._read(*pushed.pop(), last=True)
            self._scheduler.audit()

    def _twice(self, pushed: list[tuple[int, OffloadHandle]]) -> None:
        view = None
        views: list[tuple[int, View]] = []
        for value, handle in reversed(pushed):
            self._read(value, handle, last=False)
            if self._draw.random() < 0.2:
                self._read_aside(value, handle)
            if not self._switches and self._draw.random() < 0.3:
                # A view is good for as long as it is kept, whatever else is read meanwhile.
                views.append((value, handle.get()))
            if views and self._draw.random() < 0.3:
                old, view = views.pop()
                self._device.read(view, old)
        del view
        self._scheduler.audit()
        self._backward(pushed)

    def _partly(self, pushed: list[tuple[int, OffloadHandle]]) -> None:
        stop = self._draw.randrange(len(pushed))
        alias = None
        while len(pushed) > stop:
            value, handle = pushed.pop()
            if self._draw.random() < 0.2:
                # Somebody keeps a view of the buffer beyond the life of its handle.
                alias = (value, handle.get(), self._device.current)
                del handle
            else:
                self._read(value, handle, last=True)
        if self._draw.random() < 0.5:
            pushed.clear()
        if alias is not None:
            value, buffer, stream = alias
            self._device.join(stream)
            self._device.read(buffer, value)

    def _shuffled(self, pushed: list[tuple[int, OffloadHandle]]) -> None:
        self._draw.shuffle(pushed)
        self._backward(pushed)

    def _not(self, pushed: list[tuple[int, OffloadHandle]]) -> None:
        pushed.clear()


def _totals(seeds: range, disk: str) -> tuple[int, int, int, list[str]]:
    """Run programs; return how many operations, spills and loads there were, and the faults with their seeds."""
    operations = spills = loads = 0
    faults: list[str] = []
    for seed in seeds:
        outcome = run_program(seed, disk=disk)
        operations += outcome.operations
        spills += outcome.counters.spills
        loads += outcome.counters.loads
        faults += [f"seed {seed}: {fault}" for fault in outcome.faults]
    return operations, spills, loads, faults


def _pretended(seeds: int, first: int) -> int:
    """Run the programs of tests/pretended, half of them on one device and half on two; return 0 if none had a fault."""
    programs = Path(fusedrnn.__file__).resolve().parent.parent / "tests" / "pretended" / "programs.py"
    if not programs.exists():
        print(f"--pretended needs a checkout of the source: there is no {programs}", file=sys.stderr)
        return 2
    if not any(map(shutil.which, (os.environ.get("CXX") or "c++", "c++", "g++"))):
        print("--pretended needs a C++ compiler: c++ or g++ on PATH, or $CXX", file=sys.stderr)
        return 2
    halves = ((1, first, seeds - seeds // 2), (2, first + seeds - seeds // 2, seeds // 2))
    command = [sys.executable, str(programs)]
    statuses = [
        subprocess.run([*command, "--devices", str(devices), "--first", str(start), "--seeds", str(count)]).returncode
        for devices, start, count in halves
        if count
    ]
    return int(any(statuses))


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its status: 0 if no program showed a fault."""
    from concurrent.futures import ProcessPoolExecutor

    from rich.console import Console
    from rich.progress import track

    parser = argparse.ArgumentParser(prog="python -m fusedrnn.offloading.proof", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, help="programs to run (default: 100000; 400 if pretended)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--disk", choices=DISKS, default="none", help="where a disk is (default: %(default)s)")
    parser.add_argument(
        "--pretended", action="store_true", help="run training steps on a pretended GPU, from a checkout of the source"
    )
    args = parser.parse_args(argv)
    if args.seeds is None:
        args.seeds = 400 if args.pretended else 100_000
    if args.pretended:
        return _pretended(args.seeds, args.first)
    last = args.first + args.seeds
    parts = [range(start, min(start + 250, last)) for start in range(args.first, last, 250)]
    console = Console()
    run = partial(_totals, disk=args.disk)
    with ProcessPoolExecutor(args.jobs) as pool:
        found = list(
            track(
                pool.map(run, parts),
                "programs, by 250",
                len(parts),
                console=console,
                transient=True,
            )
        )
    operations, spills, loads = map(sum, zip(*(part[:3] for part in found), strict=True))
    faults = [fault for part in found for fault in part[3]]
    console.print(
        f"{args.seeds:,} programs, {operations:,} operations, {spills:,} spills, {loads:,} fetches: "
        f"{len(faults)} faults (races, wrong values, leaks, host waits)",
        style="red" if faults else "green",
    )
    for fault in faults[:20]:
        console.print(fault, markup=False)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
