"""An LSTM layer for PyTorch that trains on sequences far longer than `torch.nn.LSTM` can hold."""

from importlib.metadata import version as _version

from fusedrnn.functional import lstm
from fusedrnn.modules import LSTM

__version__ = _version("fusedrnn")
__all__ = ["LSTM", "__version__", "lstm"]
