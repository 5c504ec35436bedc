"""PyTorch's own samples of nn.LSTM and nn.GRU, from the installed package, run against ours.

`torch.testing._internal.common_modules` lists constructor and call arguments for each module;
test/test_modules.py of PyTorch runs them through the checks that are repeated here.
"""

import copy
import pickle
import warnings
from unittest.mock import patch

import pytest
import torch

import fusedrnn

# The import would forbid the whole process to set torch's switches, as other tests do.
with warnings.catch_warnings(), patch.object(torch.backends, "disable_global_flags", lambda: None):
    # It looks for optional packages and says what it thinks of their versions.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import ModuleErrorEnum, module_db

OURS = {torch.nn.LSTM: fusedrnn.LSTM, torch.nn.GRU: fusedrnn.GRU}
INFOS = {info.module_cls: info for info in module_db if info.module_cls in OURS}


def samples(kind, dtype, training):
    """Pairs of torch's module and ours with equal weights, and the arguments of a call."""
    info = INFOS[kind]
    found = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for number, sample in enumerate(found):
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        torch.manual_seed(number)
        theirs = kind(*args, **kwargs).to(dtype).train(training)
        ours = OURS[kind](*args, **kwargs).to(dtype).train(training)
        ours.load_state_dict(theirs.state_dict())
        yield theirs, ours, sample.forward_input.args, sample.forward_input.kwargs


def flat(out):
    y, state = out
    return [y, *(state if isinstance(state, tuple) else (state,))]


def call(module, args, kwargs):
    torch.manual_seed(0)
    return flat(module(*args, **kwargs))


def leaves(args, kwargs):
    found = [a for a in [*args, *kwargs.values()] if isinstance(a, (torch.Tensor, tuple))]
    return [t for a in found for t in (a if isinstance(a, tuple) else (a,)) if t.requires_grad]


CASES = pytest.mark.parametrize("kind", INFOS, ids=lambda kind: kind.__name__)
pytestmark = pytest.mark.filterwarnings(
    # torch's own layer says so of its own sample.
    "ignore:dropout option adds dropout after all but last recurrent layer",
    "ignore:LSTM with projections is not supported with oneDNN",
)


def test_both_layers_have_samples():
    assert set(INFOS) == set(OURS)
    for kind in INFOS:
        assert len(list(samples(kind, torch.float32, True))) > 10


@CASES
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_forward_and_gradients(kind, training):
    for theirs, ours, args, kwargs in samples(kind, torch.float64, training):
        expected, found = call(theirs, args, kwargs), call(ours, args, kwargs)
        if training and ours.dropout and ours.num_layers > 1:
            # Masks are drawn layer by layer in both, so that the same seed gives the same.
            assert torch.allclose(found[0], expected[0])
        inputs = [*leaves(args, kwargs)]
        seeds = [torch.randn_like(e) for e in expected]
        want = torch.autograd.grad(expected, [*inputs, *theirs.parameters()], seeds)
        have = torch.autograd.grad(found, [*inputs, *ours.parameters()], seeds)
        for f, e in zip([*found, *have], [*expected, *want], strict=True):
            assert f.shape == e.shape
            assert torch.allclose(f, e, rtol=1e-9, atol=1e-11)


@CASES
def test_references_of_samples(kind):
    count = 0
    info = INFOS[kind]
    for sample in info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=False):
        if sample.reference_fn is None:
            continue
        count += 1
        ours = OURS[kind](*sample.constructor_input.args, **sample.constructor_input.kwargs).double().eval()
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        expected = flat(sample.reference_fn(ours, *args, **kwargs))
        for found, reference in zip(call(ours, args, kwargs), expected, strict=True):
            torch.testing.assert_close(found, reference)
    assert count > 10


@CASES
def test_error_samples(kind):
    seen = set()
    info = INFOS[kind]
    for error in info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    ):
        seen.add(error.error_on)
        make, forward = error.module_error_input.constructor_input, error.module_error_input.forward_input
        if error.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type, match=error.error_regex):
                OURS[kind](*make.args, **make.kwargs)
        else:
            # The one fault of a call among them is a wrong dtype; ours has words of its own for it.
            ours = OURS[kind](*make.args, **make.kwargs)
            with pytest.raises(error.error_type, match="dtype"):
                ours(*forward.args, **forward.kwargs)
    assert seen == set(ModuleErrorEnum)


@CASES
def test_gradcheck_and_gradgradcheck(kind):
    checked = set()
    for _, ours, args, kwargs in samples(kind, torch.float64, False):
        key = (ours.num_layers, ours.bidirectional, ours.proj_size, len(leaves(args, kwargs)))
        if key in checked or ours.hidden_size > 8:
            continue
        checked.add(key)
        inputs = leaves(args, kwargs)

        def run(*inputs, ours=ours, args=args, kwargs=kwargs):
            return tuple(call(ours, args, kwargs))

        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    assert len(checked) > 2


@CASES
def test_pickle_copy_repr_and_conversions(kind):
    for theirs, ours, args, kwargs in samples(kind, torch.float32, False):
        expected = call(ours, args, kwargs)
        for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
            assert all(map(torch.equal, call(other, args, kwargs), expected))
        assert repr(ours) == repr(theirs)
        wide = ours.double()
        assert wide is ours and all(weight.dtype == torch.float64 for weight in ours.parameters())
        assert ours.half().float().weight_ih_l0.dtype == torch.float32
        assert ours.to("meta").weight_ih_l0.is_meta
