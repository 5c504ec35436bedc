"""Everything that a GPU can show, in one run of a few minutes: correctness first, then speed and memory beside peers.

    python -m fusedrnn.bench gpu-check

What was measured goes to bench/results/. With --dry-run the same code runs on the CPU at tiny sizes.
"""

import argparse
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.markup import escape
from torch import Tensor

import fusedrnn
from fusedrnn.bench._correctness import Cell, matrix, same_bits
from fusedrnn.bench._measure import OURS, TORCH, peak_bytes, synchronize, times
from fusedrnn.bench._peers import PEERS, contenders, cudnn_algorithm
from fusedrnn.bench._report import console, machine_line, mib, row, table
from fusedrnn.choice import NoBackendError
from fusedrnn.kernels._device import device_info

_ROOT = Path(fusedrnn.__file__).parents[1]
_CASE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("case", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import fusedrnn
sys.exit(module.check(fusedrnn.LSTM, sys.argv[2]))
"""


class Budget:
    """Seconds that a run may take in all."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--seconds", type=float, default=330, help="time to keep to (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU at tiny sizes")
    parser.add_argument(
        "--cases", metavar="DIR", nargs="*", default=[], help="folders of files with check(LSTM, device)"
    )
    parser.add_argument("--skip", nargs="*", default=[], choices=SECTIONS, help="sections to leave out")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    device = "cpu" if args.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu-check needs a CUDA device; --dry-run runs it on the CPU at tiny sizes")
    budget = Budget(args.seconds)
    rows: list[dict[str, Any]] = []
    failed = []
    for name, section in SECTIONS.items():
        if name in args.skip:
            continue
        if budget.left() < 0:
            console.print(f"{name}: left out, the {args.seconds:g} seconds are over", style="yellow")
            continue
        console.rule(name)
        start = time.monotonic()
        try:
            with nullcontext() if args.quiet else console.status(name):
                wrong = section(args, device, budget, rows)
        except Exception:
            # One section that breaks must not cost what the others would show.
            console.print(traceback.format_exc(), markup=False, style="red")
            wrong = "it broke"
        if wrong:
            failed.append(f"{name}: {wrong}")
        console.print(f"{time.monotonic() - start:.1f} s, {budget.left():.0f} s left", style="dim")
    if args.json is None and not args.dry_run:
        args.json = str(_results_file(device))
    for line in failed:
        console.print(f"FAILED {escape(line)}", style="bold red")
    console.print("gpu-check: " + ("failed" if failed else "all that was run is right"))
    args.status = 1 if failed else 0
    return rows


def _results_file(device: str) -> Path:
    """Return the file for this run's rows, with the machine line as the first of its neighbour."""
    folder = Path.cwd() / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    stem = f"{datetime.now(UTC):%Y-%m-%d}-{name}"
    (folder / f"{stem}.txt").write_text(machine_line(device) + "\n")
    return folder / f"{stem}.json"


def _verdicts(cells: Iterable[Cell]) -> str:
    """Print what is not "ok" and a summary; return what failed, in words."""
    counts: Counter[str] = Counter()
    wrong = []
    for cell in cells:
        kind = cell.verdict.partition(":")[0] if cell.verdict.startswith("refused") else cell.verdict
        counts[kind if kind in ("ok", "refused") else "wrong"] += 1
        if kind not in ("ok", "refused"):
            wrong.append(cell)
            console.print(f"{cell.backend} {cell.save} {cell.kind} {cell.dtype}: {escape(cell.verdict)}", style="red")
    console.print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return f"{len(wrong)} of {sum(counts.values())} checks" if wrong else ""


def _correctness(args: argparse.Namespace, device: str, budget: Budget, rows: list[dict[str, Any]]) -> str:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        if device == "cpu":
            return _verdicts(matrix(device, (7, 3, 5, 32), ("float32", "bfloat16")))
        return _verdicts(matrix(device, (61, 19, 37, 200), ("float32", "float16", "bfloat16")))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _bits(args: argparse.Namespace, device: str, budget: Budget, rows: list[dict[str, Any]]) -> str:
    if device == "cpu":
        return _verdicts(same_bits(device, (24, 4, 16, 32), ("float32",), 2))
    return _verdicts(same_bits(device, (96, 32, 64, 256), ("float32", "float16", "bfloat16"), 5))


def _tests(args: argparse.Namespace, device: str, budget: Budget, rows: list[dict[str, Any]]) -> str:
    file = _ROOT / "tests" / "test_gpu.py"
    if not file.exists():
        console.print("tests/test_gpu.py is not here: the package is installed without its tests", style="yellow")
        return ""
    # Last, since its many shapes take long to compile; what the time allows is run.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=max(30.0, budget.left()))
    except subprocess.TimeoutExpired:
        console.print(f"stopped, the time is over: run {' '.join(command[1:])} by itself", style="yellow")
        return ""
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    console.print("\n".join(lines[-15:] if done.returncode else lines[-1:]), markup=False)
    return "tests/test_gpu.py" if done.returncode else ""


