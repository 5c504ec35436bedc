"""How fast bytes move on a machine, for `fusedrnn-bench doctor`: over the link to a device, and to a disk."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import torch

from fusedrnn.bench._facts import Fact, Gpu, size
from fusedrnn.offloading.device import AcceleratorDevice, Device, Span, ThreadDevice

SIZES = tuple(64 << 10 << 2 * k for k in range(7))
"""Bytes of a copy, from 64 KiB to 256 MiB."""
_CHUNK = 4 << 20
_PIECE = 32 << 20
_SLOW_LINK = 6e9
"""Bytes/s; half of what PCIe 3.0 with 16 lanes gives."""


def link(device: Device, name: str, sizes: Sequence[int] = SIZES, gpu: Gpu | None = None) -> list[Fact]:
    """Measure copies to pinned memory and back.

    Args:
        device: Who copies.
        name: Its name in the facts.
        sizes: Bytes of a copy.
        gpu: What is known of it; None where threads stand in for it.

    Returns:
        One fact for each size, its values in bytes/s.
    """
    start = perf_counter()
    host = device.allocate_host(max(sizes))
    pinning = perf_counter() - start
    if host is None:
        advice = "offloading cannot run: free memory, or raise the limit of the container or machine"
        return [Fact(f"{name} pinning", f"no {size(max(sizes))} of pinned memory can be had", advice=advice)]
    try:
        buffer = device.allocate(max(sizes))
    except torch.OutOfMemoryError:
        return [
            Fact(f"{name} copies", f"no {size(max(sizes))} of its memory are free", advice="free some and ask again")
        ]
    # Memory that was never written is one page of zeros to whoever reads it.
    buffer.fill_(1)
    host.fill_(1)
    device.synchronize(device.record(device.current_stream()))
    facts = []
    if gpu:
        facts.append(Fact(f"{name} pinning", f"{1e3 * pinning:.0f} ms for {size(max(sizes))}", pinning))
    stream = device.new_stream("doctor")
    for nbytes in sizes:
        there, here = Span(buffer, 0, nbytes), Span(host, 0, nbytes)
        speeds = []
        for target, source in ((here, there), (there, here)):
            device.copy(stream, target, source)
            first = device.record(stream, timed=True)
            copies = max(2, min(32, max(sizes) // nbytes))
            for _ in range(copies):
                device.copy(stream, target, source)
            last = device.record(stream, timed=True)
            device.synchronize(last)
            seconds = device.elapsed(first, last)
            assert seconds is not None
            speeds.append(copies * nbytes / max(seconds, 1e-9))
        advice = ""
        if gpu and not gpu.integrated and nbytes == _CHUNK and min(speeds) < _SLOW_LINK:
            advice = (
                f"below {_SLOW_LINK / 1e9:.0f} GB/s: look up the PCIe link's generation and width (nvidia-smi -q), "
            )
            advice += "whether others use it, and whether the process runs on the device's NUMA node"
        text = f"{speeds[0] / 1e9:.3g} GB/s to the host, {speeds[1] / 1e9:.3g} GB/s back"
        value = {"bytes": nbytes, "to_host": speeds[0], "to_device": speeds[1]}
        facts.append(Fact(f"{name} {size(nbytes)}", text, value, advice))
    return facts


def transfer(gpus: Sequence[Gpu]) -> list[Fact]:
    """Measure the link to each device, or without any the copies of the threads that stand in for one."""
    if not gpus:
        return link(ThreadDevice(), "copy by a thread,", (_CHUNK, 64 << 20))
    return [fact for gpu in gpus for fact in link(AcceleratorDevice(torch.device(gpu.device)), gpu.device, gpu=gpu)]


def disk(folder: Path, nbytes: int = 256 << 20, limit: float = 2.0, root: Path = Path("/")) -> list[Fact]:
    """Measure a file's writing, until it is on the disk, and its reading from there.

    Args:
        folder: Where the file is made; it has no name and is gone afterwards.
        nbytes: Size of the file, less where space or time is short.
        limit: Seconds after which writing, and reading, stop.
        root: Where /proc is found.
    """
    free = shutil.disk_usage(folder).free
    kind = filesystem(folder, root)
    advice = f"{folder} is memory: pass --dir with a folder on a disk" if kind in ("tmpfs", "ramfs") else ""
    facts = [Fact("folder", f"{folder}, {kind or 'unknown'}, {size(free)} free", {"kind": kind, "free": free}, advice)]
    block = memoryview(bytearray(os.urandom(min(_CHUNK, nbytes))))
    nbytes = min(nbytes, free // 4)
    if nbytes < len(block):
        return [*facts, Fact("speed", "not measured, no room", advice=f"free some space in {folder}")]
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, start = 0, perf_counter()
        while written < nbytes and perf_counter() - start < limit:
            written += file.write(block)
            # Piece by piece, so that a slow disk cannot be given what takes it minutes.
            if written % _PIECE == 0:
                os.fsync(file.fileno())
        os.fsync(file.fileno())
        writing = written / (perf_counter() - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cached = _cached(file.fileno())
        file.seek(0)
        read, start = 0, perf_counter()
        while perf_counter() - start < limit and (count := file.readinto(block)):
            read += count
        reading = read / (perf_counter() - start)
    remark = " (from the page cache, which could not be dropped)" if cached else ""
    facts.append(Fact("write", f"{writing / 1e9:.3g} GB/s, {size(written)} with fsync", writing))
    facts.append(Fact("read", f"{reading / 1e9:.3g} GB/s{remark}", None if cached else reading))
    return facts


def _cached(descriptor: int) -> bool:
    """Whether a file's beginning can be read without waiting for the disk."""
    with suppress(OSError):
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    return False


def filesystem(folder: Path, root: Path = Path("/")) -> str:
    """Return the type of the file system on which a folder lies, "" where that is not known.

    Args:
        folder: The folder.
        root: Where /proc is found.
    """
    found, depth = "", -1
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = Path(before.split()[4].replace("\\040", " "))
            # The last of two mounted at the same point lies above.
            if folder.resolve().is_relative_to(point) and len(point.parts) >= depth:
                found, depth = after.split()[0], len(point.parts)
    return found
