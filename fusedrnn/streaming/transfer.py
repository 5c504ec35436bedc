"""Pieces on their way: read ahead on a thread, copied to the device ahead of use, and copied back behind it.

These edges keep a byte from being overwritten before it was read or read before it was written:

    S1  input stream waits for the allocation's former users     S4  output stream waits for the producer
    S2  reader waits for the copy to the device                  S5  what was copied is freed after the copy
    S3  what nobody asks for any more is freed after its copy    S6  host reads the staging buffer after the copy
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


def arrivals(reads: Iterator[Callable[[], Tensor]], device: torch.device, held: bool) -> Generator[Tensor]:
    """Yield pieces on a device, each fetched while the one before it is in use.

    Args:
        reads: Called in order, on a thread, to return the pieces.
        device: Where they go.
        held: Whether the pieces are views of a tensor that is there already, so that there is nothing to fetch.
    """
    if held:
        yield from (read() for read in reads)
        return
    copier = device_of(device)
    with closing(ahead(reads, copier)) as pieces:
        if copier is None:
            yield from pieces
        else:
            with closing(to_device(pieces, copier)) as arrived:
                yield from arrived


def ahead(reads: Iterator[Callable[[], Tensor]], copier: Device | None = None) -> Generator[Tensor]:
    """Yield what `reads` return, called on a thread ahead of the caller; for a `copier` in pinned memory."""

    def read_next() -> Any:
        with torch.no_grad():
            read = next(reads, None)
            if read is None:
                return _END
            piece = read()
            return piece if copier is None else _pinned(piece, copier)

    with ThreadPoolExecutor(1, thread_name_prefix="fusedrnn-input") as pool:
        waiting: deque[Future[Any]] = deque(pool.submit(read_next) for _ in range(_AHEAD))
        try:
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
    """Yield copies of `pieces` on the device, the next one on its way while one is in use."""
    stream = copier.new_stream("input")

    def start(piece: Tensor | None) -> tuple[Tensor, Any, Tensor] | None:
        if piece is None:
            return None
        buffer = copier.allocate(piece.nbytes)
        copier.wait(stream, copier.record(copier.current_stream()))  # S1
        copier.copy(stream, Span(buffer, 0, piece.nbytes), Span(_flat(piece), 0, piece.nbytes))
        return buffer, copier.record(stream), piece

    following = start(next(pieces, None))
    try:
        while following is not None:
            (buffer, arrived, piece), following = following, None
            copier.wait(copier.current_stream(), arrived)  # S2
            following = start(next(pieces, None))
            yield _shaped(buffer, piece)
    finally:
        if following is not None:
            copier.wait(copier.current_stream(), following[1])  # S3


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
        if copier is None or target.device == rows.device:
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

        def land() -> None:
            copier.synchronize(copied)  # S6
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
