"""`convert`: layers of a model change where they are, and what holds on to them does not notice."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

import fusedrnn
from fusedrnn.conversion import convert, convert_back
from fusedrnn.testing import assert_close, full_device, results


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Layers this small are slowed down by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tagger(nn.Module):
    """Layers of several kinds, one of them in two places."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"lstm": nn.LSTM(3, 5, 2, dropout=0.3, bidirectional=True, batch_first=True)})
        self.shared = nn.LSTM(10, 10, batch_first=True)
        self.again = self.shared
        self.rnn = nn.RNN(10, 2, batch_first=True)

    def forward(self, x):
        y = self.shared(self.encoder["lstm"](x)[0])[0]
        return self.rnn(self.again(y)[0])[0]


class Own(nn.LSTM):
    pass


class OwnFused(fusedrnn.LSTM):
    pass


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.Tensor:
    torch.manual_seed(5)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 7, 3)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def compare(converted: nn.LSTM, original: nn.LSTM) -> None:
    x = torch.randn(6, 2, original.input_size)
    torch.manual_seed(1)
    expected = results(original, x)
    torch.manual_seed(1)
    found = results(converted, x)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_close(tensor, expected[name], name)


def test_every_lstm_changes_and_the_optimizer_goes_on():
    model = Tagger()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    assert_close(losses(model, optimizers[0]), losses(plain, optimizers[1]), "before")
    before, draws = dict(model.named_parameters(remove_duplicate=False)), torch.get_rng_state()
    found = convert(model)
    assert torch.equal(torch.get_rng_state(), draws), "random numbers were drawn"
    assert found.model is model and found.converted == ("encoder.lstm", "shared")
    assert type(model.encoder["lstm"]) is type(model.shared) is fusedrnn.LSTM and model.again is model.shared
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert_close(losses(model, optimizers[0]), losses(plain, optimizers[1]), "after", torch.float32)
    assert "backend" in model.shared.explain()


def test_the_report_is_a_table():
    found = convert(Tagger())
    assert str(found).splitlines() == [
        "2 of 3 recurrent layers converted",
        "  encoder.lstm  converted",
        "  shared        converted",
        "  rnn           kept: it is of <class 'torch.nn.modules.rnn.RNN'>, not a torch.nn.LSTM or torch.nn.GRU",
    ]
    assert "model=" not in repr(found)
    assert str(convert(nn.Linear(2, 2))) == "0 of 0 recurrent layers converted"


def test_the_model_may_be_a_layer_itself():
    layer = nn.LSTM(3, 4, bias=False, bidirectional=True)
    original = copy.deepcopy(layer)
    found = convert(layer, save="hidden", chunk=4, backend="torch_step")
    assert found.model is layer and found.converted == ("",) and "(the model)  converted" in str(found)
    assert "save='hidden', chunk=4, backend='torch_step'" in repr(layer)
    compare(layer, original)
    assert "torch_step" in layer.explain() and "'hidden'" in layer.explain()
    assert convert(layer).skipped == {"": "it is a fusedrnn.LSTM already"}


@pytest.mark.parametrize("training", [True, False])
def test_flag_attributes_buffers_and_dropout_stay(training):
    layer = nn.LSTM(3, 4, 2, dropout=0.5).train(training)
    layer.register_buffer("seen", torch.zeros(2))
    layer.note = "kept"
    layer.head = nn.Linear(4, 1)
    layer.weight_hh_l1.requires_grad_(False)
    original = copy.deepcopy(layer)
    names = list(layer.state_dict())
    convert(layer)
    assert layer.training is training and layer.note == "kept" and isinstance(layer.head, nn.Linear)
    assert list(layer.state_dict()) == names and "seen" in names
    compare(layer, original)
    assert layer.weight_hh_l1.grad is None


