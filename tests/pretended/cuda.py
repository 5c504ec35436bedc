"""Makes torch's CPU build believe in CUDA devices. Import this before torch.

Streams, events, memory and pinned memory behave as CUDA's, so that what orders two streams, or fails to, shows in the
results; see `streams.h` and `memory.h`. Kernels are those of the CPU. There is no Triton here.

Environment: `PRETENDED_DEVICES` is the number of devices (1), `PRETENDED_SEED` draws the streams' delays, and
`PRETENDED_CACHE` is the folder of the built library.
"""

import atexit
import ctypes
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

if "torch" in sys.modules:
    raise ImportError("tests/pretended/cuda.py must be imported before torch")


def _build() -> types.ModuleType:
    spec = spec_from_file_location("pretended_build", os.path.join(os.path.dirname(__file__), "build.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_builder = _build()
for _name in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so"):
    # The library's registrations must be those of the torch that is imported below, and come before it.
    ctypes.CDLL(str(_builder.torch_folder() / "lib" / _name), mode=ctypes.RTLD_GLOBAL)
_lib = ctypes.CDLL(str(_builder.library()), mode=ctypes.RTLD_GLOBAL)
_U64, _I64 = ctypes.c_uint64, ctypes.c_int64
for _name, _result, _arguments in (
    ("set_delay", None, (ctypes.c_int, ctypes.c_int)),
    ("set_poison", None, (ctypes.c_int,)),
    ("set_limit", None, (_U64,)),
    ("limit", _U64, ()),
    ("fail_allocation", None, (_U64,)),
    ("fail_copy", None, (_U64,)),
    ("limit_pinned", None, (_U64,)),
    ("pinned_calls", _U64, ()),
    ("counts", None, (ctypes.c_void_p,)),
    ("synchronize", None, ()),
    ("error", ctypes.c_char_p, ()),
    ("graph_begin", ctypes.c_void_p, (ctypes.c_int, _I64, ctypes.c_int, _U64)),
    ("graph_end", _I64, (ctypes.c_void_p,)),
    ("graph_replay", None, (ctypes.c_void_p, ctypes.c_int, _I64)),
    ("graph_delete", None, (ctypes.c_void_p,)),
    ("forbidden", _U64, ()),
    ("last_forbidden", ctypes.c_char_p, ()),
):
    _function = getattr(_lib, f"pretended_{_name}")
    _function.restype, _function.argtypes = _result, list(_arguments)

sys.modules["triton"] = None  # type: ignore[assignment]  # its kernels cannot run here, so it is not found

import torch  # noqa: E402
import torch.cuda  # noqa: E402

DEVICES = int(os.environ.get("PRETENDED_DEVICES", "1"))
AT_FREE, AT_HAND_OUT = 1, 2
"""When freed memory is overwritten; at hand-out is the later moment, which leaves more programs right."""
_STREAMS = 33


# ---- what tests set and ask ----


def set_delays(compute: int = 0, copies: int = 0) -> None:
    """Delay each operation by so many microseconds on average: on the default streams, and on all others."""
    for stream in range(_STREAMS):
        _lib.pretended_set_delay(stream, compute if stream == 0 else copies)


def set_delay(stream: torch.Stream, microseconds: int) -> None:
    """Delay each operation on the streams of this number by so many microseconds on average."""
    _lib.pretended_set_delay(stream.stream_id, microseconds)


def following(stream: torch.Stream, number: int) -> torch.Stream:
    """Return the stream that is handed out so many streams after another."""
    following = 1 + (stream.stream_id - 1 + number) % (_STREAMS - 1)
    return torch.Stream(stream_id=following, device_index=stream.device_index, device_type=stream.device_type)


def overwrite_freed(when: int) -> None:
    """Overwrite freed memory `AT_FREE`, `AT_HAND_OUT`, or never (0)."""
    _lib.pretended_set_poison(when)


def set_memory(nbytes: int) -> None:
    """Set the memory of each device."""
    _lib.pretended_set_limit(nbytes)


def fail_allocation(k: int) -> None:
    """Let the k-th allocation of device memory from now on fail, once; 0: none."""
    _lib.pretended_fail_allocation(k)


def fail_copy(k: int) -> None:
    """Let the k-th copy from now on raise instead of being put on its stream, once; 0: none."""
    _lib.pretended_fail_copy(k)


def limit_pinned(nbytes: int) -> None:
    """Let pinned allocations of more bytes fail; 0: none."""
    _lib.pretended_limit_pinned(nbytes)


def reset() -> None:
    """Set everything above to its default."""
    set_delays()
    overwrite_freed(AT_FREE)
    set_memory(4 << 30)
    fail_allocation(0)
    fail_copy(0)
    limit_pinned(0)


def counts() -> dict[str, int]:
    """Return how many operators and copies there were, and how many of the operators were asynchronous."""
    found = (_U64 * 3)()
    _lib.pretended_counts(found)
    return dict(zip(("operators", "asynchronous", "copies"), found, strict=True))


def error() -> str:
    """Return the first asynchronous error since the last call, "" if there was none."""
    return _lib.pretended_error().decode()


def forbidden_calls() -> tuple[int, str]:
    """Return how many calls CUDA forbids were made during captures by other threads, and the last one's name."""
    return _lib.pretended_forbidden(), _lib.pretended_last_forbidden().decode()


@contextmanager
def capturing(stream: torch.Stream, mode: str = "global") -> Iterator[None]:
    """Capture a stream for a while and throw the graph away; other threads' forbidden calls are counted."""
    graph = CUDAGraph()
    with stream:
        graph.capture_begin(capture_error_mode=mode)
        try:
            yield
        finally:
            graph.end()


# ---- torch.cuda ----


def _index(device: Any = None) -> int:
    if device is None or (isinstance(device, int) and device < 0):
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return torch.accelerator.current_device_index() if device.index is None else device.index


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        """Return a stream of the pool, or the one that `kwargs` name."""
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        """See `torch.cuda.Stream`."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """See `torch.cuda.Stream`."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """See `torch.cuda.Stream`."""
        event = Event()
        event.record(stream)
        event.wait(self)


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_EventType):
    """`torch.cuda.Event`. Its objects are plain `torch.Event`s, since those take no subclass for one another."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> torch.Event:
        """Return an event that is created when it is recorded."""
        return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)


def _as_cuda(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    """See `torch.cuda.current_stream`."""
    return _as_cuda(torch.accelerator.current_stream(_index(device)))


def default_stream(device: Any = None) -> Stream:
    """See `torch.cuda.default_stream`."""
    return Stream(stream_id=0, device_index=_index(device), device_type=1)


def set_stream(stream: torch.Stream | None) -> None:
    """See `torch.cuda.set_stream`: the stream's device becomes the current one, too."""
    if stream is not None:
        torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(stream.device_index)


class StreamContext:
    """`torch.cuda.StreamContext`: a stream is current within, and so is its device."""

    def __init__(self, stream: torch.Stream | None):
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = current_stream()
            self._there = current_stream(self._stream.device)
            set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            set_stream(self._there)
            set_stream(self._before)


class _DeviceContext:
    """`torch.cuda.device`."""

    def __init__(self, device: Any):
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_device_index(self._before)


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: the work of a capture, in its order, to be put on a stream again."""

    _pools = iter(range(1, sys.maxsize))

    def __init__(self, keep_graph: bool = False):
        self._graph: int | None = None
        self._pool = 0
        self.operations = 0

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """See `torch.cuda.CUDAGraph`."""
        stream = current_stream()
        if stream.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = next(CUDAGraph._pools) if pool is None else pool[1]
        self._graph = _lib.pretended_graph_begin(
            stream.device_index, stream.stream_id, capture_error_mode == "global", self._pool
        )
        if self._graph is None:
            raise RuntimeError("CUDA error (pretended): the stream is capturing already")

    def end(self) -> None:
        """End the capture, whatever has become of it."""
        self.operations = _lib.pretended_graph_end(self._graph)

    def capture_end(self) -> None:
        """See `torch.cuda.CUDAGraph`."""
        self.end()
        if self.operations < 0:
            raise RuntimeError(
                "CUDA error (pretended): operation failed due to a previous error during capture: another thread "
                f"called {forbidden_calls()[1]}"
            )

    def replay(self) -> None:
        """See `torch.cuda.CUDAGraph`."""
        stream = current_stream()
        if stream.is_capturing():
            raise RuntimeError("CUDA error (pretended): a graph cannot be replayed within a capture")
        _lib.pretended_graph_replay(self._graph, stream.device_index, stream.stream_id)

    def pool(self) -> tuple[int, int]:
        """See `torch.cuda.CUDAGraph`."""
        return (0, self._pool)

    def reset(self) -> None:
        """See `torch.cuda.CUDAGraph`."""
        if self._graph is not None:
            _lib.pretended_graph_delete(self._graph)
            self._graph = None

    def __del__(self) -> None:
        self.reset()


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="pretended", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10,
        total_memory=_lib.pretended_limit(), is_integrated=0,
    )  # fmt: skip


def _nested_stats(device: Any = None) -> dict[str, Any]:
    return torch._C._accelerator_getDeviceStats(_index(device))


def _install() -> None:
    cuda, accelerator = torch.cuda, torch.accelerator
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "device": _DeviceContext,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "is_current_stream_capturing": lambda: current_stream().is_capturing(),
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "memory_stats_as_nested_dict": _nested_stats,
        "memory_stats": lambda device=None: accelerator.memory_stats(_index(device)),
        "memory_allocated": lambda device=None: accelerator.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(_index(device)),
        "memory_reserved": lambda device=None: accelerator.memory_reserved(_index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(_index(device)),
        "empty_cache": accelerator.empty_cache,
        # Random numbers come from the CPU's generator.
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.graphs.CUDAGraph = CUDAGraph
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch._C._host_emptyCache = lambda: None  # torch.cuda.graph calls it; the CPU build has none
    torch.backends.cudnn.enabled = False


def _finish() -> None:
    # Threads that still compute while the process takes its libraries down would crash it.
    set_delays()
    _lib.pretended_synchronize()


_install()
atexit.register(_finish)
