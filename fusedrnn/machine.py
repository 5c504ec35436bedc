"""What is known of a machine's speeds: published figures by name, and what `fusedrnn-bench calibrate` measured."""

import json
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fusedrnn.kernels._device import A100, B200, H100, DeviceInfo, device_info

VERSION = 1
"""Version of the files; those of others are not read."""


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


@dataclass(frozen=True)
class Sample:
    """Measured seconds per timestep of one layer in one direction.

    Args:
        cell: Name of the cell.
        backend: Name of the backend.
        save: Save mode.
        dtype: Element type by name.
        B: Batch size.
        I: Width of the input; where it is not H, it shows how fast a backend multiplies inputs.
        H: Hidden units.
        forward: Seconds per timestep of the forward pass.
        backward: Seconds per timestep of the backward pass.
    """

    cell: str
    backend: str
    save: str
    dtype: str
    B: int
    I: int
    H: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Machine:
    """How fast a machine is. Hashable.

    Args:
        name: Its name.
        memory: Bytes of the device's memory; None on the CPU, where it is the process's.
        device: "cuda" or "cpu".
        info: What backends ask about a CUDA device, None on the CPU.
        memory_bytes_per_second: Speed of the device's memory.
        half_flops: FLOP/s of dense products of bfloat16 and float16, summed in float32.
        tf32_flops: FLOP/s of dense products of float32 that may be rounded to TF32.
        float32_flops: FLOP/s of dense products of float32.
        float64_flops: FLOP/s of dense products of float64.
        link_bytes_per_second: Speed of copies between the device and pinned memory, each way; on the CPU of those by
            which a thread stands in for a link.
        link_latency: Seconds that each copy takes beyond its bytes.
        disk_bytes_per_second: The slower of writing to the disk and reading from it.
        eta_recurrent: What the products of single steps reach of the FLOP/s.
        eta_product: What products over whole chunks reach of the FLOP/s.
        step_latency: Least seconds of a step within one launch or operator: a barrier among all programs, and what lies
            on the way from one to the next.
        launch_latency: Seconds of a kernel's launch, or of one of torch's operators, however small.
        fresh_seconds_per_byte: Seconds per byte to map memory in blocks that the allocator does not keep.
        measured: Steps that were measured here.
        source: Where the figures are from, in words.

    Raises:
        ValueError: If a figure is not what it can be.
    """

    name: str
    memory: int | None
    device: str
    info: DeviceInfo | None
    memory_bytes_per_second: float
    half_flops: float
    tf32_flops: float
    float32_flops: float
    float64_flops: float
    link_bytes_per_second: float
    link_latency: float
    disk_bytes_per_second: float
    eta_recurrent: float
    eta_product: float
    step_latency: float
    launch_latency: float
    fresh_seconds_per_byte: float = 0.0
    measured: tuple[Sample, ...] = ()
    source: str = "given by the user"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            free = field.name == "fresh_seconds_per_byte" and value == 0
            if field.type is float and not (free or _is_positive(value)):
                raise ValueError(f"`{field.name}` must be positive and finite, got {value!r}")
        for sample in self.measured:
            if not all(map(_is_positive, (sample.B, sample.I, sample.H, sample.forward, sample.backward))):
                raise ValueError(f"`measured` must have positive sizes and seconds, got {sample}")

    def flops_per_second(self, dtype: torch.dtype, tf32: bool = False) -> float:
        """Return the FLOP/s of dense products.

        Args:
            dtype: Element type.
            tf32: Whether products of float32 may be rounded to TF32.
        """
        if dtype == torch.float64:
            return self.float64_flops
        if dtype == torch.float32:
            return self.tf32_flops if tf32 else self.float32_flops
        return self.half_flops


_PUBLISHED = "preset, published figures and assumed efficiencies"


def _gpu(
    name: str,
    info: DeviceInfo,
    bandwidth: float,
    tflops: tuple[float, float, float, float],
    link: float,
    source: str = _PUBLISHED,
) -> Machine:
    """Return a GPU from its published figures; all that is written out here is assumed, not published.

    Efficiencies of products, 5 microseconds of a step and 6 of a copy are guesses; 3 microseconds of a launch is
    what `backends/graphs.py` assumes. Disk: an SSD on PCIe 4.0 with four lanes at less than half of its link's speed.
    """
    half, tf32, single, double = (1e12 * figure for figure in tflops)
    return Machine(
        name=name,
        memory=info.memory,
        device="cuda",
        info=info,
        memory_bytes_per_second=bandwidth,
        half_flops=half,
        tf32_flops=tf32,
        float32_flops=single,
        float64_flops=double,
        link_bytes_per_second=link,
        link_latency=6e-6,
        disk_bytes_per_second=3e9,
        eta_recurrent=0.35,
        eta_product=0.6,
        step_latency=5e-6,
        launch_latency=3e-6,
        source=source,
    )


