"""What a machine and its software say of themselves, for `fusedrnn-bench doctor`."""

import os
import platform
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import fusedrnn
from fusedrnn.backends.base import tf32_allowed
from fusedrnn.bench._report import commit, device_name, triton_version
from fusedrnn.kernels._device import DeviceInfo, device_info
from fusedrnn.offloading.config import OffloadConfig, process_memory
from fusedrnn.offloading.device import AcceleratorDevice


@dataclass(frozen=True)
class Fact:
    """One thing found.

    Args:
        name: What it is about.
        text: What was found, for people.
        value: The same for machines; None where the text says it all.
        advice: What to do about it; "" where nothing is wrong.
    """

    name: str
    text: str
    value: Any = None
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device.

    Args:
        index: Its number.
        name: Its name.
        info: Figures that a choice of blocks depends on.
        integrated: Whether its memory is the host's.
        usable: Bytes that this process may use.
        allocated: Bytes that this process's tensors take.
        reserved: Bytes that torch's allocator holds, those of tensors included.
        free: Bytes that no process holds.
    """

    index: int
    name: str
    info: DeviceInfo
    integrated: bool
    usable: int
    allocated: int
    reserved: int
    free: int

    @property
    def device(self) -> str:
        """Its name in torch."""
        return f"cuda:{self.index}"


def find_gpus() -> list[Gpu]:
    """Return the CUDA devices that torch sees."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        info, cuda, properties = (
            device_info(device),
            AcceleratorDevice(device),
            torch.cuda.get_device_properties(device),
        )
        assert info is not None
        memory = cuda.memory(), cuda.allocated(), torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
        found.append(Gpu(index, properties.name, info, bool(properties.is_integrated), *memory))
    return found


