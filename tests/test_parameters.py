"""Parameters of every kind: whatever a training script does to those of `torch.nn.LSTM`, it may do to ours.

Each test does the same to both and compares what comes out, gradients and later training steps included.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel

import fusedrnn
from fusedrnn.testing import assert_close, results, twin

OPTIONS = {
    "auto": {},
    "hidden": {"save": "hidden", "backend": "torch_step", "chunk": 3},
    "onednn": {"save": "hidden", "backend": "onednn", "chunk": 3},
}
NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_ih_l1", "weight_hh_l1")
I, H = 4, 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Layers this small are slowed down by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=OPTIONS)
def pair(request):
    """Ours and torch's, two layers with equal weights."""
    ours = fusedrnn.LSTM(I, H, 2, **OPTIONS[request.param])
    return ours, twin(ours, torch.float32)


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_close(tensor, theirs[name], name)


def follow(ours: nn.LSTM, theirs: nn.LSTM, steps: int = 3) -> None:
    """Train both and compare results, gradients and parameters; what needs no gradient may not move."""
    before = parameters(ours)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5) for module in (ours, theirs)]
    for _ in range(steps):
        x = torch.randn(7, 2, I)
        with parametrize.cached():  # some parametrizations change their buffers whenever they are read
            found = results(ours, x)
        with parametrize.cached():
            same(found, results(theirs, x))
        for optimizer in optimizers:
            optimizer.step()
        same(parameters(ours), parameters(theirs))
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, before[name]) is not weight.requires_grad, name


@pytest.mark.parametrize("kind", [weight_norm, spectral_norm, orthogonal])
@pytest.mark.parametrize("names", [("weight_hh_l0",), ("weight_ih_l0", "weight_hh_l1")], ids=["one", "two"])
def test_parametrizations_train(pair, kind, names):
    for module in pair:
        for name in names:
            torch.manual_seed(2)  # spectral_norm draws
            kind(module, name)
    follow(*pair)
    for module in pair:
        for name in names:
            parametrize.remove_parametrizations(module, name)
    assert isinstance(pair[0], fusedrnn.LSTM) and type(pair[0]) is fusedrnn.LSTM
    follow(*pair)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_norms_by_hooks_train(pair, kind):
    for module in pair:
        torch.manual_seed(2)
        getattr(nn.utils, kind)(module, "weight_hh_l0")
    follow(*pair)
    for module in pair:
        getattr(nn.utils, f"remove_{kind}")(module, "weight_hh_l0")
    follow(*pair)


