"""Replayed chunks: what is copied in and out, what is recorded again, what is dropped. The recorder is a stand-in."""

import threading
import warnings
from contextlib import contextmanager

import pytest
import torch

from fusedrnn.backends import graphs
from fusedrnn.backends.graphs import GraphCache


class Recorder:
    """Records a body as a CUDA graph does: it runs on replay only, over the memory that it was recorded over."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, body):
        self.recorded += 1

        class Recorded:
            def replay(inner):
                self.replayed += 1
                body()

        return Recorded()


def double(t):
    t["out"].copy_(t["a"] * 2)
    t["a"].add_(1)


def test_results_arrive_and_shapes_are_recorded_once():
    recorder = Recorder()
    cache = GraphCache(recorder)
    for value in (1.0, 5.0, 7.0):
        a, out = torch.full((3,), value), torch.full((3,), float("nan"))
        cache.run("double", double, {"a": a, "out": out}, {"a": a, "out": out})
        assert out.eq(2 * value).all() and a.eq(value + 1).all()
    assert (recorder.recorded, recorder.replayed) == (1, 3)


def test_only_what_is_asked_for_is_copied_back():
    a, out = torch.ones(3), torch.zeros(3)
    GraphCache(Recorder()).run("double", double, {"a": a, "out": out}, {"out": out})
    assert a.eq(1).all() and out.eq(2).all()


@pytest.mark.parametrize("change", ["shape", "dtype", "key"])
def test_anything_else_is_recorded_anew(change):
    recorder = Recorder()
    cache = GraphCache(recorder)
    for again in (False, True):
        a = torch.ones(4 if again and change == "shape" else 3)
        a = a.double() if again and change == "dtype" else a
        out = torch.zeros_like(a)
        cache.run("other" if again and change == "key" else "double", double, {"a": a, "out": out}, {"out": out})
        assert out.eq(2).all()
    assert recorder.recorded == 2


def test_the_least_recently_used_is_dropped():
    recorder = Recorder()
    cache = GraphCache(recorder, most=2)
    for n in (1, 2, 1, 3, 1, 2):
        a, out = torch.ones(n), torch.zeros(n)
        cache.run("double", double, {"a": a, "out": out}, {"out": out})
    assert recorder.recorded == 4


def test_cpu_chunks_are_not_replayed():
    assert not GraphCache().worthwhile(torch.zeros(8, 4), 8)


def test_threads_that_share_a_stream_do_not_share_an_entry_at_a_time():
    cache, others = GraphCache(lambda body: Recorded(body)), []

    class Recorded:
        def __init__(self, body):
            self.body = body

        def replay(self):
            if not others:
                others.append(threading.Thread(target=run, args=(5.0,)))
                others[0].start()
                others[0].join(0.2)
            self.body()

    def run(value):
        a, out = torch.full((3,), value), torch.zeros(3)
        cache.run("double", double, {"a": a, "out": out}, {"out": out})
        found[value] = out

    found = {}
    run(1.0)
    others[0].join()
    assert found[1.0].eq(2).all() and found[5.0].eq(10).all()


class OnSecondDevice(torch.Tensor):
    """Memory of the host that says it is on the second device."""

    device = torch.device("cuda", 1)


def tensors(value=1.0):
    return {name: torch.full((3,), value).as_subclass(OnSecondDevice) for name in ("a", "out")}


class Stream:
    def __init__(self, index):
        self.index, self.cuda_stream = index, id(self)


class Cuda:
    """Two devices with current streams, and captures with the rules of `torch.cuda.graph`."""

    def __init__(self, monkeypatch):
        self.current, self.streams = 0, [Stream(0), Stream(1)]
        self.capturing = self.fault = None
        self.captures, self.entered = [], []
        cuda = self

        class Graph:
            def __init__(self):
                self.bodies = []

            def replay(self):
                for body in self.bodies:
                    body()

            def capture_end(self):
                cuda.capturing = None
                if cuda.fault is not None:
                    raise cuda.fault
                if not self.bodies:
                    warnings.warn("The CUDA Graph is empty. This usually means ...", UserWarning, stacklevel=2)

        class Capture:
            default = Stream(0)

            def __init__(self, graph, stream=None, capture_error_mode="global"):
                self.graph, self.stream = graph, stream or self.default
                cuda.captures.append((self.stream, capture_error_mode))

            def __enter__(self):
                self.context = cuda.stream(self.stream)
                cuda.entered.append(self.context)  # or it would be left when it is collected
                self.context.__enter__()
                cuda.capturing, cuda.graph = self.stream, self.graph

            def __exit__(self, *args):
                self.graph.capture_end()
                self.context.__exit__(*args)

        for name, value in {
            "device": self.device,
            "stream": self.stream,
            "Stream": Stream,
            "current_stream": lambda device=None: self.streams[self.current if device is None else device.index],
            "current_device": lambda: self.current,
            "is_current_stream_capturing": lambda: self.streams[self.current] is self.capturing,
            "CUDAGraph": Graph,
            "graph": Capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        if hasattr(graphs, "_capture_stream"):
            graphs._capture_stream.cache_clear()

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def stream(self, stream):
        before = self.current, list(self.streams)
        self.current = stream.index
        self.streams[stream.index] = stream
        try:
            yield
        finally:
            self.current, self.streams = before

    def body(self, t):
        """Double on the current device, which is where kernels are launched, though the memory is the second one's."""

        def launch():
            t["out"].copy_(t["a"] * 2)

        if self.capturing is not None and self.streams[1] is self.capturing and self.current == 1:
            self.graph.bodies.append(launch)
        else:
            launch()


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda(monkeypatch)
    before = cuda.current, list(cuda.streams)
    yield cuda
    graphs._capture_stream.cache_clear()
    assert (cuda.current, cuda.streams) == before and cuda.capturing is None


