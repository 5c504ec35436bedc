"""What the Triton kernels need, by compile report, and how near to the floor of a step a model puts them.

The floor of a step is the largest of its FLOPs at the peak rate, its bytes at the memory's bandwidth, and a barrier
among the programs. The model adds the barrier to the largest of: one program's products at its share of the peak, what
programs exchange at the bandwidth of the L2 cache, and the bytes. Neither is a measurement.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedrnn.bench._report import Row, console, progress, table, triton_version

if TYPE_CHECKING:
    from fusedrnn.kernels._compile import Report
    from fusedrnn.kernels._device import DeviceInfo

TYPES = {
    "bf16": ("bf16", 2, "ieee"),
    "fp16": ("fp16", 2, "ieee"),
    "tf32": ("fp32", 4, "tf32"),
    "fp32": ("fp32", 4, "ieee"),
}
"""By name: Triton's name of the dtype, bytes of an element, and how products are computed."""

BARRIER = 1.5e-6
"""Seconds that a barrier among all programs takes: 1 to 2 microseconds by reports of others, not measured here."""


@dataclass(frozen=True)
class Chip:
    """Peak figures of a device.

    Args:
        name: Its name.
        capability: Compute capability without the dot.
        flops: FLOP/s of dense products, by name in `TYPES`.
        memory: Bytes/s of memory.
        cache: Bytes/s of the L2 cache.
    """

    name: str
    capability: int
    flops: Mapping[str, float]
    memory: float
    cache: float

    def info(self) -> "DeviceInfo":
        """Return the figures that a choice of blocks depends on."""
        from fusedrnn.kernels._device import A100, B200, H100

        return {80: A100, 90: H100, 100: B200}[self.capability]


def _flops(half: float, tf32: float, full: float) -> dict[str, float]:
    return {"bf16": half * 1e12, "fp16": half * 1e12, "tf32": tf32 * 1e12, "fp32": full * 1e12}


# Products and memory: NVIDIA's data sheets of the A100 80GB SXM, the H200 SXM and the B200 (in HGX B200), dense rates.
# L2 cache: 7.2 and 9.0 TB/s in table 3 of PMC10448217 (A100, H100); none was found for the B200, which gets the H100's.
CHIPS = {
    "sm_80": Chip("A100", 80, _flops(312, 156, 19.5), 2.0e12, 7.2e12),
    "sm_90": Chip("H200", 90, _flops(989, 495, 67), 4.8e12, 9.0e12),
    "sm_100": Chip("B200", 100, _flops(2250, 1125, 75), 7.7e12, 9.0e12),
}


