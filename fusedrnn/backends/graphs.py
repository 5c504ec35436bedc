"""Chunks of many small launches, recorded once in a CUDA graph per shape and replayed.

A step of a small layer takes less time on the device than its launches take on the host. A graph is bound to the memory
it was recorded over, so it runs over buffers of its own: what goes in is copied there, what comes out is copied back.
Those copies move each number of a chunk twice; where a step is long enough to hide its launches they do not pay, and
the chunk is launched step by step.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, replace
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


def _capture(body: Callable[[], None]) -> Graph:
    """Record the launches of `body` on the current device; they do not run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


class GraphCache:
    """Recorded chunks by shape, the least recently used dropped first.

    Args:
        capture: How a body is recorded; replaced in tests.
        most: How many graphs are kept.
    """

    def __init__(self, capture: Callable[[Callable[[], None]], Graph] = _capture, most: int = _MOST_GRAPHS):
        self._capture, self._most = capture, most
        self._entries: OrderedDict[Hashable, tuple[Graph, dict[str, Tensor]]] = OrderedDict()

    def worthwhile(self, gates: Tensor, n_steps: int) -> bool:
        """Whether a chunk with these gates [rows, 4H] should be replayed rather than launched step by step.

        Never while somebody else captures: then plain launches become part of that capture, as they should.
        """
        step_bytes = gates.numel() * gates.element_size() // n_steps
        if not gates.is_cuda or n_steps == 1 or step_bytes > _MOST_STEP_BYTES:
            return False
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
        gates = next(iter(tensors.values()))
        # A graph works on memory of its own: two streams that replayed the same one would overwrite each other's.
        stream = torch.cuda.current_stream(gates.device).cuda_stream if gates.is_cuda else 0
        full = key, stream, tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items())
        entry = self._entries.get(full)
        if entry is None:
            own = {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
            _copy(own, tensors)
            body(own)  # compiles what is launched for the first time, which a capture must not do
            entry = self._entries[full] = self._capture(lambda: body(own)), own
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
        self._entries.move_to_end(full)
        graph, own = entry
        _copy(own, tensors)
        graph.replay()
        _copy(results, own)


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