def doubled(cache, body, value):
    t = tensors(value)
    out = torch.zeros(3)
    cache.run("double", body, t, {"out": out})
    return bool(out.eq(2 * value).all())


def test_what_is_on_another_device_is_recorded_and_replayed_there(cuda):
    cache = GraphCache()
    assert all(doubled(cache, cuda.body, value) for value in (1.0, 2.0, 3.0))
    ((stream, mode),) = cuda.captures
    assert (stream.index, mode) == (1, "thread_local")


@pytest.mark.parametrize("why", ["error", "empty", "memory"])
def test_what_cannot_be_recorded_is_launched_plainly(cuda, why):
    cuda.fault = {"error": RuntimeError("stream is capturing"), "memory": torch.OutOfMemoryError("no room")}.get(why)

    def body(t):
        # Launches elsewhere leave the graph empty.
        t["out"].copy_(t["a"] * 2) if why == "empty" else cuda.body(t)

    cache = GraphCache()
    with pytest.warns(RuntimeWarning, match="could not be recorded") as said:
        assert doubled(cache, body, 1.0)
    assert doubled(cache, body, 2.0) and doubled(cache, body, 3.0)
    assert len(said) == len(cuda.captures) == 1


@pytest.mark.parametrize("when", ["warming up", "capturing", "capturing, which then cannot end", "replaying"])
def test_an_interrupt_leaves_nothing_half_done(cuda, when):
    cache, calls = GraphCache(), []
    assert when != "replaying" or doubled(cache, cuda.body, 1.0)

    def interrupted(t):
        calls.append(t)
        if len(calls) == (2 if when.startswith("capturing") else 1):
            cuda.fault = RuntimeError("capture invalidated") if "cannot" in when else None
            raise KeyboardInterrupt
        cuda.body(t)

    if when == "replaying":
        cuda.graph.bodies.insert(0, lambda: interrupted(None))
    with pytest.raises(KeyboardInterrupt):
        doubled(cache, interrupted, 2.0)
    cuda.fault = None
    if when == "replaying":
        del cuda.graph.bodies[0]
    assert doubled(cache, cuda.body, 3.0) and doubled(cache, cuda.body, 4.0)
    assert not next(iter(cache._entries.values())).refused
