"""An LSTM layer for PyTorch that trains on sequences far longer than `torch.nn.LSTM` can hold."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from fusedrnn.conversion import convert, convert_back
from fusedrnn.functional import lstm
from fusedrnn.modules import GRU, LSTM
from fusedrnn.offloading import OffloadConfig, OffloadHostFull, offload

if TYPE_CHECKING:
    from fusedrnn.dynamic import dynamic_rnn
    from fusedrnn.planner import plan

__version__ = _version("fusedrnn")
__all__ = [
    "GRU",
    "LSTM",
    "OffloadConfig",
    "OffloadHostFull",
    "__version__",
    "convert",
    "convert_back",
    "dynamic_rnn",
    "lstm",
    "offload",
    "plan",
]

_LATER = {
    "dynamic_rnn": "fusedrnn.dynamic",
    "plan": "fusedrnn.planner",
}
"""What is imported when it is first asked for, so that `import fusedrnn` stays quick."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fusedrnn' has no attribute {name!r}")
    return getattr(_import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