def _cases(args: argparse.Namespace, device: str, budget: Budget, rows: list[dict[str, Any]]) -> str:
    files = sorted(file for folder in args.cases for file in Path(folder).glob("case_*.py"))
    wrong = []
    for file in files:
        done = subprocess.run(
            [sys.executable, "-c", _CASE, str(file), device],
            capture_output=True,
            text=True,
            timeout=max(30.0, budget.left()),
        )
        skipped = done.stderr.strip().startswith("skip")
        console.print(f"{'ok' if not done.returncode else 'skip' if skipped else 'FAIL'} {file.stem}", markup=False)
        if done.returncode and not skipped:
            wrong.append(file.stem)
            console.print(done.stderr[-1500:], markup=False, style="red")
    return ", ".join(wrong)


def _sizes(device: str) -> list[tuple[str, int, int, int]]:
    """Return (dtype, T, B, H) to be timed, those that say most first."""
    if device == "cpu":
        return [("float32", 12, 2, 16)]
    first = [("bfloat16", 1000, 512, 512), ("float16", 1000, 16, 768), ("float32", 1000, 64, 256)]
    rest = [
        (dtype, 1000, B, H)
        for dtype in ("bfloat16", "float16", "float32")
        for B in (16, 512, 64, 1)
        for H in (512, 256, 1024, 128)
    ]
    return first + [size for size in rest if size not in first]


def _speed(args: argparse.Namespace, device: str, budget: Budget, rows: list[dict[str, Any]]) -> str:
    # The last section needs its share.
    reserve = 0.3 * budget.left()
    gpu = device_info(torch.device(device))
    lines: list[tuple[str, ...]] = []
    broken = set()
    for dtype, T, B, H in _sizes(device):
        if budget.left() < reserve:
            console.print(f"from {dtype}, B={B}, H={H} on left out for want of time", style="yellow")
            break
        algorithm = cudnn_algorithm(getattr(torch, dtype), B, H, H, multiprocessors=gpu.multiprocessors) if gpu else "-"
        shape = f"T={T} B={B} I={H} H={H} L=1 {dtype}"
        timed = _time_all(device, dtype, T, B, H, args)
        base = timed.get(TORCH)
        floor = _floor(dtype, B, H)
        for name, found in timed.items():
            if isinstance(found, str):
                broken.add(f"{name} at {shape}: {found}")
                continue
            mode = f"cuDNN {algorithm}" if name == TORCH and gpu else name
            for metric, seconds in (("forward_seconds_per_step", found.forward), ("seconds_per_step", found.both)):
                rows.append(row(name, mode, metric, shape, [value / T for value in seconds], device))
            rows.append(row(name, mode, "peak_bytes", shape, [found.peak], device))
            forward, both = median(found.forward), median(found.both)
            ratio = f"{both / median(base.both):.2f}" if isinstance(base, Timed) else "-"
            microseconds = f"{forward / T * 1e6:.2f}", f"{both / T * 1e6:.2f}"
            remark = algorithm if name == TORCH else ""
            lines.append((f"{dtype} {B} {H}", name, *microseconds, ratio, floor, mib(found.peak), remark))
    table(
        "Microseconds per step of one layer, I = H, T=1000",
        ("dtype, B, H", "who", "forward", "both", "of nn.LSTM", "floor", "peak", "cuDNN takes"),
        lines,
        caption="floor: the largest of FLOPs, bytes and one barrier, of the recurrence in both passes, by data sheets",
    )
    for reason in sorted(broken):
        console.print(f"not timed: {reason}", markup=False, style="yellow")
    return ""


class Timed(NamedTuple):
    """Seconds of each pass, forward alone and with backward, and peak bytes of a pass."""

    forward: list[float]
    both: list[float]
    peak: int


