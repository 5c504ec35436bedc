"""What is refused on ROCm."""

import torch

from fusedrnn.backends.base import Call
from fusedrnn.backends.triton_sequence import TritonSequence


def test_a_grid_that_waits_for_itself_is_refused(monkeypatch):
    call = Call(T=8, B=2, I=4, H=8, P=8, layers=1, directions=1, dtype=torch.float32, device="cuda")
    assert not any("ROCm" in reason for reason in TritonSequence().refusals(call))
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert any("on ROCm its programs do not wait" in reason for reason in TritonSequence().refusals(call))
