"""`memory_budget`: the peak of a step keeps to it, or the call is refused before anything is computed."""

import copy
import re

import pytest
import torch

import fusedrnn
from fusedrnn.bench._measure import allocated_bytes
from fusedrnn.cells import LSTM
from fusedrnn.testing import assert_agrees_with_float64, results
from tests.test_memory import step_of

KINDS = {
    "lstm": (fusedrnn.LSTM, {"backend": "torch_step"}),
    "onednn": (fusedrnn.LSTM, {"backend": "onednn"}),
    "float64": (fusedrnn.LSTM, {"dtype": torch.float64}),
    "gru": (fusedrnn.GRU, {}),
    "deep": (fusedrnn.LSTM, {"num_layers": 2, "bidirectional": True, "backend": "torch_step"}),
}
T, B, I, H = 400, 4, 8, 64


def peak_of(kind, **options):
    make, own = KINDS[kind]
    return allocated_bytes(step_of(make(I, H, **own, **options), T, B, own.get("dtype", torch.float32)))


def least_of(kind):
    """Return the smallest budget that would do, from the message of a refusal."""
    make, own = KINDS[kind]
    module = make(I, H, **own, memory_budget=1000)
    with pytest.raises(ValueError, match="`memory_budget` must be at least") as error:
        module(torch.randn(T, B, I, dtype=own.get("dtype", torch.float32)))
    return int(re.search(r"at least (\d+) bytes", str(error.value))[1])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_keeps_to_the_budget(kind, share):
    least, most = least_of(kind), peak_of(kind, save="gates")
    budget = int(least + share * (most - least))
    assert peak_of(kind, memory_budget=budget) <= 1.02 * budget


def test_a_larger_budget_is_used():
    least, most = least_of("lstm"), peak_of("lstm", save="gates")
    peaks = [peak_of("lstm", memory_budget=int(least + share * (most - least))) for share in (0, 0.5, 1)]
    assert peaks[0] < peaks[1] < peaks[2]


def test_a_refusal_comes_first_and_the_next_call_is_exact():
    module = fusedrnn.LSTM(I, H, memory_budget="1MiB", backend="torch_step", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got 1048576 \(1 MiB\); that is backend='torch_step', save='hidden'"):
        module(torch.randn(5 * T, B, I, dtype=torch.float64))
    assert_agrees_with_float64(module, torch.randn(50, B, I))
    assert "the budget is 1 MiB" in module.explain()


def test_without_gradients_the_budget_does_not_matter():
    module = fusedrnn.LSTM(I, H, memory_budget=1000)
    with torch.no_grad():
        assert module(torch.randn(T, B, I))[0].shape == (T, B, H)


def test_the_results_are_those_of_what_was_chosen():
    torch.manual_seed(0)
    budgeted = fusedrnn.LSTM(I, H, memory_budget="2MiB", backend="torch_step", chunk=16)
    x = torch.randn(T, B, I)
    found = results(budgeted, x)
    assert "oldest chunks with" in budgeted.explain()
    again = results(copy.deepcopy(budgeted), x)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert_agrees_with_float64(budgeted, x)


def test_the_functional_form_and_compiled_layers_keep_to_it():
    module = fusedrnn.LSTM(I, H, memory_budget=1000)
    x = torch.randn(T, B, I)
    with pytest.raises(ValueError, match="`memory_budget` must be at least"):
        fusedrnn.lstm(x, None, *module._layers()[0][:4], memory_budget="1 KB")
    with pytest.raises(ValueError, match="`memory_budget` must be at least"):
        torch.compile(module, backend="eager")(x)


# In the configuration of offloading.


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_buffers_that_stay_keep_to_the_budget_of_offloading(tmp_path, share):
    torch.manual_seed(0)
    options = {"backend": "torch_step", "save": "gates", "chunk": 10}
    plain = fusedrnn.LSTM(I, H, **options)
    x = torch.randn(T, B, I)
    exact = results(plain, x)
    saved = T * B * H * LSTM.saved_bytes("gates", torch.float32)
    budget = int(share * saved)
    config = fusedrnn.OffloadConfig(spill_dir=tmp_path, memory_budget=budget, occupancy_limit=1.0, chunk_bytes=1024)
    module = fusedrnn.LSTM(I, H, **options, offload=config)
    module.load_state_dict(plain.state_dict())
    for _ in range(2):
        found = results(module, x)
        assert all(torch.equal(found[name], exact[name]) for name in exact)
    stats = module.offloader.stats()
    assert stats.device_peak <= budget
    assert stats.spilled_bytes > 0
    assert stats.device_peak > 0.5 * budget


def test_a_budget_of_offloading_that_holds_no_two_buffers_is_refused_and_the_next_call_exact(tmp_path):
    config = fusedrnn.OffloadConfig(spill_dir=tmp_path, memory_budget="100KiB")
    module = fusedrnn.LSTM(I, H, backend="torch_step", save="gates", offload=config, dtype=torch.float64)
    with pytest.raises(torch.OutOfMemoryError, match="`memory_budget` of 102400 bytes has no room for a buffer"):
        module(torch.randn(T, B, I, dtype=torch.float64))
    assert_agrees_with_float64(module, torch.randn(3, B, I))


@pytest.mark.parametrize("value", [-1, 0, True, "much", "-2GiB", 1.5])
def test_other_values_are_refused(value):
    for refuse in (
        lambda: fusedrnn.LSTM(I, H, memory_budget=value),
        lambda: fusedrnn.OffloadConfig(memory_budget=value),
    ):
        with pytest.raises(ValueError, match="`memory_budget` must be None, a number of bytes"):
            refuse()
