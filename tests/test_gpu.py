"""What only a GPU can show. Everything here is skipped without one; `make gpu-check` runs it first."""

import json

import pytest
import torch

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.testing import assert_no_worse_than_torch, full_device, poisoned, results, twin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FUSED = [name for name, backend in BACKENDS["lstm"].items() if name not in ("onednn", "reference")]
KINDS = [{}, {"num_layers": 3}, {"bidirectional": True, "num_layers": 2}]


@pytest.fixture(autouse=True)
def _full_float32():
    """Float32 means float32 here; torch's switches are put back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def make(*args, backend, **kwargs):
    """A module on the GPU, or a skip with the backend's own reason."""
    module = fusedrnn.LSTM(*args, backend=backend, device="cuda", **kwargs)
    return module


def run(module, x):
    try:
        return results(module, x)
    except RuntimeError as error:
        if "no backend can run this call" in str(error):
            pytest.skip(str(error).splitlines()[1].strip())
        raise


def run_amid_junk(module, x, aside):
    """Run a module while memory is filled with NaN and freed, on another stream if `aside`."""
    stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        junk = [torch.full((256, 64, 1024), torch.nan, device="cuda") for _ in range(2)]
        found = run(module, x)
        del junk
    stream.synchronize()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("T", "B", "I", "H"), [(33, 5, 7, 24), (40, 64, 48, 128), (17, 3, 65, 200)])
def test_results_and_gradients(backend, save, dtype, kind, T, B, I, H):
    module = make(I, H, backend=backend, save=save, chunk=16, dtype=dtype, **kind)
    x = torch.randn(T, B, I, device="cuda", dtype=dtype)
    with poisoned():
        ours = run(module, x)
    theirs = results(twin(module, dtype).cuda(), x)
    exact = results(twin(module).cuda(), x)
    for name in exact:
        factor = 3.0 if name.startswith("d") else 2.0
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, factor)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("save", ["gates", "hidden"])
def test_ten_runs_give_the_same_bits(backend, save):
    module = make(64, 256, backend=backend, save=save, dtype=torch.bfloat16)
    x = torch.randn(200, 64, 64, device="cuda", dtype=torch.bfloat16)
    first = run(module, x)
    for _ in range(9):
        again = run(module, x)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("backend", FUSED)
