"""An LSTM layer for PyTorch that trains on sequences far longer than `torch.nn.LSTM` can hold."""

from importlib.metadata import version as _version

__version__ = _version("fusedrnn")
__all__ = ["__version__"]