@dataclass(frozen=True)
class Line:
    """One kernel on one device for one problem; without a report if its choice of blocks is refused."""

    kernel: str
    dtype: str
    arch: str
    B: int
    H: int
    blocks: str
    programs: int
    floor: float
    model: float
    report: "Report | None"

    def cells(self) -> tuple[Any, ...]:
        """Return what the table shows."""
        problem, size = f"{self.dtype} {self.arch}", f"{self.B}, {self.H}"
        if self.report is None:
            return problem, size, "refused", *[""] * 6
        registers = f"{self.report.registers}" + (f", {self.report.spills} spills" if self.report.spills else "")
        needs = registers, _kib(self.report.shared_bytes), self.report.matrix_instructions or "-"
        return problem, size, self.blocks, self.programs, *needs, f"{1e6 * self.floor:.2f}", f"{1e6 * self.model:.2f}"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows for machines."""
        if self.report is None:
            return []
        values: dict[str, float] = {
            "registers": self.report.registers,
            "spills": self.report.spills,
            "stack_bytes": self.report.stack_bytes,
            "shared_bytes": self.report.shared_bytes,
            "programs": self.programs,
            "floor_seconds": self.floor,
            "model_seconds": self.model,
        }
        mode, shape = f"blocks {self.blocks}", f"B={self.B} H={self.H} {self.dtype}"
        device = f"{self.arch}, by compile report"
        return [asdict(Row(self.kernel, mode, name, shape, v, v, v, device)) for name, v in values.items()]


_LEGEND = (
    "Blocks are rows x columns x warps of a program, KiB its shared memory; floor and model are microseconds of a "
    "step, computed from data sheets and not measured: "
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--units", type=int, nargs="+", default=[256, 512, 1024], help="hidden units H")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="batch sizes B")
    parser.add_argument(
        "--dtypes", nargs="+", choices=TYPES, default=["bf16", "tf32"], help="dtypes, and how products are"
    )
    parser.add_argument("--arch", nargs="+", choices=CHIPS, default=list(CHIPS), help="architectures")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", default=[], help="kernels whose name holds one of the words"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the choices of the sequence kernels to FILE as well")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command and return its rows."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("error: interpreted kernels have no machine code; unset TRITON_INTERPRET")
    from fusedrnn.kernels._compile import KERNELS

    names = [name for name in KERNELS if not args.only or any(word in name for word in args.only)]
    jobs = [
        (name, dtype, arch, B, H)
        for name in names
        for dtype in args.dtypes
        for arch in args.arch
        for H in args.units
        for B in args.batch
        # How products are computed is nothing to the elementwise kernels.
        if name.startswith("sequence") or dtype != "tf32" or "fp32" not in args.dtypes
    ]
    lines, reports, refusals = [], dict[Any, "Report"](), []
    with progress(args.quiet) as bar:
        task = bar.add_task("kernels", total=len(jobs))
        for job in jobs:
            bar.update(task, description=" ".join(map(str, job)))
            line, refusal = _line(*job, reports)
            lines.append(line)
            if refusal and refusal not in refusals:
                refusals.append(refusal)
            bar.advance(task)
    for name in names:
        table(
            f"{name}, by compile report",
            ("", "B, H", "blocks", "grid", "regs", "KiB", "matrix", "floor", "model"),
            [line.cells() for line in lines if line.kernel == name],
        )
    console.print(_LEGEND + ", ".join(f"{arch} {CHIPS[arch].name}" for arch in args.arch) + ".", style="dim")
    for refusal in refusals:
        console.print(f"refused: {refusal}", style="dim")
    if args.markdown is not None:
        Path(args.markdown).write_text(_markdown(lines))
    return [row for line in lines for row in line.rows()]


def _line(name: str, dtype: str, arch: str, B: int, H: int, reports: "dict[Any, Report]") -> tuple[Line, str | None]:
    """Compile a kernel for a problem unless `reports` has it; return its line, and why its blocks are refused."""
    from fusedrnn.kernels import _launch, _sequence
    from fusedrnn.kernels._compile import KERNELS
    from fusedrnn.kernels.lstm_layer_norm_step import pick as whole_rows

    chip, (element, size, precision) = CHIPS[arch], TYPES[dtype]
    config: _launch.Config | _sequence.Config
    if name.startswith("sequence"):
        picked = _sequence.Config.pick(B, H, size, chip.info(), precision)
        if isinstance(picked, str):
            return Line(name, dtype, arch, B, H, "", 0, 0.0, 0.0, None), picked
        config = picked
    else:
        config = whole_rows(B, H) if name.startswith("layer norm") else _launch.Config.pick(B, H)
    key = name, element, precision, arch, H, config
    if key not in reports:
        reports[key] = KERNELS[name].report(element, chip.capability, H, config, precision)
    batch_blocks, hidden_blocks = config.grid(B, H)
    programs = batch_blocks * hidden_blocks
    floor, model = step_seconds(name, chip, dtype, size, B, H, config.block_b, config.block_h, programs)
    blocks = f"{config.block_b}x{config.block_h}x{config.num_warps}"
    return Line(name, dtype, arch, B, H, blocks, programs, floor, model, reports[key]), None


def step_seconds(
    name: str, chip: Chip, dtype: str, size: int, B: int, H: int, block_b: int, block_h: int, programs: int
) -> tuple[float, float]:
    """Return the floor of a step and the model's time of it, in seconds."""
    elements = {  # of the layer's dtype and of float32, read and written per row and column
        "step forward": (9, 2),
        "step backward": (10, 4),
        "recompute": (8, 1),
        "GRU step forward": (12, 0),
        "GRU step backward": (12, 0),
        "layer norm step forward": (5, 6),
        "layer norm step backward": (6, 17),
        "sequence forward": (9, 1),
        "sequence backward": (9, 1),
    }
    own, wide = elements[name]
    memory = B * H * (own * size + 4 * wide) / chip.memory
    if not name.startswith("sequence"):
        return memory, memory
    flops = 8 * B * H * H
    share = 8 * block_b * block_h * H / (chip.flops[dtype] / chip.info().multiprocessors)
    # Forward, every program reads all of h of its rows; backward, it writes as much and its block's programs read it.
    exchanged = programs * block_b * H * size * (1 if name == "sequence forward" else 2)
    floor = max(flops / chip.flops[dtype], memory, BARRIER)
    return floor, BARRIER + max(share, exchanged / chip.cache, memory)


