"""Replayed chunks: what is copied in and out, what is recorded again, what is dropped. The recorder is a stand-in."""

import pytest
import torch

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
