"""Chunks of many small launches, recorded once in a CUDA graph per shape and replayed.

A step of a small layer takes less time on the device than its launches take on the host. A graph is bound to the memory
it was recorded over, so it runs over buffers of its own: what goes in is copied there, what comes out is copied back.
Those copies move each number of a chunk twice; where a step is long enough to hide its launches they do not pay, and
the chunk is launched step by step. So it is where a graph cannot be recorded.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_MOST_STEP_BYTES = 1 << 20
"""Bytes of gates per step up to which a step is taken to be shorter than its two launches (about 6 microseconds of
host time). By arithmetic, not measured: 1 MiB of gates is 0.7 microseconds of memory traffic at 4 TB/s."""
_MOST_GRAPHS = 16
Buffers = TypeVar("Buffers")


class Graph(Protocol):
    """Something recorded that can be run again."""

    def replay(self) -> None:
        """Run it."""


_CAPTURING = threading.Lock()
"""One capture at a time, as torch asks for."""


@lru_cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _capture(body: Callable[[], None]) -> Graph:
    """Record the launches of `body` on the current device; they do not run.

    Raises:
        Exception: If that fails, or if nothing was launched on the stream that was recorded.
    """
    stream = _capture_stream(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    # In the mode "global" no other thread could allocate or ask for events meanwhile, as those that stream and copy do.
    # The outer context restores device and stream where the inner one fails to.
    with _CAPTURING, warnings.catch_warnings(), torch.cuda.stream(stream):
        # torch says so when it was the wrong stream; a replay would then do nothing.
        warnings.filterwarnings("error", r"The \w+ Graph is empty")
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                body()
        except BaseException:
            # An interrupt may have come when the capture had begun, and the context was not entered yet.
            with suppress(RuntimeError):
                if torch.cuda.is_current_stream_capturing():
                    graph.capture_end()
            raise
    return graph


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Entry:
    """A recorded chunk with the memory it works on, once that is complete; `refused` where it cannot be recorded."""

    def __init__(self) -> None:
        # From copying in to copying out, as another thread may launch on the same stream.
        self.lock = threading.Lock()
        self.recorded: tuple[Graph, dict[str, Tensor]] | None = None
        self.refused = False


class GraphCache:
    """Recorded chunks by shape, the least recently used dropped first.

    Args:
        capture: How a body is recorded; replaced in tests.
        most: How many graphs are kept.
    """

    def __init__(self, capture: Callable[[Callable[[], None]], Graph] = _capture, most: int = _MOST_GRAPHS):
        self._capture, self._most = capture, most
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False

    def worthwhile(self, gates: Tensor, n_steps: int) -> bool:
        """Whether a chunk with these gates [rows, 4H] should be replayed rather than launched step by step.

        Never while somebody else captures: then plain launches become part of that capture, as they should.
        """
        step_bytes = gates.numel() * gates.element_size() // n_steps
        if not gates.is_cuda or n_steps == 1 or step_bytes > _MOST_STEP_BYTES:
            return False
        with _on(gates.device):
            return not torch.cuda.is_current_stream_capturing()

    def run(
        self,
        key: Hashable,
        body: Callable[[Mapping[str, Tensor]], None],
        tensors: Mapping[str, Tensor],
        results: Mapping[str, Tensor],
    ) -> None:
        """Run `body` over `tensors` by replaying it.

        Args:
            key: Everything but shapes and dtypes that the launches depend on.
            body: Launches over the tensors it is given by name; it must not synchronise.
            tensors: What it works on, read or written.
            results: Where the tensors of these names go afterwards; the same tensors or others of their shape.
        """
        device = next(iter(tensors.values())).device
        with _on(device):
            # A graph works on memory of its own: two streams that replayed the same one would overwrite each other's.
            stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
            likes = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items())
            entry = self._entry((key, stream, likes))
            with entry.lock:
                if entry.recorded is None and not entry.refused:
                    self._record(entry, body, tensors)
                if entry.recorded is not None:
                    graph, own = entry.recorded
                    _copy(own, tensors)
                    graph.replay()
                    _copy(results, own)
                    return
            body(tensors)
            _copy({name: into for name, into in results.items() if into is not tensors[name]}, tensors)

    def _entry(self, key: Hashable) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
            return entry

    def _record(
        self, entry: _Entry, body: Callable[[Mapping[str, Tensor]], None], tensors: Mapping[str, Tensor]
    ) -> None:
        """Record the body over memory of its own; where that fails, refuse the entry."""
        try:
            own = {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
            _copy(own, tensors)
            body(own)  # compiles what is launched for the first time, which a capture must not do
            entry.recorded = self._capture(lambda: body(own)), own
        except Exception as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None  # it is why the capture failed
            entry.refused = True
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "a CUDA graph could not be recorded; chunks like this one are launched step by step, which takes "
                    f"longer and gives the same: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def tensors_of(buffers: Any) -> dict[str, Tensor]:
    """Return the tensors among the fields of a dataclass by name."""
    return {name: value for name, value in _values(buffers).items() if isinstance(value, Tensor)}


def constants_of(buffers: Any) -> tuple[Hashable, ...]:
    """Return the other fields, on which launches may depend."""
    return tuple(None if isinstance(value, Tensor) else value for value in _values(buffers).values())


def over(buffers: Buffers, tensors: Mapping[str, Tensor]) -> Buffers:
    """Return the dataclass with other tensors in the fields of these names."""
    return replace(buffers, **{name: tensors[name] for name in _values(buffers) if name in tensors})  # type: ignore


def _values(buffers: Any) -> dict[str, Any]:
    return {field.name: getattr(buffers, field.name) for field in fields(buffers)}


def _copy(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(source[name])
