"""Kernels run interpreted where there is no GPU. Triton reads the switch when a kernel is defined."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import fusedrnn.kernels.lstm_recompute
    import fusedrnn.kernels.lstm_step  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def device(monkeypatch):
    """Where kernels run, with the switch set for what asks for it at run time."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")
