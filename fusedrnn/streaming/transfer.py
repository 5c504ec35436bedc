"""Pieces on their way: read ahead on a thread, copied to the device ahead of use, and copied back behind it.

These edges keep a byte from being overwritten before it was read or read before it was written:

    S1  input stream waits for the allocation's former users     S4  output stream waits for the producer
    S2  reader waits for the copy to the device                  S5  what was copied is freed after the copy
    S3  what nobody asks for any more is freed after its copy    S6  host reads the staging buffer after the copy

What a user's generator makes on the device stays there. The thread that runs it works on the caller's stream, so that
it comes after what the caller has put there, and before what the caller does with it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from fusedrnn.offloading.device import Device, Span, device_for

_END = object()
_AHEAD = 2


def device_of(device: torch.device) -> Device | None:
    """Return who copies to and from a device; None where its memory is the host's."""
    return device_for(device)


def _place() -> Callable[[], None]:
    """Return what makes another thread work where this one does: on its device, and on its stream of each device."""
    accelerator = torch.accelerator.current_accelerator()
    # To ask an accelerator that nobody uses would start it; one that cannot say so has no streams either.
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: False)():
        return lambda: None
    index = torch.accelerator.current_device_index()
    streams = [torch.accelerator.current_stream(k) for k in range(torch.accelerator.device_count())]

    def take_over() -> None:
        for stream in streams:
            # To set the stream of a device that nobody uses would take memory there.
            if torch.accelerator.current_stream(stream.device_index) != stream:
                torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)

    return take_over


def arrivals(reads: Iterator[Callable[[], Tensor]], device: torch.device, held: bool) -> Generator[Tensor]:
    """Yield pieces on a device, each fetched while the one before it is in use.

    Args:
        reads: Called in order, on a thread, to return the pieces.
        device: Where they go. Those that are there are yielded as they are.
        held: Whether the pieces are views of a tensor that is there already, so that there is nothing to fetch.
    """
    if held:
        yield from (read() for read in reads)
        return
    copier = device_of(device)
    with closing(ahead(reads, device, copier)) as pieces:
        if copier is None:
            yield from pieces
        else:
            with closing(to_device(pieces, copier)) as arrived:
                yield from arrived


def ahead(
    reads: Iterator[Callable[[], Tensor]], device: torch.device, copier: Device | None = None
) -> Generator[Tensor]:
    """Yield what `reads` return, called on a thread ahead of the caller; for a `copier` in pinned memory or there."""

    def read_next() -> Any:
        with torch.no_grad():
            read = next(reads, None)
            if read is None:
                return _END
            piece = read()
            if copier is None:
                return piece
            return _pinned(piece, copier) if piece.is_cpu else piece.to(device)

    with ThreadPoolExecutor(1, thread_name_prefix="fusedrnn-input", initializer=_place()) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            waiting.extend(pool.submit(read_next) for _ in range(_AHEAD))
            while (piece := waiting.popleft().result()) is not _END:
                waiting.append(pool.submit(read_next))
                yield piece
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _pinned(piece: Tensor, copier: Device) -> Tensor:
    """Return a copy in pinned memory, or what fits there of memory that is not: the copy then takes longer."""
    buffer = copier.allocate_host(piece.nbytes)
    if buffer is None:
        return piece.contiguous()
    return _shaped(buffer, piece).copy_(piece)


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [nbytes]."""
    return tensor.view(-1).view(torch.uint8)


def _shaped(buffer: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of a buffer as a tensor like another."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)


def to_device(pieces: Iterator[Tensor], copier: Device) -> Generator[Tensor]:
    """Yield copies of `pieces` on the device, the next one on its way while one is in use; what is there, as it is."""
    stream = copier.new_stream("input")
    caller = copier.current_stream()

    def start(piece: Tensor | None) -> tuple[Tensor, Any, Any, Tensor] | None:
        """Return the piece on the device, its stream there, the event of its arrival, and what is being copied."""
        if piece is None:
            return None
        if isinstance(piece, Tensor) and not piece.is_cpu:
            return piece, caller, None, piece
        home = copier.current_stream()
        buffer = copier.allocate(piece.nbytes)
        copier.wait(stream, copier.record(home))  # S1
        copier.copy(stream, Span(buffer, 0, piece.nbytes), Span(_flat(piece), 0, piece.nbytes))
        return _shaped(buffer, piece), home, copier.record(stream), piece

    try:
        following = start(next(pieces, None))
        while following is not None:
            (here, home, arrived, _), following = following, None
            current = copier.current_stream()
            if arrived is not None:
                copier.wait(current, arrived)  # S2
            if current != home:
                # Between two pieces the user may go over to another stream.
                copier.wait(current, copier.record(home))
                here.record_stream(current)
            following = start(next(pieces, None))
            yield here
    except BaseException:
        # Whatever was on its way, also if an interrupt came before anybody knew of it.
        copier.wait(copier.current_stream(), copier.record(stream))  # S3
        raise


class Departures:
    """Copies rows to tensors on the host, behind the computation."""

    def __init__(self, device: torch.device):
        self._copier = device_of(device)
        self._stream = None if self._copier is None else self._copier.new_stream("output")
        self._pool = None if self._copier is None else ThreadPoolExecutor(1, thread_name_prefix="fusedrnn-output")
        self._jobs: deque[Future[Any]] = deque()
        self._last: tuple[Tensor, Any] | None = None

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Copy `rows`, which the current stream writes, to `target`, shaped as they are; final after `close`."""
        copier = self._copier
        if copier is None or target.device == rows.device or target.device.type != "cpu":
            target.copy_(rows)
            return
        assert self._pool is not None
        rows = rows.contiguous()
        staging = copier.allocate_host(rows.nbytes)
        if staging is None:
            target.copy_(rows)
            return
        copier.wait(self._stream, copier.record(copier.current_stream()))  # S4
        copier.copy(self._stream, Span(staging, 0, rows.nbytes), Span(_flat(rows), 0, rows.nbytes))
        copied = copier.record(self._stream)
        # A tensor made in this mode can be written in this mode only, which another thread has to enter.
        inference = torch.is_inference_mode_enabled()

        def land() -> None:
            copier.synchronize(copied)  # S6
            with torch.inference_mode(inference):
                target.copy_(_shaped(staging, target))

        self._free_last()
        self._last = rows, copied
        self._jobs.append(self._pool.submit(land))
        while len(self._jobs) > _AHEAD:
            self._jobs.popleft().result()

    def _free_last(self) -> None:
        if self._last is not None and self._copier is not None:
            self._copier.wait(self._copier.current_stream(), self._last[1])  # S5
            self._last = None

    def close(self) -> None:
        """Wait until everything has arrived."""
        self._free_last()
        try:
            while self._jobs:
                self._jobs.popleft().result()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)