def with_hooks(layer: nn.LSTM, calls: list) -> nn.LSTM:
    def note(name, result=None):
        def hook(module, *args, **kwargs):
            calls.append(name)
            return result(*args) if result else None

        return hook

    layer.register_forward_pre_hook(note("forward_pre", lambda args: (args[0] * 2, *args[1:])))
    layer.register_forward_hook(note("forward", lambda args, out: (out[0] * 3, out[1])))
    layer.register_full_backward_pre_hook(note("backward_pre"))
    layer.register_full_backward_hook(
        note("backward", lambda given, _: tuple(g if g is None else g * 4 for g in given))
    )
    layer.register_state_dict_pre_hook(note("state_dict_pre"))
    layer.register_state_dict_post_hook(note("state_dict_post"))
    layer.register_load_state_dict_pre_hook(note("load_pre"))
    layer.register_load_state_dict_post_hook(note("load_post"))
    return layer


def test_hooks_of_every_kind_are_called_as_before():
    called = []
    for change in (lambda layer: None, convert):
        torch.manual_seed(0)
        calls = []
        layer = with_hooks(nn.LSTM(3, 4), calls)
        change(layer)
        x = torch.randn(5, 2, 3, requires_grad=True)
        y = layer(x)[0]
        y.sum().backward()
        layer.load_state_dict(layer.state_dict())
        called.append((calls, y, x.grad, layer.weight_hh_l0.grad))
    (theirs, *expected), (ours, *found) = called
    assert ours == theirs and set(ours) >= {"forward_pre", "forward", "backward_pre", "backward", "load_pre"}
    for name, a, b in zip(("y", "dx", "dw"), found, expected, strict=True):
        assert_close(a, b, name)


def test_parametrized_layers_stay_parametrized():
    layer = weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    original = copy.deepcopy(layer)
    assert type(original) is type(layer), "torch gives both copies one class"
    convert(layer, chunk=3)
    assert isinstance(layer, fusedrnn.LSTM) and not isinstance(original, fusedrnn.LSTM)
    for _ in range(2):
        compare(layer, original)
        for module in (layer, original):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
    compare(copy.deepcopy(layer), original)
    weight_norm(layer, "weight_ih_l0")
    weight_norm(original, "weight_ih_l0")
    compare(layer, original)
    for name in ("weight_hh_l0", "weight_ih_l0"):
        parametrize.remove_parametrizations(layer, name)
        parametrize.remove_parametrizations(original, name)
    assert type(layer) is fusedrnn.LSTM and type(original) is nn.LSTM
    compare(layer, original)


def test_parametrized_layers_go_back():
    layer = weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    original = copy.deepcopy(layer)
    convert(layer)
    assert convert_back(layer).converted == ("",)
    assert not isinstance(layer, fusedrnn.LSTM)
    compare(layer, original)
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is nn.LSTM


def test_pruned_layers_stay_pruned():
    layer = nn.LSTM(3, 4)
    original = copy.deepcopy(layer)
    for module in (layer, original):
        prune.l1_unstructured(module, "weight_hh_l0", amount=0.5)
    convert(layer)
    compare(layer, original)
    for module in (layer, original):
        prune.remove(module, "weight_hh_l0")
    compare(layer, original)
    assert layer.weight_hh_l0.eq(0).sum() == 32


def test_copies_and_pickles_of_a_converted_model():
    model = nn.Sequential(nn.LSTM(3, 4))
    convert(model, save="hidden")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is fusedrnn.LSTM and twin[0].options.save == "hidden"
        compare(twin[0], model[0])


def test_layers_on_the_meta_device_are_converted():
    layer = nn.LSTM(3, 4, device="meta")
    convert(layer)
    assert layer.to_empty(device="cpu")(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)


def test_offloading_can_be_asked_for():
    model = nn.Sequential(nn.LSTM(3, 4), nn.LSTM(3, 4))
    original = copy.deepcopy(model)
    convert(model, offload=full_device(), chunk=2)
    assert model[0].offloader is not None
    compare(model[0], original[0])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"save": "all"}, ValueError, "`save` must be one of .*, got 'all'"),
        ({"chunk": 0}, ValueError, "`chunk` must be .* at least 1, got 0"),
        ({"backend": "cudnn"}, ValueError, "`backend` must be one of .*, got 'cudnn'"),
        ({"offload": "cpu"}, TypeError, "`offload` must be True, False, .*, got str"),
    ],
)
def test_wrong_options_leave_the_model_as_it_was(options, error, match):
    model = Tagger()
    with pytest.raises(error, match=match):
        convert(model, **options)
    assert not any(isinstance(module, fusedrnn.LSTM) for module in model.modules())