# Speeds of links are assumed: 25 GB/s of the 32 of PCIe 4.0 x16, 52 of the 64 of PCIe 5.0 x16 (55.7 were reported), 300
# of the 450 GB/s each way that NVLink-C2C has. FLOP/s are dense, in TFLOP/s: half precision with sums in float32, TF32,
# float32, float64. Shared memory per program by compute capability: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability" (99 KiB for 8.6 and 8.9).
_PCIE4, _PCIE5, _C2C = 25e9, 52e9, 300e9

PRESETS: dict[str, Machine] = {
    # NVIDIA A100 80GB data sheet (SXM4).
    "a100": _gpu("a100", A100, 2.039e12, (312, 156, 19.5, 9.7), _PCIE4),
    # NVIDIA H100 data sheet (SXM5).
    "h100": _gpu("h100", H100, 3.35e12, (989, 495, 67, 34), _PCIE5),
    # NVIDIA H200 data sheet (SXM).
    "h200": _gpu("h200", replace(H100, memory=141 << 30), 4.8e12, (989, 495, 67, 34), _PCIE5),
    # NVIDIA HGX B200 data sheet, an eighth of its eight devices.
    "b200": _gpu("b200", B200, 7.7e12, (2250, 1125, 75, 37), _PCIE5),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (GeForce RTX 4090).
    "rtx4090": _gpu("rtx4090", DeviceInfo(89, 128, 99 << 10, 24 << 30), 1.008e12, (165.2, 82.6, 82.6, 1.29), _PCIE4),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A (GeForce RTX 3090).
    "rtx3090": _gpu("rtx3090", DeviceInfo(86, 82, 99 << 10, 24 << 30), 0.936e12, (71, 35.6, 35.6, 0.56), _PCIE4),
    # NVIDIA L40S data sheet.
    "l40s": _gpu("l40s", DeviceInfo(89, 142, 99 << 10, 48 << 30), 0.864e12, (362, 183, 91.6, 1.43), _PCIE4),
    # NVIDIA GH200 Grace Hopper Superchip data sheet (96 GB of HBM3).
    "gh200": _gpu("gh200", replace(H100, memory=96 << 30), 4e12, (989, 495, 67, 34), _C2C),
    # One thread, all of it assumed, by what two cores of an AMD EPYC (Zen 5) gave in December 2026.
    "cpu": Machine(
        name="cpu",
        memory=None,
        device="cpu",
        info=None,
        memory_bytes_per_second=20e9,
        half_flops=50e9,
        tf32_flops=100e9,
        float32_flops=100e9,
        float64_flops=50e9,
        link_bytes_per_second=10e9,
        link_latency=20e-6,
        disk_bytes_per_second=1e9,
        eta_recurrent=0.5,
        eta_product=0.9,
        step_latency=5e-6,
        launch_latency=1.5e-6,
        fresh_seconds_per_byte=2e-10,
        source="rough figures of a processor, none measured: run `fusedrnn-bench calibrate`",
    ),
}
"""Machines by name."""


def machine(device: str | torch.device | Machine = "cpu") -> Machine:
    """Return what is known of a machine.

    Args:
        device: The name of a preset; or a device of this machine: then what `fusedrnn-bench calibrate` measured here
            where its file is there and fits, else the preset of that name, else rough figures.

    Raises:
        ValueError: If there is neither such a preset nor such a device.
    """
    if isinstance(device, Machine):
        return device
    word = str(device)
    if word in PRESETS and word != "cpu":
        return PRESETS[word]
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", word)
    if match is None or (word != "cpu" and int(match[1] or 0) >= torch.cuda.device_count()):
        raise ValueError(
            f"`device` must be one of {', '.join(map(repr, PRESETS))}, or 'cuda' or 'cuda:N' where there is such a "
            f"device ({torch.cuda.device_count()} here), got {word!r}"
        )
    return _calibrated(word) or uncalibrated(word)