class Counted(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_parametrization_is_computed_once_per_call(name):
    ours, counted = fusedrnn.LSTM(I, H, 2), Counted()
    parametrize.register_parametrization(ours, name, counted)
    counted.calls = 0
    ours(torch.randn(7, 2, I))
    assert counted.calls == 1


def test_a_copy_of_a_parametrized_layer_is_its_own(pair):
    copies = []
    for module in pair:
        weight_norm(module, "weight_hh_l0")
        copies.append(copy.deepcopy(module))
        with torch.no_grad():
            module.parametrizations.weight_hh_l0.original0.mul_(3)
    follow(*copies)
    follow(*pair)


def test_pruning(pair):
    for module in pair:
        prune.l1_unstructured(module, "weight_hh_l0", amount=0.3)
        prune.custom_from_mask(module, "bias_ih_l1", torch.arange(4 * H) % 2)
        prune.ln_structured(module, "weight_ih_l0", amount=0.5, n=2, dim=1)
    follow(*pair)
    for module in pair:
        prune.l1_unstructured(module, "weight_hh_l0", amount=0.3)
    follow(*pair)
    for module in pair:
        for name in ("weight_hh_l0", "bias_ih_l1", "weight_ih_l0"):
            prune.remove(module, name)
        assert module.weight_hh_l0.eq(0).sum() >= 4 * H * H * 0.3
    follow(*pair)


class WeightDrop(nn.Module):
    """Dropout on recurrent weights by setting attributes, as AWD-LSTM does (Merity et al. 2017)."""

    def __init__(self, module: nn.LSTM, names: tuple[str, ...]):
        super().__init__()
        self.module, self.names = module, names
        for name in names:
            raw = getattr(module, name)
            del module._parameters[name]
            module.register_parameter(f"{name}_raw", raw)

    def forward(self, x, hx=None):
        for name in self.names:
            setattr(self.module, name, F.dropout(getattr(self.module, f"{name}_raw"), 0.5, self.training))
        return self.module(x, hx)


@pytest.mark.parametrize("training", [True, False])
def test_weights_dropped_by_attribute(pair, training):
    models = [WeightDrop(module, ("weight_hh_l0", "weight_hh_l1")).train(training) for module in pair]
    found = []
    for model in models:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(3):
            last = results(model, torch.randn(7, 2, I))
            optimizer.step()
        found.append(last | parameters(model))
    assert "dmodule.weight_hh_l0_raw" in found[0] and found[0]["dmodule.weight_hh_l1_raw"].any()
    same(*found)


def test_attributes_and_data_that_are_replaced(pair):
    weight, bias = torch.randn(4 * H, H), torch.randn(4 * H)
    for module in pair:
        module.weight_hh_l1 = nn.Parameter(weight.clone())
        module.bias_hh_l0.data = bias.clone()
        vector_to_parameters(parameters_to_vector(module.parameters()) * 0.7, module.parameters())
    follow(*pair)


def test_functional_call_uses_what_it_is_given(pair):
    x, before = torch.randn(7, 2, I), parameters(pair[0])
    given = {name: torch.randn_like(weight) for name, weight in before.items()}
    found = []
    for module in pair:
        weights = {name: weight.clone().requires_grad_() for name, weight in given.items()}
        y, (h, c) = functional_call(module, weights, (x,))
        (y.sum() + h.pow(2).sum() + c.sin().sum()).backward()
        assert all(weight.grad is None for weight in module.parameters())
        found.append({name: weight.grad for name, weight in weights.items()} | {"y": y, "h": h, "c": c})
    same(*found)
    same(parameters(pair[0]), before)
    part = {"weight_hh_l0": given["weight_hh_l0"]}
    outputs = [functional_call(module, part, (x,))[0] for module in pair]
    assert_close(*outputs, "y with one weight given")
    follow(*pair)


def test_functional_call_under_a_transform():
    ours, x = fusedrnn.LSTM(I, H, 2), torch.randn(7, 2, I)
    ours, theirs = (
        torch.func.grad(lambda weights, module=module: functional_call(module, weights, (x,))[0].pow(2).sum())(
            parameters(module)
        )
        for module in (ours, twin(ours, torch.float32))
    )
    same(ours, theirs)


def test_tied_weights_gather_all_gradients(pair):
    for module in pair:
        module.weight_hh_l1 = module.weight_hh_l0
        module.bias_hh_l0 = module.bias_ih_l0
        module.weight_ih_l1 = module.weight_hh_l0
        assert len(list(module.parameters())) == 5
    follow(*pair)
    assert pair[0].weight_hh_l1 is pair[0].weight_ih_l1 is pair[0].weight_hh_l0


def test_weights_tied_between_layers_and_directions():
    found = []
    for kind in (fusedrnn.LSTM, nn.LSTM):
        torch.manual_seed(0)
        first, second = kind(I, H, bidirectional=True), kind(2 * H, H)
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_hh_l0"):
            setattr(first, f"{name}_reverse", getattr(first, name))
        second.weight_hh_l0 = first.weight_hh_l0
        model = nn.ModuleList([first, second])
        second(first(torch.randn(7, 2, I))[0])[0].pow(2).sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    same(*found)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_are_whole_and_their_own(pair, again):
    for module in pair:
        module.weight_ih_l1.requires_grad_(False)
        results(module, torch.randn(7, 2, I))
    ours, theirs = (again(module) for module in pair)
    assert type(ours) is fusedrnn.LSTM and ours.options == pair[0].options and ours.explain() == pair[0].explain()
    before = parameters(pair[0])
    follow(ours, theirs)
    same(parameters(pair[0]), before)
    follow(*pair)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
@pytest.mark.parametrize("offload", [True, fusedrnn.OffloadConfig(ring_slots=3), fusedrnn.offload()])
def test_copies_of_a_layer_that_offloads_have_its_configuration(again, offload):
    ours = fusedrnn.LSTM(I, H, 2, offload=offload, save="hidden")
    found = again(nn.Sequential(ours, fusedrnn.LSTM(H, H, offload=offload)))
    assert found[0].offloader.config == ours.offloader.config and found[0].options.save == "hidden"
    assert found[0].offloader is found[1].offloader


def test_checkpoints_are_read_and_written_like_torchs(pair):
    ours, theirs = pair
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = nn.LSTM(I, H, 2)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    follow(ours, other)
    ours.load_state_dict(theirs.state_dict())
    follow(ours, theirs)
    del state["weight_hh_l1"]
    messages = []
    for module in pair:
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict(state | {"weight_hr_l0": torch.ones(1)})
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_meta_device_and_loading_by_assignment():
    state = {name: weight.double() for name, weight in nn.LSTM(I, H, 2).state_dict().items()}
    found = []
    for kind in (fusedrnn.LSTM, nn.LSTM):
        with torch.device("meta"):
            module = kind(I, H, 2)
        assert module.weight_hh_l0.is_meta
        module.load_state_dict(state, assign=True)
        assert module.weight_hh_l0.dtype == torch.float64
        assert module.weight_hh_l0.data_ptr() == state["weight_hh_l0"].data_ptr()
        torch.manual_seed(4)
        found.append(results(module, torch.randn(7, 2, I)) | parameters(module))
    same(*found)


def test_meta_device_and_empty_storage():
    found = []
    for kind in (fusedrnn.LSTM, nn.LSTM):
        module = kind(I, H, 2, device="meta").to_empty(device="cpu")
        torch.manual_seed(4)
        module.reset_parameters()
        found.append(results(module, torch.randn(7, 2, I)) | parameters(module))
    same(*found)


@pytest.mark.parametrize("swap", [False, True])
def test_conversion_of_dtype_keeps_or_swaps_the_parameters(pair, swap):
    ours, theirs = pair
    if ours.options.backend == "onednn":
        ours.options = type(ours.options)()  # it has no float64
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        ids = [id(weight) for weight in ours.parameters()]
        for module in pair:
            results(module, torch.randn(7, 2, I))
            module.zero_grad()
            module.double()
        assert [id(weight) for weight in ours.parameters()] == ids
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    follow(ours, theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=True),
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
        lambda weights: torch.optim.Adam(weights, lr=0.01, foreach=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True),
        lambda weights: torch.optim.RMSprop(weights, lr=0.01, foreach=True),
    ],
    ids=["sgd foreach", "sgd fused", "adam foreach", "adamw fused", "rmsprop foreach"],
)
@pytest.mark.parametrize("to_none", [True, False])
def test_optimizers(pair, make, to_none):
    optimizers = [make(module.parameters()) for module in pair]
    for _ in range(4):
        x = torch.randn(7, 2, I)
        for module, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            for part in x.split(4):  # gradients are added up over two backward passes
                module(part)[0].pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=True)
            optimizer.step()
    for weight in pair[0].parameters():
        assert weight.grad.is_contiguous() and weight.grad.dtype == weight.dtype
    assert len({weight.grad.untyped_storage().data_ptr() for weight in pair[0].parameters()}) == 8
    same(parameters(pair[0]), parameters(pair[1]))