def _markdown(lines: list[Line]) -> str:
    """Return the choices of the sequence kernels as a table."""
    pairs: dict[tuple[str, str, int, int], dict[str, Line]] = {}
    for line in lines:
        if line.kernel.startswith("sequence"):
            pairs.setdefault((line.dtype, line.arch, line.H, line.B), {})[line.kernel] = line
    text = [
        "# Blocks of the sequence kernels",
        "",
        f"Written by `fusedrnn-bench kernels --markdown` with Triton {triton_version()}: by compile report, not",
        "measured on a device. Blocks are rows x columns x warps of a program; registers are per thread and shared",
        "memory per program, forward / backward; nothing spills unless it says so. `B up to` is the largest batch that",
        "one launch takes; above it, or where a row says refused, another backend runs. tf32 and fp32 are float32",
        "layers, by how their products are computed.",
        "",
        "| H | dtype | device | B | B up to | blocks | programs | registers | shared KiB | matrix instruction |",
        "|---:|---|---|---:|---:|---|---:|---|---|---|",
    ]
    for (dtype, arch, H, B), found in pairs.items():
        device, limit = f"{arch} ({CHIPS[arch].name})", _largest_batch(dtype, arch, H)
        both = [found[name] for name in ("sequence forward", "sequence backward") if name in found]
        reports = [line.report for line in both if line.report is not None]
        if not reports:
            text.append(f"| {H} | {dtype} | {device} | {B} | {limit} | refused | | | | |")
            continue
        spills = "".join(f", {report.spills} spills" for report in reports if report.spills)
        registers = " / ".join(str(report.registers) for report in reports) + spills
        shared = " / ".join(_kib(report.shared_bytes) for report in reports)
        matrix = " / ".join(dict.fromkeys(report.matrix_instructions or "none" for report in reports))
        text.append(
            f"| {H} | {dtype} | {device} | {B} | {limit} | {both[0].blocks} | {both[0].programs} | {registers} "
            f"| {shared} | {matrix} |"
        )
    return "\n".join(text) + "\n"


def _largest_batch(dtype: str, arch: str, H: int) -> int:
    """Return the largest batch that one launch takes, 0 where it takes none."""
    from fusedrnn.kernels._sequence import blocks_of

    info, (_, size, precision) = CHIPS[arch].info(), TYPES[dtype]
    largest = 0
    for blocks in blocks_of(info.capability, size, precision):
        config = blocks.fit(H, size, info.shared_bytes)
        if config.shared_bytes(H, size) <= info.shared_bytes:
            largest = max(largest, info.multiprocessors // config.grid(1, H)[1] * config.block_b)
    return largest


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.0f}"