def test_another_stream_gives_the_same_bits(backend):
    module = make(64, 256, num_layers=2, backend=backend, save="hidden")
    x = torch.randn(200, 16, 64, device="cuda")
    first = run(module, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = run(module, x)
    stream.synchronize()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("backend", ["auto", *FUSED])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_pass_can_be_captured_in_a_graph(backend, dropout):
    module = make(8, 16, num_layers=2, dropout=dropout, backend=backend, save="hidden")
    x = torch.randn(40, 4, 8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(module, x)
    torch.cuda.current_stream().wait_stream(side)
    module.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)[0]
        y.sum().backward()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append([y.clone(), *(weight.grad.clone() for weight in module.parameters())])
    assert torch.equal(seen[0][0], seen[1][0]) == (dropout == 0)
    if not dropout:
        module.zero_grad(set_to_none=True)
        module(x)[0].sum().backward()
        for captured, weight in zip(seen[0][1:], module.parameters(), strict=True):
            assert torch.equal(captured, weight.grad)


@pytest.mark.parametrize("backend", FUSED)
def test_offsets_beyond_2_to_the_31(backend):
    T, B, H = 2100, 512, 512
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    module = make(8, H, backend=backend, save="gates", chunk=T, dtype=torch.bfloat16)
    x = torch.randn(T, B, 8, device="cuda", dtype=torch.bfloat16)
    assert T * B * 4 * H > 2**31
    y, _ = module(x)
    with torch.no_grad():
        alone, _ = module(x[:, -64:].contiguous())
    assert (y[-100:, -64:].float() - alone[-100:].float()).abs().max() < 0.02


def test_a_state_on_the_wrong_device_leaves_the_gpu_usable():
    module = make(8, 16, backend="auto")
    x = torch.randn(5, 2, 8, device="cuda")
    before = module(x)[0]
    with pytest.raises(ValueError, match="`h0` must be on the device of the input = cuda:0, got cpu"):
        module(x, (torch.zeros(1, 2, 16), torch.zeros(1, 2, 16)))
    torch.cuda.synchronize()
    assert torch.equal(module(x)[0], before)


def test_peak_memory_of_hidden_mode_is_bounded_by_input_and_output():
    module = make(64, 512, backend="auto", save="hidden")
    peaks = []
    for T in (1000, 4000):
        x = torch.randn(T, 64, 64, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        module(x)[0].sum().backward()
        module.zero_grad()
        outside = T * 64 * (2 * 512 + 64) * 4
        peaks.append(torch.cuda.max_memory_allocated() - start - outside)
        del x
    assert peaks[1] < 1.3 * peaks[0] + (64 << 20)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
def test_offloading_changes_no_bit(backend, save):
    """Real streams: memory is churned between the passes, and every other step runs on a stream of its own."""
    off = fusedrnn.offload(full_device(min_bytes=2048))
    plain = make(64, 256, 3, backend=backend, save=save, chunk=16)
    offloading = make(64, 256, 3, backend=backend, save=save, chunk=16, offload=off)
    offloading.load_state_dict(plain.state_dict())
    x = torch.randn(256, 64, 64, device="cuda")
    expected = run(plain, x)
    pinned = []
    for step in range(12):
        found = run_amid_junk(offloading, x, aside=bool(step % 2))
        assert all(torch.equal(found[name], expected[name]) for name in expected), step
        pinned.append(off.scheduler(x.device).host.reserved)
    assert off.stats().spills > 0 and pinned[-1] == pinned[2]
    assert off.scheduler(x.device).entries() == []


def test_a_disk_below_the_host_changes_no_bit(tmp_path):
    off = fusedrnn.offload(full_device(min_bytes=2048, spill_dir=tmp_path, host_limit=64 << 20, trace=True))
    plain = make(64, 256, backend="auto", save="gates", chunk=16)
    offloading = make(64, 256, backend="auto", save="gates", chunk=16, offload=off)
    offloading.load_state_dict(plain.state_dict())
    x = torch.randn(512, 64, 64, device="cuda")
    expected = run(plain, x)
    for step in range(6):
        found = run_amid_junk(offloading, x, aside=bool(step % 2))
        assert all(torch.equal(found[name], expected[name]) for name in expected), step
    stats = off.stats()
    assert stats.disk_writes > 0 and stats.disk_reads > 0 and stats.disk_failures == stats.ring_grown == 0
    off.export_trace(tmp_path / "trace.json")
    boxes = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in boxes)
    assert {"spill", "fetch", "write", "read"} <= {event["cat"] for event in boxes}


def test_offloading_takes_its_cue_from_the_allocator():
    """With room nothing moves; when somebody else fills the device, what is pushed from then on does."""
    off = fusedrnn.offload(fusedrnn.OffloadConfig(occupancy_limit=0.5, low_watermark=0.4))
    module = make(64, 512, backend="auto", save="gates", offload=off)
    x = torch.randn(500, 64, 64, device="cuda")
    first = run(module, x)
    assert off.stats().spills == 0 and off.stats().pushes > 0
    free, total = torch.cuda.mem_get_info()
    if free < 0.6 * total:
        pytest.skip("needs a GPU of which more than half is free")
    filler = torch.empty(int(0.55 * total), dtype=torch.uint8, device="cuda")
    again = run(module, x)
    del filler
    assert off.stats().spills > 0
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("backend", ["triton_step", "torch_step"])
@pytest.mark.parametrize("save", ["gates", "hidden"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gru(backend, save, dtype):
    module = fusedrnn.GRU(
        37, 65, 2, bidirectional=True, backend=backend, save=save, chunk=16, device="cuda", dtype=dtype
    )
    x = torch.randn(40, 19, 37, device="cuda", dtype=dtype)
    with poisoned():
        ours = results(module, x)
    theirs, exact = results(twin(module, dtype).cuda(), x), results(twin(module).cuda(), x)
    for name in exact:
        factor = 3.0 if name.startswith("d") else 2.0
        assert_no_worse_than_torch(ours[name], theirs[name], exact[name], name, factor)


@pytest.mark.parametrize("backend", FUSED)
def test_resets(backend):
    module = make(7, 65, backend=backend, save="hidden", chunk=16, bidirectional=True)
    reference = fusedrnn.LSTM(7, 65, bidirectional=True, backend="reference", dtype=torch.float64, device="cuda")
    reference.load_state_dict(module.state_dict())
    x = torch.randn(40, 19, 7, device="cuda")
    resets = torch.rand(40, 19, device="cuda") < 0.2
    y, exact = module(x, resets=resets)[0], reference(x.double(), resets=resets)[0]
    assert (y - exact).abs().max() < 1e-5
    grads = [
        torch.autograd.grad(out.square().sum(), list(m.parameters())) for out, m in ((y, module), (exact, reference))
    ]
    for ours, expected in zip(*grads, strict=True):
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
