"""What offloading costs: on a simulated device for stated speeds of link and compute, and on the device there is."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import fusedrnn
from fusedrnn.bench._measure import OURS, in_process, peak_bytes, synchronize, times
from fusedrnn.bench._report import console, mib, progress, row, table
from fusedrnn.offloading.accounts import Account
from fusedrnn.offloading.forecast import Forecast, forecast
from fusedrnn.offloading.scheduler import Scheduler
from fusedrnn.offloading.stack import ActivationStack
from fusedrnn.offloading.stats import Counters

CHUNK = 4 << 20
LINK = 50e9
"""Bytes a second, about what PCIe 5.0 x16 does with pinned memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument(
        "--chunks", type=int, default=256, help="chunks of the simulated sequence (default: %(default)s)"
    )
    parser.add_argument("--ring", type=int, default=4, help="slots of the ring (default: %(default)s)")
    parser.add_argument("--prefetch", type=int, default=2, help="chunks fetched ahead (default: %(default)s)")
    parser.add_argument("--length", type=int, default=2000, help="timesteps of the real layer (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="its batch size (default: %(default)s)")
    parser.add_argument("--units", type=int, default=128, help="its hidden units (default: %(default)s)")
    parser.add_argument(
        "--disk", default=None, metavar="DIR", help="time only the real layer, also by way of this disk"
    )
    parser.add_argument("--repeats", type=int, default=5, help="passes timed (default: %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    if args.disk:
        return _disk(args)
    return [*_simulated(args), *_cost(args), *_real(args)]


def overhead(x: float, chunks: int, ring: int, prefetch: int, share: float) -> tuple[float, float, Forecast]:
    """Forecast a training step.

    Args:
        x: Time of a chunk's copy over the time of its computation, the same in both passes.
        chunks: Number of chunks.
        ring: Slots of the ring.
        prefetch: Chunks fetched ahead.
        share: Fraction of the chunks that fit on the device; 0 for those in the ring alone.

    Returns:
        The time over that without offloading, the smallest that any schedule could reach, and the forecast.
    """
    compute = CHUNK / LINK / x
    fitting = max(ring, int(share * chunks))
    config = fusedrnn.OffloadConfig(
        ring_slots=ring, prefetch=prefetch, host_limit=2 * chunks * CHUNK, occupancy_limit=1.0, low_watermark=0.9
    )
    found = forecast(
        [CHUNK] * chunks, compute, compute, config=config, memory=fitting * CHUNK, bytes_per_second=LINK, steps=3
    )
    # What does not fit crosses the link once each way; each pass takes as long as the slower of compute and link.
    copies = (chunks - fitting) * CHUNK / LINK
    least = max(1.0, copies / (chunks * compute))
    return (found.forward + found.backward) / (2 * chunks * compute), least, found


def _simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, lines = [], []
    for x, share in ((0.25, 0.0), (0.5, 0.0), (0.9, 0.0), (1.5, 0.5), (2.0, 0.5), (3.0, 0.5)):
        ratio, least, found = overhead(x, args.chunks, args.ring, args.prefetch, share)
        c = found.counters
        shape = f"chunks={args.chunks} ring={args.ring} prefetch={args.prefetch} x={x} fits={share}"
        fitting = max(args.ring, int(share * args.chunks))
        optimum = (args.chunks - fitting) * CHUNK
        moved = c.spilled_bytes / 3
        for metric, value in (
            ("time_over_none", ratio),
            ("least_possible", least),
            ("spilled_bytes_over_optimum", moved / optimum),
            ("device_peak_bytes", found.peak),
        ):
            rows.append(row("fusedrnn.offload", "simulated", metric, shape, [value]))
        read = c.prefetch_hits + c.demand_loads
        hits = f"{c.prefetch_hits / read:.0%}" if read else "-"
        fits = f"{share:.0%}" if share else "ring"
        peak = f"{found.peak / CHUNK:.0f} chunks"
        lines.append((f"{x}", fits, f"{ratio:.3f}", f"{least:.3f}", f"{moved / optimum:.2f}", hits, peak))
    table(
        f"Simulated device: {args.chunks} chunks of 4 MiB, link {LINK / 1e9:.0f} GB/s, third step",
        ("copy / compute", "fits", "time / none", "least", "spilled / optimum", "prefetch hits", "peak"),
        lines,
        caption="time over the same step without offloading on a device that holds everything; `least` is the bound "
        "max(compute, link) for what does not fit",
    )
    return rows


class _Free:
    """A `fusedrnn.offloading.device.Device` whose operations cost nothing, so that the scheduler's own time remains."""

    direct = False

    def __init__(self) -> None:
        self._buffer, self._account = memoryview(bytearray(1)), Account()

    def current_stream(self) -> int:
        return 0

    def new_stream(self, name: str) -> str:
        return name

    def new_disk_stream(self, name: str) -> str:
        return name

    def record(self, stream: Any, timed: bool = False) -> int:
        return 0

    def wait(self, stream: Any, event: Any) -> None:
        return None

    def query(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None:
        return None

    def failure(self, event: Any) -> Exception | None:
        return None

    def elapsed(self, start: Any, end: Any) -> float | None:
        return 1e-6

    def allocate(self, nbytes: int) -> Any:
        return self._buffer

    def allocate_host(self, nbytes: int) -> Any | None:
        return self._buffer

    def allocate_disk(self, folder: Any, nbytes: int) -> Any | None:
        return None

    def copy(self, stream: Any, target: Any, source: Any) -> None:
        return None

    def record_stream(self, buffer: Any, stream: Any) -> None:
        return None

    def finish(self) -> None:
        return None

    def account(self, folder: Any = None) -> Account:
        return self._account

    def holders(self, buffer: Any) -> int:
        return 0

    def memory(self) -> int | None:
        return None

    def allocated(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False


def scheduler_seconds(repeats: int, chunks: int = 256) -> list[float]:
    """Return the scheduler's own seconds per chunk, push and pop together, in each of `repeats` passes."""
    config = fusedrnn.OffloadConfig(occupancy=lambda: 1.0, host_limit=4 * chunks * CHUNK)
    scheduler = Scheduler(_Free(), config)
    found = []
    for _ in range(repeats + 1):
        start = perf_counter()
        stack = ActivationStack(scheduler, chunks * CHUNK)
        handles = [stack.push(stack.reserve(CHUNK)) for _ in range(chunks)]
        stack.take()
        while handles:
            handle = handles.pop()
            handle.get(writable=True)
            handle.release()
        found.append((perf_counter() - start) / chunks)
    return found[1:]


def _cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    seconds = scheduler_seconds(max(args.repeats, 5) * 4)
    console.print(
        f"scheduler's own time per chunk, reserve, push, get and release together: {median(seconds) * 1e6:.1f} us "
        "(every chunk spilled and fetched, on a device whose operations cost nothing)"
    )
    return [row("fusedrnn.offload", "no device", "seconds_per_chunk", "chunks=256", seconds)]


def contenders(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]] | str]:
    """Return contexts to train in by name, or in words why one is not there."""
    found: dict[str, Callable[[], AbstractContextManager[Any]] | str] = {
        "no offloading": nullcontext,
        "save_on_cpu": lambda: save_on_cpu(pin_memory=device.startswith("cuda")),
    }
    for name, module, attribute in (
        ("torchtune", "torchtune.training", "OffloadActivations"),
        ("TRL", "trl.models", "OffloadActivations"),
    ):
        if not device.startswith("cuda"):
            found[name] = "needs a GPU for its streams"
            continue
        try:
            found[name] = getattr(__import__(module, fromlist=[attribute]), attribute)
        except (ImportError, AttributeError):
            found[name] = "not installed"
    return found


def _real(args: argparse.Namespace) -> list[dict[str, Any]]:
    T, B, H = args.length, args.batch, args.units
    shape = f"T={T} B={B} I={H} H={H} float32 gates"
    x = torch.randn(T, B, H, device=args.device, requires_grad=True)
    backend = "auto" if args.device.startswith("cuda") else "torch_step"

    def layer(offload: Any) -> fusedrnn.LSTM:
        torch.manual_seed(args.seed)
        return fusedrnn.LSTM(H, H, save="gates", backend=backend, device=args.device, offload=offload)

    def step(module: fusedrnn.LSTM, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad()
            x.grad = None
            with context():
                y: Tensor = module(x)[0]
            y.backward(dy)

        return run

    dy = torch.randn(T, B, H, device=args.device)
    plain, off = layer(False), fusedrnn.offload(fusedrnn.OffloadConfig(occupancy=lambda: 1.0))
    steps, absent = {"fusedrnn.offload": step(layer(off), nullcontext)}, {}
    for name, context in contenders(args.device).items():
        if isinstance(context, str):
            absent[name] = context
        else:
            steps[name] = step(plain, context)
    with progress(args.quiet) as bar:
        task = bar.add_task("passes", total=len(steps) * (args.repeats + 1))
        seconds = times(steps, args.repeats, lambda: synchronize(args.device), lambda: bar.advance(task))
    base = median(seconds["no offloading"])
    kept = off.stats()
    moved = {"fusedrnn.offload": kept.spilled_bytes / (args.repeats + 1)}
    rows, lines = [], []
    for name, taken in seconds.items():
        rows.append(row(OURS, name, "seconds", shape, taken, args.device))
        ratio = median(taken) / base
        rows.append(row(OURS, name, "time_over_none", shape, [t / base for t in taken], args.device))
        lines.append((name, f"{median(taken):.3g}", f"{ratio:.2f}", mib(moved[name]) if name in moved else "-"))
    lines += [(name, reason, "", "") for name, reason in absent.items()]
    table(
        f"A real layer on {args.device}: {T:,} steps, batch {B}, {H} units, everything pressed off the device",
        ("", "seconds", "over none", "to the host, per pass"),
        lines,
        caption="on the CPU the device is a stand-in whose copies are made by threads"
        if args.device == "cpu"
        else None,
    )
    return rows


def _disk(args: argparse.Namespace) -> list[dict[str, Any]]:
    T, B, H = args.length, args.batch, args.units
    shape = f"T={T} B={B} I={H} H={H} float32 gates"
    rows, lines = [], []
    base: float | None = None
    with progress(args.quiet) as bar:
        task = bar.add_task("passes", total=2)
        for name, folder in (("in memory", None), ("on the disk", args.disk)):
            job = (T, B, H, args.device, args.seed, args.repeats, folder)
            seconds, peak, kept, speeds = in_process(_disk_job, *job)
            base = base or median(seconds)
            for metric, values in (
                ("seconds", seconds),
                ("time_over_none", [t / base for t in seconds]),
                ("peak_bytes", [peak]),
                ("written_bytes", [kept.disk_written_bytes / (args.repeats + 1)]),
            ):
                rows.append(row(OURS, name, metric, shape, values, args.device))
            written = mib(kept.disk_written_bytes / (args.repeats + 1)) if folder else "-"
            lines.append(
                (
                    name,
                    f"{median(seconds):.3g}",
                    f"{median(seconds) / base:.2f}",
                    mib(peak),
                    written,
                    *map(_mib_s, speeds),
                )
            )
            bar.advance(task)
    table(
        f"A layer on {args.device}: {T:,} steps, batch {B}, {H} units; everything it saves goes to {args.disk}",
        ("", "seconds", "over memory", "peak", "to the disk, per pass", "writing", "reading"),
        lines,
        caption="peak: memory above the start; speeds as the scheduler measured them, of its copies alone",
    )
    return rows


def _mib_s(per_byte: float | None) -> str:
    return "-" if not per_byte else f"{1 / per_byte / (1 << 20):,.0f} MiB/s"


def _disk_job(
    T: int, B: int, H: int, device: str, seed: int, repeats: int, folder: str | None
) -> tuple[list[float], int, Counters, tuple[float | None, float | None]]:
    """Return the seconds of each pass, the peak bytes of the first, what was counted, and the disk's speeds."""
    torch.manual_seed(seed)
    x, dy = torch.randn(T, B, H, device=device), torch.randn(T, B, H, device=device)
    off = fusedrnn.offload(fusedrnn.OffloadConfig(occupancy=lambda: 1.0, spill_dir=folder, host_limit=8 * CHUNK))
    backend = "auto" if device.startswith("cuda") else "torch_step"
    layer = fusedrnn.LSTM(H, H, save="gates", backend=backend, device=device, offload=off if folder else False)
    layer(x[:2])[0].sum().backward()

    def step() -> None:
        layer.zero_grad()
        layer(x)[0].backward(dy)

    peak = peak_bytes(step, device)
    seconds = times({"": step}, repeats, lambda: synchronize(device), warm_up=0)[""]
    if folder is None:
        return seconds, peak, Counters(), (None, None)
    scheduler = off.scheduler(torch.device(device))
    assert scheduler is not None
    speeds = scheduler.recorder.speeds
    found = (speeds.spill, speeds.fetch) if scheduler.direct else (speeds.write, speeds.read)
    return seconds, peak, off.stats(), found
