"""torch.compile and torch.export take a layer whole, as one operator a stage, with the results of an eager call."""

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn.cells import Weights
from fusedrnn.testing import assert_close, results, twin

WEIGHTS = [name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh") for name in Weights._fields]
"""Which weights a layer without projection has."""
PLAIN = (None, 0.0, False)  # clip, zoneout, cells


@pytest.fixture(autouse=True)
def _dynamo():
    """Dynamo refuses instances of torch.nn.LSTM unless it is told not to."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.rnn = fusedrnn.LSTM(3, 4, **kwargs)
        self.head = nn.Linear(4 * (2 if self.rnn.bidirectional else 1), 2)

    def forward(self, x, state=None):
        y, state = self.rnn(torch.relu(x), state)
        return self.head(y), state


@pytest.mark.parametrize(
    "kwargs",
    [
        {"save": "gates", "backend": "torch_step", "num_layers": 2},
        {"save": "cells", "backend": "torch_step", "chunk": 3},
        {"save": "hidden", "num_layers": 2, "bidirectional": True, "batch_first": True},
        {},
    ],
    ids=str,
)
def test_whole_graph_equals_eager_for_several_sizes(kwargs):
    net = Net(**kwargs)
    fast = torch.compile(net, fullgraph=True, backend="aot_eager")
    for T, B in ((5, 2), (7, 3)):
        x = torch.randn(B, T, 3) if net.rnn.batch_first else torch.randn(T, B, 3)
        found = {}
        for name, model in (("eager", net), ("compiled", fast)):
            net.zero_grad()
            data = x.clone().requires_grad_()
            y, (h, c) = model(data)
            (y.pow(2).sum() + h.sum() + 2 * c.sum()).backward()
            found[name] = [y, h, c, data.grad, *(weight.grad.clone() for weight in net.parameters())]
        for compiled, eager in zip(found["compiled"], found["eager"], strict=True):
            assert_close(compiled, eager, "compiled")


def test_a_stack_of_layers_is_one_operator():
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(Net(num_layers=3), fullgraph=True, backend=backend)(torch.randn(50, 2, 3))
    assert sum("fusedrnn.layers" in str(target) for target in seen) == 1
    assert len(seen) < 20


def test_a_graph_without_gradients_keeps_nothing():
    net = Net(save="gates", backend="torch_step").eval()
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(x)[0], net(x)[0], "y")
        weights = list(net.rnn.parameters())
        states = [torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)]
        options = (None, None, "lstm", WEIGHTS, [False], *PLAIN, "torch_step", "gates", 2, False)
        assert len(torch.ops.fusedrnn.layers(x, states, weights, *options)) == 3


def test_export():
    net = Net(num_layers=2, save="hidden").eval()
    x = torch.randn(5, 2, 3)
    program = torch.export.export(net, (x,))
    assert_close(program.module()(x)[0], net(x)[0], "exported")


@pytest.mark.parametrize("save", ["gates", "cells", "hidden"])
@pytest.mark.parametrize("reverses", [[False], [False, True]], ids=["two layers", "both directions"])
@pytest.mark.parametrize("variant", [PLAIN, (0.1, 0.2, True)], ids=["plain", "varied"])
def test_operator_passes_opcheck(save, reverses, variant):
    # Sizes at which a buffer has no padding between its parts: opcheck compares every byte of two runs.
    module = fusedrnn.LSTM(3, 8, 2 // len(reverses), bidirectional=len(reverses) == 2)
    weights = [weight.detach().requires_grad_() for weight in module.parameters()]
    states = [torch.randn(2, 8, 8, requires_grad=True) for _ in range(2)]
    x = torch.randn(4, 8, 3, requires_grad=True)
    options = (None, None, "lstm", WEIGHTS * 2, reverses, *variant, "torch_step", save, 2, True)
    torch.library.opcheck(torch.ops.fusedrnn.layers.default, (x, states, weights, *options))


def test_operator_gives_the_gradients_of_float64_torch():
    module = fusedrnn.LSTM(3, 4, num_layers=2, dtype=torch.float64, save="hidden", chunk=2)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    exact = results(twin(module), x)
    for name, tensor in results(module, x).items():
        assert_close(tensor, exact[name], name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module.zero_grad()
    compiled(x)[0].sum().backward()
    other = twin(module)
    other(x)[0].sum().backward()
    for weight, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert_close(weight.grad, theirs.grad, "compiled gradient")


def test_nothing_to_choose_says_so():
    module = fusedrnn.LSTM(3, 4, backend="reference")
    with pytest.raises(Exception, match="which a compiled operator does not allow"):
        torch.compile(module, fullgraph=True, backend="eager")(torch.randn(5, 2, 3))


# The part after the break is shown tensors with a history, whose `.grad` Dynamo looks at.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_streamed_sequence_breaks_the_graph():
    module = fusedrnn.LSTM(3, 4, chunk=5)
    x = torch.randn(12, 2, 3)

    def total(x):
        return module(x * 2, chunk_loss=lambda y, at: y.sin().sum())[0] + 1

    expected = torch.autograd.grad(total(x), module.weight_hh_l0)
    found = torch.autograd.grad(torch.compile(total, backend="aot_eager")(x), module.weight_hh_l0)
    assert torch.equal(found[0], expected[0])
