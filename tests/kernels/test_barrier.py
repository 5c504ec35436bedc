"""The sequence kernels with one rule of their waiting broken: each must give a wrong result on a concurrent grid.

One program is made slow at one step, at the place where the broken rule matters, so that the race has one outcome.
What an interpreted program cannot show, the order among threads and past caches, test_compiled.py looks for in the
machine code.
"""

import importlib.util
import inspect

import pytest
import torch

from fusedrnn.kernels import lstm_sequence_backward, lstm_sequence_forward
from fusedrnn.kernels._sequence import Config, Rows
from fusedrnn.testing import poisoned

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only an interpreted program can be made slow")
# Two batch blocks and two hidden blocks; the exchange ends where it began.
B, H, K, CONFIG = 3, 20, 4, Config(block_b=2, block_h=16, block_k=32, num_warps=4)

FORWARD_WAIT = "        wait_for(barrier_ptr + pid_b, k * hidden_blocks)\n"
FORWARD_STORE = "        tl.store(exchange + ((k + 1) % 2) * half"
FORWARD_READ = "        hproj = zeros("
BACKWARD_WAIT = "        wait_for(barrier_ptr + pid_b, reverse * HIDDEN_BLOCKS)\n"
BACKWARD_STORE = "        share = share_ptr"
BACKWARD_READ = "        dh = _add_shares("
ARRIVE = "        arrive(barrier_ptr + pid_b)\n"
FORWARD = {
    "slow to store": (FORWARD_STORE, []),
    "slow to read": (FORWARD_READ, []),
    "does not wait": (FORWARD_STORE, [(FORWARD_WAIT, "")]),
    "waits for one step less": (FORWARD_STORE, [("k * hidden_blocks", "(k - 1) * hidden_blocks")]),
    "arrives before its stores": (FORWARD_STORE, [(ARRIVE, ""), (FORWARD_STORE, ARRIVE + FORWARD_STORE)]),
    "one counter for all batch blocks": (FORWARD_STORE, [("barrier_ptr + pid_b", "barrier_ptr")]),
    "exchange one step deep": (FORWARD_READ, [("(k % 2) * half", "0 * half"), ("((k + 1) % 2) * half", "0 * half")]),
    "reads where it writes": (FORWARD_READ, [("before = exchange + (k % 2)", "before = exchange + ((k + 1) % 2)")]),
}
BACKWARD = {
    "slow to store": (BACKWARD_STORE, []),
    "slow to read": (BACKWARD_READ, []),
    "does not wait": (BACKWARD_STORE, [(BACKWARD_WAIT, "")]),
    "waits for one step less": (BACKWARD_STORE, [("reverse * HIDDEN_BLOCKS)", "(reverse - 1) * HIDDEN_BLOCKS)")]),
    "arrives before its stores": (BACKWARD_STORE, [(ARRIVE, ""), (BACKWARD_STORE, ARRIVE + BACKWARD_STORE)]),
    "one counter for all batch blocks": (BACKWARD_STORE, [("barrier_ptr + pid_b", "barrier_ptr")]),
    "shares one step deep": (BACKWARD_READ, [("(reverse + 1) % 2", "0"), ("reverse % 2", "0"), ("(K + 1) % 2", "0")]),
    "reads where it writes": (BACKWARD_READ, [("(reverse + 1) % 2", "reverse % 2")]),
}


@pytest.fixture
def mutant(device, at_once, tmp_path):
    """Import a module of kernels with parts of its source replaced, and one program slow before `slow`."""

    def load(module, slow, replacements, step):
        source = inspect.getsource(module)
        delay = f"        if first_h > 0:\n            if {step} == 2:\n                time.sleep(1.0)\n"
        for old, new in [*replacements, (slow, delay + slow), ("import torch\n", "import time\n\nimport torch\n")]:
            assert old in source, f"{old!r} is not in {module.__name__}"
            source = source.replace(old, new)
        path = tmp_path / "mutant.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("mutant", path)
        changed = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed)
        changed.launch = at_once
        return changed

    return load


def forward(module):
    torch.manual_seed(0)
    xproj, weight = torch.randn(K * B, 4 * H), 0.5 * torch.randn(4 * H, H)
    y, c = torch.full((K * B, H), torch.nan), torch.full((K * B, H), torch.nan)
    with poisoned():
        states = module.lstm_sequence_forward(
            xproj, weight, torch.randn(B, H), torch.randn(B, H), y, c, Rows(K, 0, B), CONFIG
        )
    return torch.cat((y, c, *states))


def backward(module):
    torch.manual_seed(0)
    gates, weight = torch.rand(K * B, 4 * H), 0.5 * torch.randn(4 * H, H)
    dh, dc = torch.randn(B, H), torch.randn(B, H)
    with poisoned():
        module.lstm_sequence_backward(
            gates, weight, torch.randn(B, H), torch.randn(K * B, H), None, dh, dc, Rows(K, 0, B), CONFIG
        )
    return torch.cat((gates.view(-1, H), dh, dc))


@pytest.mark.parametrize("rule", FORWARD)
def test_forward(mutant, rule):
    slow, replacements = FORWARD[rule]
    sound, found = forward(lstm_sequence_forward), forward(mutant(lstm_sequence_forward, slow, replacements, "k"))
    assert sound.isfinite().all()
    assert torch.equal(found, sound) == (not replacements)


@pytest.mark.parametrize("rule", BACKWARD)
def test_backward(mutant, rule):
    slow, replacements = BACKWARD[rule]
    sound = backward(lstm_sequence_backward)
    found = backward(mutant(lstm_sequence_backward, slow, replacements, "reverse"))
    assert sound.isfinite().all()
    assert torch.equal(found, sound) == (not replacements)