def test_moving_average_of_parameters(pair):
    averages = [AveragedModel(module) for module in pair]
    for _ in range(2):
        follow(*pair, steps=1)
        for average, module in zip(averages, pair, strict=True):
            average.update_parameters(module)
    x = torch.randn(7, 2, I)
    assert_close(averages[0](x)[0], averages[1](x)[0], "y")


FROZEN = {
    "one": ("weight_hh_l0",),
    "biases": ("bias_ih_l0", "bias_hh_l0", "bias_ih_l1", "bias_hh_l1"),
    "first layer": ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"),
    "second layer": ("weight_ih_l1", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1"),
    "all but one": (*NAMES, "bias_ih_l1"),
    "all": (*NAMES, "bias_ih_l1", "bias_hh_l1"),
}


@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
def test_frozen_parts_get_no_gradient(pair, names):
    for module in pair:
        for name in names:
            getattr(module, name).requires_grad_(False)
    if len(names) < 8:
        follow(*pair)
    x = torch.randn(7, 2, I)
    same(*(results(module, x) for module in pair))
    assert all(getattr(pair[0], name).grad is None for name in names)
    for module in pair:
        module.requires_grad_(True)
    follow(*pair)


def test_frozen_parts_without_a_gradient_for_the_input(pair):
    found = []
    x = torch.randn(7, 2, I)
    for module in pair:
        module.requires_grad_(False).weight_hh_l1.requires_grad_()
        module(x)[0].sum().backward()
        found.append({"dw": module.weight_hh_l1.grad})
        module.requires_grad_(False)
        assert not module(x)[0].requires_grad
        with torch.inference_mode():
            assert module(x)[0].is_inference()
    same(*found)