def uncalibrated(device: str) -> Machine:
    """Return what is known of a device of this machine without measuring it.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    if device == "cpu":
        found, threads = PRESETS["cpu"], torch.get_num_threads()
        per_thread = ("half_flops", "tf32_flops", "float32_flops", "float64_flops")
        return replace(found, **{name: threads * getattr(found, name) for name in per_thread})
    info = device_info(torch.device(device))
    assert info is not None
    known = _preset_of(device_name(device))
    return rough(device_name(device), info) if known is None else replace(known, info=info, memory=info.memory)


def machine_with(info: DeviceInfo | None) -> Machine:
    """Return what is known of the machine whose device has these figures.

    Args:
        info: Those of a CUDA device, here or elsewhere; None for the CPU.
    """
    if info is None:
        return machine("cpu")
    for index in range(torch.cuda.device_count()):
        if device_info(torch.device("cuda", index)) == info:
            return machine(f"cuda:{index}")
    return next((preset for preset in PRESETS.values() if preset.info == info), rough("a GPU", info))


def _preset_of(name: str) -> Machine | None:
    """Return the preset of a device by the name that its driver gives, or None."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    # The longest, since an H200 is in the name of a GH200.
    return PRESETS.get(max((key for key in PRESETS if key in word and key != "cpu"), key=len, default=""))


def rough(name: str, info: DeviceInfo) -> Machine:
    """Return rough figures of a GPU that no preset is for: per multiprocessor those of an A100, within a factor of two.

    Args:
        name: Its name.
        info: Its figures.
    """
    share = info.multiprocessors / A100.multiprocessors
    like = PRESETS["a100"]
    per_multiprocessor = ("memory_bytes_per_second", "half_flops", "tf32_flops", "float32_flops", "float64_flops")
    return replace(
        like,
        **{field: share * getattr(like, field) for field in per_multiprocessor},
        name=name,
        memory=info.memory,
        info=info,
        source="rough figures by the number of multiprocessors: run `fusedrnn-bench calibrate --device cuda`",
    )


# Files.


@lru_cache(maxsize=8)
def device_name(device: str = "cpu") -> str:
    """Return the name of a GPU, or of this machine's processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def path_of(device: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the measured figures of a device are kept.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        environ: The environment.
    """
    folder = environ.get("XDG_CACHE_HOME", "")
    # The specification of these folders says that a relative one is not to be heeded.
    # Not `Path.home()`, which raises for a user without one, as in some containers.
    cache = Path(folder) if Path(folder).is_absolute() else Path(os.path.expanduser("~/.cache"))
    word = "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_name(device).lower())
    return cache / "fusedrnn" / f"machine-{word}.json"


def _threads(device: str) -> int | None:
    """Return how many threads compute on a device, None where these are not torch's."""
    return torch.get_num_threads() if device == "cpu" else None


def write(found: Machine, device: str, path: Path) -> None:
    """Write measured figures to a file, which is whole at any time.

    Args:
        found: The figures.
        device: The device that was measured.
        path: The file.
    """
    header = {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": device_name(device),
        "threads": _threads(device),
    }
    body = asdict(found) | {"measured": [list(asdict(sample).values()) for sample in found.measured]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(header | {"machine": body}, indent=1) + "\n")
    part.replace(path)


def read(path: Path, device: str) -> Machine:
    """Read measured figures.

    Args:
        path: The file.
        device: The device for which they are to hold.

    Raises:
        ValueError: If the file is broken, of another version, or of another device or number of threads.
    """
    try:
        content = json.loads(path.read_text())
        facts = tuple(content[key] for key in ("version", "device", "threads"))
        body: dict[str, Any] = content["machine"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__}: {error})") from error
    wanted = VERSION, device_name(device), _threads(device)
    for name, has, needs in zip(("version", "device", "threads"), facts, wanted, strict=True):
        if has != needs:
            raise ValueError(f"it is for {name} {has}, here it is {needs}")
    try:
        info = None if body["info"] is None else DeviceInfo(**body["info"])
        samples = tuple(Sample(*sample) for sample in body["measured"])
        return Machine(**body | {"info": info, "measured": samples})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is broken ({type(error).__name__}: {error})") from error


def _calibrated(device: str) -> Machine | None:
    """Return the measured figures of a device, or None where there are none that hold."""
    path = path_of(device)
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read_once(path, changed, device, _threads(device))


@lru_cache(maxsize=16)
def _read_once(path: Path, changed: int, device: str, threads: int | None) -> Machine | None:
    """Read a file once for each time that it was changed, and warn as often where it does not hold."""
    try:
        return read(path, device)
    except ValueError as error:
        option = "" if device == "cpu" else f" --device {device}"
        warnings.warn(
            f"{path} is not used: {error}; run `fusedrnn-bench calibrate{option}` to measure anew, or delete it",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
