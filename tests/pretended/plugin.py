"""A pytest plugin (`-p`): the tests of a GPU on the pretended device.

What needs a Triton kernel says so itself: its backends refuse, since Triton is not found here, and such a test is
skipped with that refusal.
"""

import sys
from collections.abc import Generator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cuda
import pytest
import torch

torch.set_num_threads(1)
_REFUSAL = "Triton is not installed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip what only a Triton kernel can run; fail what leaves an asynchronous error behind."""
    cuda.reset()
    torch.cuda.empty_cache()
    try:
        result = yield
    except RuntimeError as refused:
        if _REFUSAL in str(refused):
            pytest.skip("needs a Triton kernel")
        raise
    torch.cuda.synchronize()
    assert not cuda.error()
    return result
