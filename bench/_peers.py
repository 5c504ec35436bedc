"""Other LSTMs that run on a GPU, each as a step of training beside ours; and what cuDNN does for which sizes."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedrnn

Forward = Callable[[Tensor], Tensor]
"""Takes x [T, B, I] and returns y [T, B, H]."""


def cudnn_algorithm(
    dtype: torch.dtype, B: int, I: int, H: int, layers: int = 1, directions: int = 1, multiprocessors: int = 132
) -> str:
    """Return which of cuDNN's algorithms `torch.nn.LSTM` asks for in training.

    The rules are those of `get_algo` and `use_persist_common_heuristics` in aten/src/ATen/native/cudnn/RNN.cpp
    (PyTorch 2.13), for dense input without projection.

    Args:
        dtype: Element type.
        B: Batch size.
        I: Width of the input.
        H: Hidden units.
        layers: Number of layers.
        directions: 1 or 2.
        multiprocessors: Of the device.
    """
    plain = layers == directions == 1
    if (
        dtype == torch.float16
        and plain
        and H % 128 == 0
        and I % 128 == 0
        and H <= 1024
        and B % 8 == 0
        and B <= 128
        and multiprocessors >= 98
    ):
        return "persistent"
    if dtype != torch.float64 and H <= 128:
        return "persistent, small H"
    return "persistent forward, standard backward" if dtype != torch.float64 and H <= 192 else "standard"


def _ours(backend: str, save: str) -> Callable[..., tuple[Forward, list[Tensor]]]:
    def make(I: int, H: int, **where: Any) -> tuple[Forward, list[Tensor]]:
        module = fusedrnn.LSTM(I, H, backend=backend, save=save, **where)
        return lambda x: module(x)[0], list(module.parameters())

    return make


def _cudnn(I: int, H: int, **where: Any) -> tuple[Forward, list[Tensor]]:
    module = nn.LSTM(I, H, **where)
    return lambda x: module(x)[0], list(module.parameters())


def _flashrnn(I: int, H: int, **where: Any) -> tuple[Forward, list[Tensor]]:
    """FlashRNN (Poeppel et al. 2024), one head; its product with the input is ours to make."""
    from flashrnn import flashrnn

    weight = nn.Parameter(torch.randn(4 * H, I, **where) * H**-0.5)
    recurrent = nn.Parameter(torch.randn(4, 1, H, H, **where) * H**-0.5)
    bias = nn.Parameter(torch.zeros(4, 1, H, **where))

    def forward(x: Tensor) -> Tensor:
        T, B, _ = x.shape
        xproj = F.linear(x, weight).view(T, B, 4, 1, H).transpose(0, 1)
        states = flashrnn(xproj, recurrent, bias, function="lstm", backend="cuda_fused")[0]
        return states[0].reshape(B, T, H).transpose(0, 1)

    return forward, [weight, recurrent, bias]


def _torchrl(I: int, H: int, **where: Any) -> tuple[Forward, list[Tensor]]:
    """TorchRL's Triton LSTM, through its module over tensor dictionaries."""
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule

    module = LSTMModule(
        input_size=I,
        hidden_size=H,
        in_keys=["x", "h", "c"],
        out_keys=["y", "h_next", "c_next"],
        recurrent_backend="triton",
        default_recurrent_mode=True,
        **where,
    )

    def forward(x: Tensor) -> Tensor:
        T, B, _ = x.shape
        first = torch.zeros(B, T, 1, dtype=torch.bool, device=x.device)
        state = x.new_zeros(B, T, 1, H)
        data = TensorDict({"x": x.transpose(0, 1), "h": state, "c": state, "is_init": first}, [B, T])
        return module(data)["y"].transpose(0, 1)

    return forward, list(module.parameters())


PEERS = {"FlashRNN": ("flashrnn", _flashrnn), "TorchRL, Triton": ("torchrl", _torchrl)}
"""Other people's layers by name: the package, and what makes one."""


def contenders(device: str) -> dict[str, Callable[..., tuple[Forward, list[Tensor]]]]:
    """Return what is timed on a device: by name a function `(I, H, device=, dtype=)` that makes a layer."""
    found: dict[str, Callable[..., tuple[Forward, list[Tensor]]]] = {"torch.nn.LSTM": _cudnn}
    if device == "cpu":
        return found | {"onednn": _ours("onednn", "gates"), "torch_step": _ours("torch_step", "hidden")}
    for backend in ("triton_sequence", "triton_step"):
        for save in ("gates", "hidden"):
            found[f"{backend}, {save}"] = _ours(backend, save)
    return found | {name: make for name, (package, make) in PEERS.items() if find_spec(package)}
