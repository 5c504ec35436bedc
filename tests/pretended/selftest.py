"""What the pretended device promises, checked in a process of its own: `selftest.py NAME`."""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cuda
import torch


def captures() -> None:
    """Another thread's query spoils a capture in the mode "global", not in "thread_local"."""
    event = torch.Event("cuda")
    event.record()
    stream, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    for mode, spoiled in (("thread_local", False), ("global", True)):
        graph, before = torch.cuda.CUDAGraph(), cuda.forbidden_calls()[0]
        failed = False
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                y = x * 2
                other = threading.Thread(target=event.query)
                other.start()
                other.join()
        except RuntimeError as error:
            failed = "cudaEventQuery" in str(error)
        assert failed == spoiled and (cuda.forbidden_calls()[0] > before) == spoiled, mode
        if not spoiled:
            x.fill_(3)
            graph.replay()
            assert y.tolist() == [6.0] * 8
    with cuda.capturing(stream):
        assert torch.cuda.is_current_stream_capturing() and stream.is_capturing()
        failed = False
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            failed = "capturing" in str(error)
        assert failed
    assert not stream.is_capturing()


def reuse() -> None:
    """A freed block is the allocating stream's next one of that size; `record_stream` holds it back."""
    aside = torch.cuda.Stream()
    for recorded in (False, True):
        cuda.set_delay(aside, 20_000)
        x = torch.ones(1 << 12, device="cuda")
        torch.cuda.synchronize()
        address = x.data_ptr()
        with torch.cuda.stream(aside):
            y = x + 1
        if recorded:
            x.record_stream(aside)
        del x
        z = torch.zeros(1 << 12, device="cuda")
        assert (z.data_ptr() == address) == (not recorded)
        torch.cuda.synchronize()
        assert bool((y == 2).all()) == recorded
        del y, z
        torch.cuda.synchronize()


def failures() -> None:
    """The k-th allocation or copy fails, once; so does what is beyond a limit."""

    def raises(kind: type[Exception], call: object) -> bool:
        try:
            call()  # type: ignore[operator]
        except kind:
            return True
        return False

    cuda.fail_allocation(2)
    kept = torch.empty(8, device="cuda")
    assert raises(torch.OutOfMemoryError, lambda: torch.empty(8, device="cuda"))
    assert not raises(torch.OutOfMemoryError, lambda: torch.empty(8, device="cuda"))
    cuda.fail_copy(1)
    assert raises(RuntimeError, lambda: kept.copy_(torch.ones(8)))
    assert not raises(RuntimeError, lambda: kept.copy_(torch.ones(8)))
    cuda.limit_pinned(1 << 16)
    assert raises(RuntimeError, lambda: torch.empty(1 << 20, pin_memory=True))
    cuda.reset()
    cuda.set_memory(1 << 20)
    assert torch.cuda.mem_get_info()[1] == 1 << 20
    assert raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 20, device="cuda"))
    # What is cached in another size is given back first.
    halves = [torch.empty(1 << 17, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del halves
    assert not raises(torch.OutOfMemoryError, lambda: torch.empty(900_000, dtype=torch.uint8, device="cuda"))


def accelerator() -> None:
    """`torch.accelerator`, `torch.Stream` and `torch.Event` serve both devices."""
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == torch.cuda.device_count() == 2
    device = torch.device("cuda", 1)
    stream = torch.Stream(device)
    x = torch.ones(1 << 10, device=device)
    event, later = (torch.Event(device, enable_timing=True, blocking=True) for _ in range(2))
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        assert torch.accelerator.current_stream(device) == stream == torch.cuda.current_stream(device)
        assert torch.accelerator.current_device_index() == 1
        event.record(stream)
        y = x * 2
        later.record(stream)
    assert torch.accelerator.current_device_index() == 0
    later.synchronize()
    assert later.query() and event.elapsed_time(later) > 0 and y.sum().item() == 2048
    allocated = torch.accelerator.memory_allocated(device)
    assert allocated == torch.accelerator.memory_stats(device)["allocated_bytes.all.current"] == 8192
    assert torch.accelerator.get_memory_info(1) == torch.cuda.mem_get_info(1)
    assert torch.equal(y.to("cuda:0").cpu(), y.cpu())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    torch.cuda.synchronize()
    assert not cuda.error()
