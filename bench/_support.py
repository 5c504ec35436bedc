"""Which backends run a layer on a machine, and which layers fit its persistent kernels, for `fusedrnn-bench doctor`."""

import re
from collections.abc import Sequence

import torch

from fusedrnn.backends import BACKENDS
from fusedrnn.backends.base import Call, onednn_allowed, tf32_allowed
from fusedrnn.bench._facts import Fact, Gpu
from fusedrnn.cells import CELLS, CellSpec
from fusedrnn.choice import choose
from fusedrnn.kernels._device import DeviceInfo

SAMPLE = {"T": 1000, "B": 64, "I": 256, "H": 256}
"""The call about which backends are asked."""


def _call(cell: CellSpec, dtype: torch.dtype, gpu: Gpu | None, B: int = SAMPLE["B"], H: int = SAMPLE["H"]) -> Call:
    return Call(
        T=SAMPLE["T"],
        B=B,
        I=H,
        H=H,
        P=H,
        layers=1,
        directions=1,
        dtype=dtype,
        device="cuda" if gpu else "cpu",
        gpu=gpu.info if gpu else None,
        tf32=gpu is not None and tf32_allowed(),
        onednn=onednn_allowed(),
        cell=cell,
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _distinct(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the first of devices alike, which have the same answers."""
    first: dict[DeviceInfo, Gpu] = {}
    for gpu in gpus:
        first.setdefault(gpu.info, gpu)
    return list(first.values())


def backends(gpus: Sequence[Gpu]) -> list[Fact]:
    """Return for each device, cell and dtype which backend "auto" takes, which else there are, and why others not."""
    facts = []
    for gpu in (None, *_distinct(gpus)):
        for cell in CELLS.values():
            for dtype in (torch.float32, torch.bfloat16):
                call = _call(cell, dtype, gpu)
                refused = {name: backend.refusals(call) for name, backend in BACKENDS[cell.name].items()}
                usable = [name for name, reasons in refused.items() if not reasons]
                choice = choose(call)
                text = [f"{choice.backend.name} ({choice.save})"]
                text[0] += "".join(f", {name}" for name in usable if name != choice.backend.name)
                text += [f"not {name}: {'; '.join(reasons)}" for name, reasons in refused.items() if reasons]
                name = f"{gpu.device if gpu else 'cpu'} {cell.name.upper()} {_word(dtype)}"
                old = re.search(r"take \d\S*", "".join(refused.get("triton_sequence", ())))
                advice = f"Triton is too old for the fastest kernels: {old[0]}" if old else ""
                facts.append(Fact(name, "\n".join(text), {"auto": choice.backend.name, "refused": refused}, advice))
    return facts


FITS = ((64, 256), (64, 512), (512, 512), (64, 1024))
"""B and H of layers that are tried on the persistent kernels."""


def fits(gpus: Sequence[Gpu]) -> list[Fact]:
    """Return which layers the persistent kernels take on each device, and in which blocks."""
    if not gpus:
        return [Fact("fit", "no CUDA device; `fusedrnn-bench kernels` has those of others")]
    facts = []
    for gpu in _distinct(gpus):
        for dtype in (torch.bfloat16, torch.float32):
            for B, H in FITS:
                call = _call(CELLS["lstm"], dtype, gpu, B, H)
                name = f"{gpu.device} {_word(dtype)} B={B} H={H}"
                reasons = BACKENDS["lstm"]["triton_sequence"].refusals(call)
                facts.append(Fact(name, "no: " + "; ".join(reasons) if reasons else _blocks(call), not reasons))
    return facts


def _blocks(call: Call) -> str:
    from fusedrnn.kernels._sequence import Config

    assert call.gpu is not None
    precision = "tf32" if call.tf32 and call.dtype == torch.float32 else "ieee"
    config = Config.pick(call.B, call.H, call.dtype.itemsize, call.gpu, precision)
    assert isinstance(config, Config)
    batch_blocks, hidden_blocks = config.grid(call.B, call.H)
    programs = f"{batch_blocks * hidden_blocks} programs on {call.gpu.multiprocessors} multiprocessors"
    return f"blocks of {config.block_b} x {config.block_h}, {programs}"
