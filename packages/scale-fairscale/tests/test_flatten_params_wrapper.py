"""`FlattenParamsWrapper`: the plain module's outputs, gradients and names, on flat parameters."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fairscale.nn import FlattenParamsWrapper
from fairscale.nn.misc.flatten_params_wrapper import FlatParameter


def model() -> nn.Sequential:
    torch.manual_seed(3)
    tied = nn.Linear(4, 4, bias=False)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), tied, nn.Linear(4, 4), nn.Linear(4, 2))
    layers[3].weight = tied.weight
    return layers


def test_it_trains_as_the_plain_module() -> None:
    plain, inputs = model(), torch.randn(5, 3)
    flat = FlattenParamsWrapper(model())
    assert [name for name, _ in flat.named_parameters()] == ["_fpw_module.flat_param_0"]
    assert flat.flat_param.numel() == sum(param.numel() for param in plain.parameters())
    for each in (plain, flat):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(inputs).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(dict(flat.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def test_state_dicts_of_both_forms_load_here_and_below_a_parent() -> None:
    plain = model()
    flat = FlattenParamsWrapper(model())
    assert list(flat.state_dict()) == list(plain.state_dict())
    assert "flat_param_0" in flat.flat_state_dict()
    saved = flat.flat_state_dict()
    saved["flat_param_0"] = torch.ones_like(saved["flat_param_0"])
    saved["flat_param"] = saved.pop("flat_param_0")  # as older versions had it
    flat.load_state_dict(saved)
    assert flat.flat_param.eq(1).all() and flat.is_flattened
    parent = nn.Sequential(flat)
    assert list(parent.state_dict()) == [f"0.{name}" for name in plain.state_dict()]
    assert flat.is_flattened
    parent.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    torch.testing.assert_close(dict(flat.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    assert flat.is_flattened
    with pytest.raises(RuntimeError, match="Unexpected key"):
        flat.load_state_dict({**plain.state_dict(), "other": torch.ones(1)})


def test_parameters_are_whole_inside_unflatten_params() -> None:
    flat = FlattenParamsWrapper(model())
    names = [name for name, _ in model().named_parameters()]
    with flat.unflatten_params():
        assert [name.removeprefix("_fpw_module.") for name, _ in flat.named_parameters()] == names
        assert flat[2].weight is flat[3].weight
        flat[0].weight.data.fill_(7)
    assert flat.flat_param[:12].eq(7).all()
    other = torch.arange(float(flat.flat_param.numel()))
    with flat.unflatten_params([other]):
        assert torch.equal(flat[0].weight, other[:12].view(4, 3))
    assert flat.flat_param[:12].eq(7).all()


def test_metadata_and_views_tell_what_a_flat_parameter_holds() -> None:
    flat = FlattenParamsWrapper(model())
    names, shapes, numels = flat.metadata(0)
    assert names[:2] == ["0.weight", "0.bias"] and shapes[0] == (4, 3) and numels[:2] == [12, 4]
    assert [view.shape for view in flat.get_param_views()] == list(shapes)
    with pytest.raises(ValueError, match="Incorrect numel of supplied data: got 3"):
        flat.get_param_views([torch.ones(3)])


def test_several_flat_parameters_have_names() -> None:
    layers = model()
    flat = FlattenParamsWrapper(layers, [list(layers[0].parameters()), [layers[4].bias]], ["first", "last"])
    assert [name for name, _ in flat.named_parameters() if "flat" in name] == [
        "_fpw_module.flat_param_first",
        "_fpw_module.flat_param_last",
    ]
    assert flat.num_params_managed == 3
    with pytest.raises(AttributeError, match="expected one flat parameter, got 2"):
        _ = flat.flat_param


def test_copies_and_pickles_are_modules_of_their_own() -> None:
    inputs = torch.randn(5, 3)
    flat = FlattenParamsWrapper(model()).eval()
    expected = flat(inputs)
    for copied in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))):
        assert torch.equal(copied(inputs), expected)
        assert copied.metadata(0) == flat.metadata(0)
        copied.flat_param.data.zero_()
        assert torch.equal(flat(inputs), expected) and not torch.equal(copied(inputs), expected)
    half = copy.deepcopy(flat).half()
    assert half.flat_param.dtype == torch.float16 and half(inputs.half()).dtype == torch.float16


def test_an_empty_module_stays_as_it_is() -> None:
    flat = FlattenParamsWrapper(nn.ReLU())
    assert not flat.is_flattened and flat.num_params_managed == 0
    assert torch.equal(flat(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    "params, message",
    [
        ([], "An non-empty list or tuple argument is needed"),
        ([torch.ones(2)], "List items need to be Parameter types"),
        ([FlatParameter([nn.Parameter(torch.ones(2))])], "Nesting FlatParameter is not supported"),
    ],
)
def test_a_flat_parameter_says_what_it_cannot_hold(params: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatParameter(params)  # type: ignore[arg-type]


def test_a_wrapper_says_what_it_cannot_flatten() -> None:
    layers = model()
    pair = [list(layers[0].parameters()), list(layers[4].parameters())]
    with pytest.raises(ValueError, match="Names and number of param lists must be equal"):
        FlattenParamsWrapper(layers, pair, ["one"])
    with pytest.raises(ValueError, match="Each flat param must be given a unique name"):
        FlattenParamsWrapper(layers, pair, ["one", "one"])
    with pytest.raises(ValueError, match="shared between lists"):
        FlattenParamsWrapper(layers, [pair[0], pair[0]])
    layers[0].bias.requires_grad_(False)
    with pytest.raises(AssertionError, match="expects all parameters to have same requires_grad"):
        FlattenParamsWrapper(layers)
