import copy
import pickle

import pytest
import torch

from fusedrnn.offloading import OffloadConfig, Offloader

CPU = torch.device("cpu")


def push(stack, value, nbytes):
    slot = stack.reserve(nbytes)
    assert slot.buffer.shape == (nbytes,)
    slot.buffer.fill_(value)
    return stack.push(slot)


@pytest.mark.parametrize("occupancy", [0.0, 1.0])
@pytest.mark.parametrize("ring_slots", [2, 3, 5])
def test_every_buffer_comes_back_as_it_was_pushed(occupancy, ring_slots):
    off = Offloader(OffloadConfig(occupancy=lambda: occupancy, ring_slots=ring_slots))
    sizes = [5000] * 11 + [3000]
    for _ in range(3):
        stack = off.stack(CPU)
        handles = [push(stack, value, nbytes) for value, nbytes in enumerate(sizes)]
        assert stack.take() == []
        for value, handle in reversed(list(enumerate(handles))):
            buffer = handle.get(writable=True)
            assert buffer.shape == (sizes[value],) and bool((buffer == value).all())
            # As the layer does, which turns gates into their gradients in place.
            buffer.fill_(255)
            handle.release()
            handle.release()
    scheduler = off.scheduler(CPU)
    assert scheduler.entries() == [] and scheduler.host.used == 0
    assert scheduler.ring.held == scheduler.ring.free <= ring_slots * 5000
    assert (scheduler.counters.spills > 0) == (occupancy > 0.7)


def test_a_kept_graph_reads_twice():
    off = Offloader(OffloadConfig(occupancy=lambda: 1.0))
    stack = off.stack(CPU)
    handles = [push(stack, value, 4096) for value in range(12)]
    for last in (False, True):
        for value, handle in reversed(list(enumerate(handles))):
            assert bool((handle.get() == value).all())
            if last:
                handle.release()
    scheduler = off.scheduler(CPU)
    assert scheduler.ring.peak == 4 * 4096
    assert scheduler.entries() == [] and scheduler.host.used == 0


def test_a_dropped_stack_gives_everything_back():
    off = Offloader(OffloadConfig(occupancy=lambda: 1.0))
    stack = off.stack(CPU, expected=1 << 20)
    handles = [push(stack, value, 4096) for value in range(12)]
    reserved = stack.reserve(4096)
    del handles, reserved, stack
    scheduler = off.scheduler(CPU)
    assert scheduler.entries() == [] and scheduler.host.used == 0 and scheduler.ring.held == scheduler.ring.free


def test_a_released_handle_says_so():
    stack = Offloader(OffloadConfig(occupancy=lambda: 1.0)).stack(CPU)
    handle = push(stack, 1, 4096)
    handle.release()
    with pytest.raises(RuntimeError, match="the buffer was released"):
        handle.get()
    slot = stack.reserve(4096)
    handle = stack.push(slot)
    with pytest.raises(RuntimeError, match="pushed before"):
        stack.push(slot)


def test_inactive_on_the_cpu_and_says_so_once():
    off = Offloader()
    with pytest.warns(RuntimeWarning, match="offloading is inactive on cpu"):
        stack = off.stack(CPU)
    handle = push(stack, 7, 4096)
    assert len(stack.buffers) == 1 and bool((handle.get() == 7).all())
    off.stack(CPU)


def test_copies_of_an_offloader_share_nothing():
    config = OffloadConfig(ring_slots=3)
    off = Offloader(config)
    for other in (copy.deepcopy(off), pickle.loads(pickle.dumps(off))):
        assert other.config == config and other is not off


def test_saved_tensor_hooks_see_the_buffers():
    off = Offloader(OffloadConfig(occupancy=lambda: 1.0))
    with torch.autograd.graph.save_on_cpu():
        stack = off.stack(CPU)
    push(stack, 1, 4096)
    assert len(stack.take()) == 1
