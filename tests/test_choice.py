"""Which backend and save mode run a call, and how a refusal reads."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fusedrnn
from fusedrnn.backends import BACKENDS, lengths_of
from fusedrnn.backends.base import Call
from fusedrnn.choice import choose
from fusedrnn.kernels._device import H100

CALL = Call(T=100, B=4, I=8, H=16, P=16, layers=1, directions=1, dtype=torch.float32, device="cpu", onednn=True)


def chosen(**changes):
    choice = choose(replace(CALL, **changes))
    return choice.backend.name, choice.save


def test_auto_on_the_cpu():
    assert chosen() == ("onednn", "gates")
    assert chosen(T=100_000, B=64) == ("onednn", "hidden")
    assert chosen(dtype=torch.bfloat16) == ("torch_step", "gates")
    assert chosen(dtype=torch.float64, T=1024, B=64, H=4096, P=4096) == ("torch_step", "hidden")
    assert chosen(onednn=False) == ("torch_step", "gates")
    assert chosen(P=8) == ("torch_step", "gates")
    assert chosen(packed=True) == ("torch_step", "gates")
    assert chosen(transformed=True) == ("reference", "gates")
    assert chosen(T=0) == ("reference", "gates")
    assert chosen(T=100_000, B=64, grad=False) == ("onednn", "gates")


def test_auto_on_a_gpu_keeps_gates_up_to_a_share_of_its_memory():
    gpu = {"device": "cuda", "gpu": H100, "onednn": False}
    assert chosen(**gpu)[1] == "gates"
    call = replace(CALL, **gpu, T=100_000, B=64, H=512, P=512)
    choice = choose(call)
    count, save = choice.older
    chunks = len(lengths_of(call, choice.chunk))
    assert (choice.save, save) == ("gates", "hidden")
    assert 0 < count < chunks
    assert f"save='gates' but for the {count} oldest chunks with 'hidden'" in str(choice)
    kept = (chunks - count) * choice.chunk * call.step_bytes("gates")
    limit = H100.memory / 16
    assert limit - 2 * choice.chunk * call.step_bytes("gates") < kept <= limit


def test_a_larger_sequence_than_the_limit_keeps_what_fits_in_its_newest_chunks():
    call = replace(CALL, dtype=torch.float64, T=10_000, B=64)
    choice = choose(call)
    assert choice.backend.name == "torch_step"
    assert choice.save in ("gates", "cells")
    assert choice.older[1] == "hidden"
    assert 0 < choice.older[0] < len(lengths_of(call, choice.chunk))
    assert choose(call, save="hidden").older[0] == choose(call, save="gates").older[0] == 0


def test_a_named_backend_and_mode_are_used_or_refused():
    assert choose(CALL, "torch_step", "cells").save == "cells"
    assert choose(CALL, "torch_step", "cells", 7).chunk == 7
    with pytest.raises(RuntimeError, match=r"onednn: it has save='gates' and 'hidden' only"):
        choose(CALL, "onednn", "cells")
    with pytest.raises(RuntimeError, match=r"onednn: it computes float32, the input is float64") as error:
        choose(replace(CALL, dtype=torch.float64), "onednn")
    assert "T=100, B=4, I=8, H=16, float64, cpu" in str(error.value)
    with pytest.raises(RuntimeError, match=r"reference: it has save='gates' only") as error:
        choose(replace(CALL, transformed=True, P=8, packed=True, layers=2, directions=2), save="hidden")
    text = str(error.value)
    assert all(f"  {name}: " in text for name in BACKENDS["lstm"])
    assert "proj_size=8, num_layers=2, bidirectional, packed" in text


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("onednn", {"device": "cuda"}, "it runs on the CPU, the input is on cuda"),
        ("onednn", {"onednn": False}, "no oneDNN, or it is switched off"),
        ("onednn", {"dtype": torch.bfloat16}, "it computes float32, the input is bfloat16"),
        ("onednn", {"P": 8}, "no projection"),
        ("onednn", {"packed": True}, "no packed sequences"),
        ("onednn", {"T": 0}, "the input is empty"),
        ("torch_step", {"B": 0}, "the input is empty"),
        ("torch_step", {"transformed": True}, r"torch.func transforms"),
        ("triton_step", {"dtype": torch.float64}, "the input is float64"),
        ("triton_step", {"device": "mps"}, "CUDA devices, the input is on mps"),
    ],
)
def test_every_refusal_has_its_reason(name, changes, reason):
    assert any(reason in refusal for refusal in BACKENDS["lstm"][name].refusals(replace(CALL, **changes)))


def test_the_reference_refuses_nothing():
    assert not BACKENDS["lstm"]["reference"].refusals(
        replace(CALL, dtype=torch.float16, device="xpu", packed=True, T=0, B=0)
    )


def test_explain_says_who_ran_and_why():
    module = fusedrnn.LSTM(3, 4)
    assert module.explain() == "it has not run yet"
    module(torch.randn(5, 2, 3))
    assert "backend 'onednn', save='gates'" in module.explain() or "torch_step" in module.explain()
    fusedrnn_long = fusedrnn.LSTM(3, 64, save="hidden")
    fusedrnn_long(torch.randn(5, 2, 3))
    assert "save='hidden' was asked for" in fusedrnn_long.explain()


def test_onednn_chunks_are_powers_of_two_and_bounded_in_bytes():
    backend = BACKENDS["lstm"]["onednn"]
    for B in (1, 3, 16, 100, 512):
        for H in (1, 100, 512, 2000):
            steps = backend.chunk_steps(replace(CALL, B=B, H=H, P=H))
            assert 8 <= steps <= 256 and steps & (steps - 1) == 0


def test_without_triton_its_backend_says_so_and_the_rest_works():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import torch, fusedrnn\n"
        "fusedrnn.LSTM(3, 4)(torch.randn(5, 2, 3))[0].sum().backward()\n"
        "try:\n    fusedrnn.LSTM(3, 4, backend='triton_step')(torch.randn(5, 2, 3))\n"
        "except RuntimeError as e:\n    assert 'Triton is not installed' in str(e), e\n"
        "else:\n    raise SystemExit('not refused')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
