"""What the random programs compute: small models of each kind that saves activations, with and without offloading."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn

Off = fusedrnn.offloading.OffloadHooks | None


@dataclass
class Subject:
    """One computation.

    Args:
        kind: Its name.
        x: The input, on the host.
        forward: Computes the output, offloading by the offloader given; None is the plain computation.
        parameters: The parameters that `forward` uses with this offloader.
        restore: Puts back the state that a forward pass changes.
        differentiable: Whether the input gets a gradient.
        host_input: Whether the input stays on the host.
        reads_freed: Whether it is right only since freed memory is not overwritten before it is handed out again, as
            a program is that uses memory of another stream and synchronizes before that stream goes on.
        fast: A stream of its own that is not delayed, while copies are delayed a lot.
        side: Whether it may run on a stream of its own.
    """

    kind: str
    x: Tensor
    forward: Callable[[Off, Tensor], Tensor]
    parameters: Callable[[Off], list[Tensor]]
    restore: Callable[[], Any] = field(default=lambda: None)
    differentiable: bool = True
    host_input: bool = False
    reads_freed: bool = False
    fast: torch.Stream | None = None
    side: bool = True


class _Attention(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(n), *(nn.Linear(n, n) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = torch.softmax(self.q(y) @ self.k(y).transpose(-1, -2) / 8, -1)
        x = x + self.o(weights @ self.v(y))
        return x + self.mlp(self.norm(x))


class _Cell(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.x, self.h = nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g = self.x(x).chunk(3, -1)
        h = f.sigmoid() * h + i.sigmoid() * torch.relu(g + self.h(h)) * 0.5
        return torch.tanh(h), h


class Scale(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _module(kind: str, module: nn.Module, x: Tensor, device: torch.device) -> Subject:
    module.to(device)
    state = {name: value.clone() for name, value in module.state_dict().items()}

    def forward(off: Off, x: Tensor) -> Tensor:
        if off is None:
            return module(x)
        with off:
            return module(x)

    return Subject(kind, x, forward, lambda off: list(module.parameters()), lambda: module.load_state_dict(state))


def _mlp(draw: random.Random, device: torch.device, off: Off) -> Subject:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(48, 48), draw.choice((nn.Tanh, nn.ReLU, nn.SiLU))())

    return _module("mlp", nn.Sequential(*(layer() for _ in range(draw.randint(2, 8)))), torch.randn(40, 48), device)


def _attention(draw: random.Random, device: torch.device, off: Off) -> Subject:
    return _module("attention", nn.Sequential(_Attention(32), _Attention(32)), torch.randn(3, 20, 32), device)


def _conv(draw: random.Random, device: torch.device, off: Off) -> Subject:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)]
    layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 4)]
    return _module("conv", nn.Sequential(*layers), torch.randn(4, 3, 8, 8), device)


def _dynamic(draw: random.Random, device: torch.device, off: Off) -> Subject:
    cell, save = _Cell(24).to(device), draw.choice(("all", "recompute"))

    def forward(off: Off, x: Tensor) -> Tensor:
        h = torch.zeros(16, 24, device=device)
        return fusedrnn.dynamic_rnn(cell, x, h, swap_memory=False if off is None else off, save=save)[0]

    return Subject(f"dynamic_rnn {save}", torch.randn(20, 16, 24), forward, lambda off: list(cell.parameters()))


def _layers(draw: random.Random, device: torch.device, off: Off, gru: bool, streamed: bool) -> tuple[str, Any, Any]:
    """Return a name, and two layers with the same weights: the plain one, and one that offloads."""
    kinds: list[dict[str, Any]] = [{}, {}, {"num_layers": 2}, {} if gru else {"layer_norm": True}]
    # Both directions of a sequence cannot be had in one pass over it.
    kind = draw.choice(kinds if streamed else [*kinds, {"bidirectional": True}])
    options: dict[str, Any] = {}
    save = draw.choice(("gates", "hidden") if gru else ("gates", "cells", "hidden"))
    options |= {"save": save, "chunk": draw.choice((4, 7)), "backend": "torch_step", "device": device, **kind}
    layer = fusedrnn.GRU if gru else fusedrnn.LSTM
    sizes = (16, 24) if gru else (8, 16)
    plain, offloading = layer(*sizes, **options), layer(*sizes, **options, offload=off)
    offloading.load_state_dict(plain.state_dict())
    return f"{'gru' if gru else 'lstm'} {save} {' '.join(kind)}".strip(), plain, offloading


def _recurrent(draw: random.Random, device: torch.device, off: Off) -> Subject:
    gru = draw.random() < 0.35
    name, plain, offloading = _layers(draw, device, off, gru, streamed=False)

    def layer(off: Off) -> Any:
        return plain if off is None else offloading

    x = torch.randn(40, 8, 16) if gru else torch.randn(30, 4, 8)
    return Subject(name, x, lambda off, x: layer(off)(x)[0], lambda off: list(layer(off).parameters()))


def _streaming(draw: random.Random, device: torch.device, off: Off) -> Subject:
    gru = draw.random() < 0.2
    name, plain, offloading = _layers(draw, device, off, gru, streamed=True)
    source = draw.choice(("host", "device", "host chunks", "device chunks"))
    output = draw.choice(("host", "last", "chunk_loss"))
    n = 16 if gru else 8

    def layer(off: Off) -> Any:
        return plain if off is None else offloading

    def forward(off: Off, x: Tensor) -> Tensor:
        options: dict[str, Any] = {"output": output}
        if output == "chunk_loss":
            options = {"chunk_loss": lambda y, steps: (y * y).sum()}
        given: Any = x
        if "chunks" in source:
            # Made on the stream on which the layer is called.
            given = [(x.detach() * 2)[start : start + 5] for start in range(0, x.shape[0], 5)]
        return layer(off)(given, **options)[0]

    return Subject(
        f"streaming {name} from {source} to {output}", torch.randn(30, 4, n), forward,
        lambda off: list(layer(off).parameters()), differentiable="chunks" not in source,
        host_input="host" in source,
    )  # fmt: skip


class TwoStreams(nn.Module):
    """An encoder on one stream, the layers on another, and work of its own on the first meanwhile."""

    def __init__(self, n: int, depth: int, device: torch.device):
        super().__init__()
        self.encoder, self.auxiliary, *layers = (Scale(n) for _ in range(depth + 2))
        self.layers = nn.ModuleList(layers)
        self.aside = torch.Stream(device)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        aside, ours = self.aside, torch.accelerator.current_stream(x.device)
        aside.wait_stream(ours)
        with aside:
            h = self.encoder(x)
        ours.wait_stream(aside)
        y = self.layers[0](h)
        del h  # only the graph has it now, allocated on one stream and saved on another
        for layer in self.layers[1:]:
            y = layer(y)
        with aside:
            z = x
            for _ in range(4):
                z = self.auxiliary(z)
        ours.wait_stream(aside)
        z.record_stream(ours)
        return y + z


def _two_streams(draw: random.Random, device: torch.device, off: Off) -> Subject:
    n = 64 * 64
    module = TwoStreams(n, draw.randint(6, 12), device)

    def forward(off: Off, x: Tensor) -> Tensor:
        with contextlib.nullcontext() if off is None else off:
            return module(x)

    return Subject(
        "two streams",
        torch.randn(n),
        forward,
        lambda off: list(module.parameters()),
        reads_freed=True,
        fast=module.aside,
    )


KINDS: dict[str, Callable[[random.Random, torch.device, Off], Subject]] = {
    "mlp": _mlp,
    "attention": _attention,
    "conv": _conv,
    "dynamic": _dynamic,
    "recurrent": _recurrent,
    "streaming": _streaming,
    "two_streams": _two_streams,
}
