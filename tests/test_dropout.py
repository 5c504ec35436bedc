"""Dropout between layers: the masks are those of torch's generators, also where a pass is computed again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedrnn
from fusedrnn.testing import assert_close, results, twin

OPTIONS = {
    "auto": {},
    "hidden": {"save": "hidden", "backend": "torch_step", "chunk": 3},
    "onednn": {"save": "hidden", "backend": "onednn", "chunk": 3},
}
I, H = 4, 4


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_close(tensor, theirs[name], name)


@pytest.fixture(params=OPTIONS)
def dropping(request):
    ours = fusedrnn.LSTM(I, H, 3, dropout=0.5, **OPTIONS[request.param])
    return ours, twin(ours, torch.float32)


def test_dropout_follows_the_generator(dropping):
    x, found = torch.randn(7, 2, I), []
    for module in dropping:
        torch.manual_seed(6)
        first = results(module, x)
        second = results(module, x)
        state = torch.get_rng_state()
        torch.manual_seed(6)
        again = results(module, x)
        assert all(torch.equal(again[name], first[name]) for name in first)
        assert not torch.equal(first["y"], second["y"])
        with torch.random.fork_rng():
            torch.manual_seed(6)
            assert torch.equal(module(x)[0], first["y"])
        found.append(first | {f"second {name}": tensor for name, tensor in second.items()} | {"state": state.float()})
    same(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_under_checkpoint(dropping, reentrant):
    found = []
    for module in dropping:

        def flat(x, module=module):  # reentrant checkpoints see no tensors inside tuples
            y, states = module(x)
            return y, *states

        torch.manual_seed(6)
        plain = results(module, torch.ones(7, 2, I))
        module.zero_grad()
        torch.manual_seed(6)
        x = torch.ones(7, 2, I, requires_grad=True)
        y, h, c = checkpoint(flat, x, use_reentrant=reentrant)
        torch.rand(3)  # what is drawn in between may not change what is computed again
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (y, h, c)]
        torch.autograd.backward((y, h, c), grads)
        again = {f"d{name}": weight.grad for name, weight in module.named_parameters()}
        again |= {"y": y, "h": h, "c": c, "dx": x.grad}
        same(again, plain)
        found.append(again)
    same(*found)