@pytest.mark.parametrize("function", [convert, convert_back])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got function"):
        function(lambda x: x)


def replaced() -> nn.LSTM:
    layer = nn.LSTM(3, 4)
    layer.forward = lambda x: x
    return layer


def with_own(name: str) -> nn.LSTM:
    layer = nn.LSTM(3, 4)
    setattr(layer, name, 1)
    return layer


def elsewhere() -> nn.LSTM:
    layer = nn.LSTM(3, 4)
    fake = FakeTensor(FakeTensorMode(), torch.empty(16, 3, device="meta"), torch.device("mps"))
    layer.weight_ih_l0 = nn.Parameter(fake)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Own(3, 4), r"Own is a subclass, which may compute something else"),
        (lambda: weight_norm(Own(3, 4), "weight_hh_l0"), "is a subclass"),
        (lambda: OwnFused(3, 4), r"it is a fusedrnn\.LSTM already"),
        (lambda: nn.RNN(3, 4), r"of <class 'torch\.nn\.modules\.rnn\.RNN'>, not a torch\.nn\.LSTM"),
        (lambda: nn.LSTMCell(3, 4), r"of <class 'torch\.nn\.modules\.rnn\.LSTMCell'>"),
        (replaced, "its `forward` was replaced"),
        (lambda: with_own("options"), r"it has `options` of its own, which fusedrnn\.LSTM would replace"),
        (elsewhere, "`weight_ih_l0` is on mps:0, only cpu, cuda are supported"),
        (lambda: nn.LSTM(3, 4, dtype=torch.complex64), r"`weight_ih_l0` is of torch\.complex64, only torch\.float16"),
        (lambda: torch.jit.script(nn.LSTM(3, 4)), r"compiled by torch\.jit: convert the model before"),
    ],
)
def test_what_is_not_converted_and_why(make, reason):
    layer = make()
    kind = type(layer)
    found = convert(nn.Sequential(layer))
    assert found.converted == () and type(layer) is kind
    assert list(found.skipped) == ["0"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.skipped["0"])


@pytest.mark.filterwarnings("ignore")
def test_quantized_layers_are_not_converted():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(3, 4)), {nn.LSTM})
    found = convert(model)
    assert found.converted == () and "it is quantized, a torch.ao.nn.quantized.dynamic" in found.skipped["0"]


def test_convert_back_undoes_convert():
    model = Tagger()
    plain = copy.deepcopy(model)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    parameters = list(model.parameters())
    convert(model, save="hidden", offload=full_device())
    model(torch.randn(2, 7, 3)).sum().backward()
    found = convert_back(model)
    assert found.model is model and found.converted == ("encoder.lstm", "shared") and found.skipped == {}
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    assert torch.equal(losses(model, optimizers[0]), losses(plain, optimizers[1]))


def test_convert_back_leaves_subclasses_and_takes_layers_that_were_ours():
    model = nn.Sequential(OwnFused(3, 4), fusedrnn.LSTM(3, 4), nn.LSTM(3, 4))
    found = convert_back(model)
    assert found.converted == ("1",) and [type(module) for module in model] == [OwnFused, nn.LSTM, nn.LSTM]
    assert list(found.skipped) == ["0"] and "OwnFused is a subclass" in found.skipped["0"]


def test_a_gru_changes_too():
    model = nn.Sequential(nn.GRU(3, 4, 2, bidirectional=True))
    original = copy.deepcopy(model[0]).double()
    assert convert(model, save="hidden").converted == ("0",)
    assert type(model[0]) is fusedrnn.GRU
    compare(model[0], original)
    assert convert_back(model).converted == ("0",) and type(model[0]) is nn.GRU