def _time_all(device: str, dtype: str, T: int, B: int, H: int, args: argparse.Namespace) -> dict[str, "Timed | str"]:
    """Time every contender in turns; for one that cannot run, its reason."""
    where = {"device": device, "dtype": getattr(torch, dtype)}
    x = torch.randn(T, B, H, device=device).to(where["dtype"]).requires_grad_()
    dy = torch.randn(T, B, H, device=device).to(where["dtype"])
    passes: dict[tuple[str, str], Callable[[], Any]] = {}
    found: dict[str, Timed | str] = {}
    peaks: dict[str, int] = {}
    for name, make in contenders(device).items():
        try:
            torch.manual_seed(args.seed)
            forward, weights = make(H, H, **where)
            both = _training_step(forward, [x, *weights], dy)
            both()
            peaks[name] = peak_bytes(both, device)
        except Exception as error:
            # Peers fail in ways of their own, which is a result, too. Ours may refuse and run out of memory, no more.
            if name not in PEERS and not isinstance(error, (NoBackendError, torch.OutOfMemoryError)):
                raise
            found[name] = " ".join(str(error).split())[:300] or type(error).__name__
            continue
        passes[name, "forward"] = partial(forward, x)
        passes[name, "both"] = both
    repeats = 2 if args.dry_run else 5
    seconds = times(passes, repeats, lambda: synchronize(device), warm_up=1)
    for name, peak in peaks.items():
        found[name] = Timed(seconds[name, "forward"], seconds[name, "both"], peak)
    return found


def _training_step(forward: Callable[[Tensor], Tensor], inputs: list[Tensor], dy: Tensor) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(forward(inputs[0]), inputs, dy, allow_unused=True)

    return step


def _output(module: fusedrnn.LSTM, x: Tensor) -> Tensor:
    return module(x)[0]


def _floor(dtype: str, B: int, H: int) -> str:
    """Return the floor of a step's recurrence, forward and backward, in microseconds, by an H200's data sheet."""
    from fusedrnn.bench.kernels import CHIPS, step_seconds

    kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    size = 4 if kind == "fp32" else 2
    both = sum(
        step_seconds(f"sequence {way}", CHIPS["sm_90"], kind, size, B, H, 16, 16, 1)[0]
        for way in ("forward", "backward")
    )
    return f"{both * 1e6:.2f}"


def _long(args: argparse.Namespace, device: str, budget: Budget, rows: list[dict[str, Any]]) -> str:
    """TensorFlow's table of long sequences: with and without swapping, under a limit that forces it."""
    B, H = (512, 512) if device == "cuda" else (2, 16)
    lengths = (100, 200, 400, 600, 800, 1000, 2000, 5000, 10_000) if device == "cuda" else (8, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backend = "auto" if device == "cuda" else "torch_step"
    lines = []
    for T in lengths:
        if budget.left() < 5:
            console.print(f"from length {T} on left out for want of time", style="yellow")
            break
        x = torch.randn(T, B, H, device=device, dtype=dtype, requires_grad=True)
        dy = torch.randn(T, B, H, device=device, dtype=dtype)
        for save in ("gates", "hidden"):
            off = fusedrnn.offload(fusedrnn.OffloadConfig(occupancy=lambda: 1.0))
            passes, peaks = {}, {}
            for name, offload in (("kept", False), ("offloaded", off)):
                torch.manual_seed(args.seed)
                module = fusedrnn.LSTM(H, H, save=save, backend=backend, offload=offload, device=device, dtype=dtype)
                passes[name] = _training_step(partial(_output, module), [x, *module.parameters()], dy)
                passes[name]()
                peaks[name] = peak_bytes(passes[name], device)
            repeats = 3
            before = off.stats().spilled_bytes
            seconds = times(passes, repeats, lambda: synchronize(device))
            moved = (off.stats().spilled_bytes - before) / (repeats + 1)
            shape = f"T={T} B={B} I={H} H={H} L=1 {str(dtype).removeprefix('torch.')}"
            for name, taken in seconds.items():
                mode = f"{save}, {name}"
                rows.append(row(OURS, mode, "seconds_per_step", shape, [value / T for value in taken], device))
                rows.append(row(OURS, mode, "peak_bytes", shape, [peaks[name]], device))
            kept, offloaded = (median(seconds[name]) / T for name in ("kept", "offloaded"))
            microseconds = f"{kept * 1e6:.2f}", f"{offloaded * 1e6:.2f}"
            size = mib(peaks["kept"]), mib(peaks["offloaded"]), mib(moved)
            lines.append((f"{T:,}", save, *microseconds, f"{offloaded / kept:.3f}", *size))
    table(
        f"Long sequences: batch {B}, {H} units, everything pressed off the device (TensorFlow's `swap_memory`: 1.07)",
        ("length", "save", "us per step", "offloaded", "ratio", "peak", "offloaded", "to the host"),
        lines,
    )
    return ""


Section = Callable[[argparse.Namespace, str, Budget, list[dict[str, Any]]], str]
SECTIONS: dict[str, Section] = {
    "correctness": _correctness,
    "bits": _bits,
    "cases": _cases,
    "speed": _speed,
    "long": _long,
    "tests": _tests,
}
"""Each returns what failed, in words, or ""."""
