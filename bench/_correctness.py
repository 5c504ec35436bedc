"""Is it right? Every backend and save mode against float64, with torch's own error as the measure."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn
from fusedrnn.backends import BACKENDS
from fusedrnn.choice import NoBackendError
from fusedrnn.testing import assert_no_worse_than_torch, full_device, poisoned, results, twin

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "projection": {"proj_size": 24},
    "packed": {},
}


class Cell(NamedTuple):
    """One check: "ok", "refused: why", or what is wrong."""

    backend: str
    save: str
    kind: str
    dtype: str
    verdict: str


def matrix(device: str, sizes: tuple[int, int, int, int], dtypes: tuple[str, ...]) -> Iterator[Cell]:
    """Check every backend, save mode, kind of layer and dtype.

    Args:
        device: Where.
        sizes: T, B, I, H; odd ones show most.
        dtypes: Names of dtypes.

    Yields:
        What came of each.
    """
    for name, backend in BACKENDS["lstm"].items():
        for save in backend.saves:
            for kind in KINDS:
                for dtype in dtypes:
                    yield Cell(name, save, kind, dtype, _verdict(device, sizes, name, save, kind, dtype))


def _verdict(device: str, sizes: tuple[int, int, int, int], backend: str, save: str, kind: str, dtype: str) -> str:
    T, B, I, H = sizes
    torch.manual_seed(0)
    element = getattr(torch, dtype)
    module = fusedrnn.LSTM(
        I, H, backend=backend, save=save, chunk=max(2, T // 3), device=device, dtype=element, **KINDS[kind]
    )
    x: Any = torch.randn(T, B, I, device=device).to(element)
    if kind == "packed":
        x = pack_padded_sequence(x, [T - k % T for k in range(B)], enforce_sorted=False)
    try:
        with poisoned():
            ours = results(module, x)
    except NoBackendError as error:
        return "refused: " + str(error).splitlines()[1].partition(": ")[2]
    with warnings.catch_warnings():
        # torch says that its oneDNN has no projection, and computes without.
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        theirs, exact = (results(twin(module, wanted).to(device), x) for wanted in (element, torch.float64))
    wrong = []
    for key in exact:
        try:
            assert_no_worse_than_torch(ours[key], theirs[key], exact[key], key, 3.0 if key.startswith("d") else 2.0)
        except AssertionError as error:
            wrong.append(str(error))
    return "; ".join(wrong) or "ok"


def same_bits(device: str, sizes: tuple[int, int, int, int], dtypes: tuple[str, ...], runs: int) -> Iterator[Cell]:
    """Check that repeated runs, and runs with offloading, give the same bits.

    Args:
        device: Where.
        sizes: T, B, I, H.
        dtypes: Names of dtypes.
        runs: How many runs without and with offloading each.

    Yields:
        What came of each backend, save mode and dtype.
    """
    T, B, I, H = sizes
    for name, backend in BACKENDS["lstm"].items():
        for save in backend.saves:
            for dtype in dtypes:
                if name != "reference":
                    yield Cell(name, save, "bits", dtype, _bits(device, (T, B, I, H), name, save, dtype, runs))


def _bits(device: str, sizes: tuple[int, int, int, int], backend: str, save: str, dtype: str, runs: int) -> str:
    T, B, I, H = sizes
    element = getattr(torch, dtype)
    x = torch.randn(T, B, I, generator=torch.Generator().manual_seed(0)).to(device, element)
    first: dict[str, torch.Tensor] = {}
    off = fusedrnn.offload(full_device())
    for offload in (False, off):
        torch.manual_seed(0)
        module = fusedrnn.LSTM(
            I, H, 2, backend=backend, save=save, chunk=8, device=device, dtype=element, offload=offload
        )
        for run in range(runs):
            try:
                found = results(module, x)
            except NoBackendError as error:
                return "refused: " + str(error).splitlines()[1].partition(": ")[2]
            first = first or found
            other = [name for name in found if not torch.equal(found[name], first[name])]
            if other:
                return f"run {run + 1} {'with' if offload else 'without'} offloading differs in {', '.join(other)}"
    # What torch's own operator keeps stays with it.
    if not off.stats().spills and (backend, save) != ("onednn", "gates"):
        return "nothing was offloaded"
    return "ok"