def size(nbytes: float) -> str:
    """Return bytes in words, in the largest unit of which there is one."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << exponent:
            count = nbytes / (1 << exponent)
            return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def devices(gpus: Sequence[Gpu]) -> list[Fact]:
    """Return what each device is and how full it is."""
    if not gpus:
        return [Fact("cuda", "no CUDA device: everything runs on the CPU", [])]
    facts = []
    for gpu in gpus:
        info = gpu.info
        facts.append(
            Fact(
                gpu.device,
                f"{gpu.name}, compute capability {info.capability / 10}, {info.multiprocessors} multiprocessors, "
                f"{size(info.shared_bytes)} of shared memory, {size(info.memory)}"
                + (", integrated" if gpu.integrated else ""),
                {"name": gpu.name, "integrated": gpu.integrated, **vars(info)},
                "its memory is the host's, so offloading gains nothing: leave `offload` off" if gpu.integrated else "",
            )
        )
        others = info.memory - gpu.free - gpu.reserved
        fraction = (gpu.free + gpu.reserved) / info.memory
        limited = gpu.usable <= gpu.free + gpu.reserved
        facts.append(
            Fact(
                f"{gpu.device} memory",
                f"occupancy {gpu.allocated / max(1, gpu.usable):.0%} of {size(gpu.usable)}, {size(gpu.free)} free",
                {"usable": gpu.usable, "allocated": gpu.allocated, "reserved": gpu.reserved, "free": gpu.free},
                # A context of one's own takes half a GiB or so.
                f"others hold {size(others)}, which the occupancy does not count, so memory may run out before "
                f"offloading starts: call torch.cuda.set_per_process_memory_fraction({int(fraction * 100) / 100}, "
                f"{gpu.index})"
                if others > info.memory / 10 and not limited and not gpu.integrated
                else "",
            )
        )
    return facts


def driver(root: Path) -> str:
    """Return the version of the NVIDIA driver, or "" where there is none.

    Args:
        root: Where /proc is found.
    """
    with suppress(OSError):
        if match := re.search(r"\b\d+\.\d+(\.\d+)?\b", (root / "proc/driver/nvidia/version").read_text()):
            return match[0]
    return ""


def installed(root: Path, gpus: Sequence[Gpu], cuda: str | None = torch.version.cuda) -> list[Fact]:
    """Return versions, and whether they go together.

    Args:
        root: Where /proc is found.
        gpus: The devices.
        cuda: The CUDA for which torch is built, or None.
    """
    found = driver(root)
    advice = ""
    if found and not gpus:
        advice = "there is a driver, but this torch is built without CUDA: install a build with it (pytorch.org)"
        if cuda:
            advice = f"torch sees no device: is the driver too old for CUDA {cuda}, or CUDA_VISIBLE_DEVICES set?"
    build = f"for CUDA {cuda}" if cuda else f"for ROCm {torch.version.hip}" if torch.version.hip else "without CUDA"
    cudnn = torch.backends.cudnn.version() if cuda else None
    return [
        Fact("fusedrnn", f"{fusedrnn.__version__} in {Path(fusedrnn.__file__).parent}, commit {commit() or 'unknown'}"),
        Fact("python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"),
        Fact("torch", f"{torch.__version__}, built {build}" + (f", cuDNN {cudnn}" if cudnn else ""), advice=advice),
        _onednn(),
        _triton(bool(gpus)),
        Fact("NVIDIA driver", found or "none"),
    ]


def _onednn() -> Fact:
    version = re.search(r"MKL-DNN v(\S+)", torch.__config__.show())
    if version is None:
        return Fact(
            "oneDNN", "none in this torch", advice="without it the CPU computes step by step: take another build"
        )
    return Fact("oneDNN", f"{version[1]}, {torch.backends.cpu.get_cpu_capability()}")


def _triton(wanted: bool) -> Fact:
    version = triton_version()
    try:
        import_module("triton")
    except Exception as error:
        # A broken installation fails in ways of its own.
        if version:
            return Fact("Triton", f"{version}, but it does not load: {error}", advice="install it again")
        advice = "without it the devices compute step by step in torch: pip install triton" if wanted else ""
        return Fact("Triton", "not installed", advice=advice)
    return Fact("Triton", version)


def processor(
    root: Path,
    environ: Mapping[str, str],
    gpus: Sequence[Gpu],
    cores: int = len(os.sched_getaffinity(0)),
    threads: int | None = None,
) -> list[Fact]:
    """Return the cores that this process may use, and the threads that torch starts on them.

    Args:
        root: Where /proc and /sys are found.
        environ: The environment.
        gpus: The devices.
        cores: Cores on which the process may run.
        threads: Threads of torch's operators; None asks torch.
    """
    threads = torch.get_num_threads() if threads is None else threads
    quota = cpu_quota(root)
    usable = max(1, min(cores, int(quota or cores)))
    share = max(1, usable // _processes(environ))
    asked = environ.get("OMP_NUM_THREADS")
    advice = ""
    if threads > usable:
        advice = f"they wait for one another on {usable} cores: set OMP_NUM_THREADS={share}"
    # torch takes one thread for each pair of hyperthreads where it is not told otherwise.
    elif threads < share // 2 and asked and not gpus:
        advice = f"torchrun sets one thread unless told otherwise; for the CPU, set OMP_NUM_THREADS={share}"
    limit = f", limited to {quota:g} by a cgroup" if quota and quota < cores else ""
    return [
        Fact("processor", device_name()),
        Fact("cores", f"{cores} of {os.cpu_count()}{limit}", usable),
        Fact("threads", f"{threads}, OMP_NUM_THREADS {asked or 'not set'}", threads, advice),
    ]


def cpu_quota(root: Path) -> float | None:
    """Return the cores' worth of time that cgroups (version 2) leave to this process, None where they do not limit it.

    Args:
        root: Where /proc and /sys are found.
    """
    quotas = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if not line.startswith("0::"):
                continue
            top = root / "sys/fs/cgroup"
            group = top / line[3:].lstrip("/")
            for folder in (group, *group.parents):
                # "max 100000" where there is no limit.
                with suppress(OSError, ValueError):
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                    quotas.append(quota / period)
                if folder == top:
                    break
    return min(quotas, default=None)


def _processes(environ: Mapping[str, str]) -> int:
    return max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))


def memory(root: Path, gpus: Sequence[Gpu]) -> list[Fact]:
    """Return how much host memory there is, and what offloading would take of it.

    Args:
        root: Where /proc and /sys are found.
        gpus: The devices.
    """
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    known = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}
    total, available, usable = known["MemTotal"], known["MemAvailable"], process_memory(root)
    config = OffloadConfig()
    share, processes = config.host_bytes(), _processes(os.environ)
    advice = ""
    if share * processes > available:
        advice = f"less is available now: pass OffloadConfig(host_limit={available // 2}), or free some"
    elif len(gpus) > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        advice = "where something else than torchrun starts several processes, set LOCAL_WORLD_SIZE to their number, "
        advice += "or each takes as much as all should together"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "no limit" if locked == resource.RLIM_INFINITY else size(locked)
    facts = [
        Fact("memory", f"{size(total)}, {size(available)} available", {"total": total, "available": available}),
        Fact("cgroup limit", size(usable) if usable < total else "none", usable if usable < total else None),
        Fact(
            "host_limit",
            f"{config.host_limit} is {size(share)}" + (f" for each of {processes} processes" if processes > 1 else ""),
            share,
            advice,
        ),
        Fact("RLIMIT_MEMLOCK", f"{limit}; the CUDA driver pins without asking it", locked),
    ]
    with suppress(OSError):
        setting = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        if match := re.search(r"\[(\w+)\]", setting):
            asked = os.environ.get("THP_MEM_ALLOC_ENABLE", "not set")
            facts.append(
                Fact("huge pages", f"{match[1]} (THP_MEM_ALLOC_ENABLE, by which torch asks for them: {asked})")
            )
    return facts


_VARIABLES = {
    "TRITON_INTERPRET": "Triton kernels are interpreted, thousands of times slower: unset it but for tests",
    "CUDA_LAUNCH_BLOCKING": "every launch is waited for, so no copy runs beside a kernel: unset it",
    "CUDA_DEVICE_MAX_CONNECTIONS": "with one queue, copies wait behind kernels of other streams: set it to 8",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "memory is not counted, so offloading never sees a full device: unset it",
}
"""What is bad about a variable of the environment."""


def switches(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Fact]:
    """Return variables and switches of torch that change what runs.

    Args:
        environ: The environment.
        gpus: The devices.
    """
    facts = []
    for name, advice in _VARIABLES.items():
        value = environ.get(name)
        if name == "CUDA_DEVICE_MAX_CONNECTIONS":
            bad = value == "1"
        elif name == "PYTORCH_NO_CUDA_MEMORY_CACHING":
            bad = value is not None  # Whatever it says: torch asks only whether it is there.
        else:
            bad = (value or "0").lower() not in ("0", "false", "off", "no", "n")
        facts.append(Fact(name, "not set" if value is None else f"={value}", value, advice if bad else ""))
    ours = "TF32" if tf32_allowed() else "float32"
    theirs = "TF32" if torch.backends.cudnn.rnn.fp32_precision == "tf32" else "float32"  # type: ignore[attr-defined]
    text = f"ours multiply in {ours} (torch.backends.cuda.matmul.fp32_precision), torch.nn.LSTM's in {theirs}"
    facts.append(Fact("float32 products", text if gpus else "a matter of CUDA devices, of which there is none"))
    return facts
