"""full_init.py: code that gives values to full parameters gives each rank its part of the same ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallelize_cases import llama, loss_of, tokens
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.shard import as_local
from scale_tp.conversion.parallelize import parallelize
from scale_tp.layers.full_init import init_as_full
from scale_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from scale_tp.parallel_state import destroy_model_parallel, initialize_model_parallel
from scale_tp.state_dict import full_state_dict
from scale_tp.weight_init import FullWeightProxy

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "reset": lambda model: [each.reset_parameters() for each in (model.up, model.down, model.words, model.wide)],
    "apply": lambda model: model.apply(_fill),
    "by name": lambda model: [nn.init.normal_(param, std=0.1) for param in model.parameters()],
    "a row, a norm, a decomposition": lambda model: _look(model),
}


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=7, device=device)
        self.wide = nn.Embedding(5, 6, device=device)
        self.up, self.down = nn.Linear(6, 9, device=device), nn.Linear(9, 6, device=device)


PLAN = {"words": "embedding_rowwise", "wide": "embedding_colwise", "up": "colwise", "down": "rowwise"}


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | ColumnParallelLinear | RowParallelLinear):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.03, b=0.03)
        module.bias.data.uniform_(-0.1, 0.1)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0, 0.5)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()


def _look(model: nn.Module) -> None:
    nn.init.orthogonal_(model.up.weight)
    nn.init.normal_(model.down.weight).mul_(2)
    model.down.weight.div_(model.down.weight.norm())
    nn.init.uniform_(model.words.weight, generator=torch.Generator().manual_seed(3))
    model.words.weight[3:5].fill_(1)
    for piece in model.wide.weight.split([2, 3]):
        nn.init.xavier_uniform_(piece)


@pytest.mark.ranks(3, in_turn=True)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", WAYS)
def test_a_divided_model_begins_with_its_part_of_the_full_values(way: str, device: str) -> None:
    plain, model, fill = Model(), Model(device), WAYS[way]
    torch.manual_seed(1)
    for param in plain.parameters():
        nn.init.normal_(param)
    parallelize(model, PLAN, group_of())
    if device == "meta":
        model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(2)
    with torch.no_grad():
        fill(plain)
    after = torch.rand(3)
    torch.manual_seed(2)
    model.zero_grad()
    parts = list(model.parameters())
    if way == "reset":
        fill(model)
    else:
        init_as_full(model, fill)
    assert torch.equal(torch.rand(3), after)
    assert all(one is other for one, other in zip(model.parameters(), parts, strict=True))
    torch.testing.assert_close(dict(full_state_dict(model)), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.ranks(3)
def test_a_llama_from_meta_begins_with_its_own_initialization() -> None:
    """And it learns as the plain one."""
    initialize_model_parallel(3)
    plain = llama(pad_token_id=3)
    with torch.device("meta"):
        model = llama(pad_token_id=3)
    parallelize(model).to_empty(device="cpu")
    model.load_state_dict({name: torch.full_like(value, 9.0) for name, value in plain.state_dict().items()})
    for language_model in (plain, model):
        for module in language_model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(4)
    plain.apply(plain._init_weights)
    torch.manual_seed(4)
    init_as_full(model, lambda model: model.apply(model._init_weights))
    state = full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    data = tokens(0)
    torch.testing.assert_close(loss_of(model(data).logits, data), loss_of(plain(data).logits, data))
    destroy_model_parallel()


@pytest.mark.ranks(3, in_turn=True)
@pytest.mark.parametrize("by", ["apply", "reset_parameters"])
def test_divided_layers_begin_with_the_values_of_full_ones(by: str) -> None:
    """Of the model's axis."""
    initialize_model_parallel(3)

    def build(group: Group | None) -> nn.Sequential:
        column = ColumnParallelLinear(5, 7, process_group=group)
        return nn.Sequential(column, RowParallelLinear(7, 5, process_group=group))

    def fill(model: nn.Module) -> object:
        return model.apply(_fill) if by == "apply" else [layer.reset_parameters() for layer in model]

    layers, full = build(None), build(Group())
    for model in (layers, full):
        torch.manual_seed(5)
        init_as_full(model, fill)
    state = full_state_dict(layers)
    assert all(torch.equal(state[name], value) for name, value in full.state_dict().items())
    destroy_model_parallel()


TWO = Group(1, 2, None, "fake", (0, 1))


def test_what_can_not_be_filled_leaves_the_model_as_it_was() -> None:
    layer = ColumnParallelLinear(4, 6, process_group=TWO)
    weight = layer.weight

    def replaces(layer: nn.Module) -> None:
        layer.weight = nn.Parameter(torch.zeros(6, 4))

    with pytest.raises(ValueError, match=r"fill parameters in place.*ColumnParallelLinear.weight"):
        init_as_full(layer, replaces)
    assert layer.weight is weight

    def fails(layer: nn.Module) -> None:
        raise RuntimeError("no values")

    with pytest.raises(RuntimeError, match="no values"):
        init_as_full(layer, fails)
    assert layer.weight is weight
    with pytest.raises(TypeError, match="init_as_full\\(model, lambda model"):
        init_as_full(layer, None)  # type: ignore[arg-type]
    with as_local():
        layer.weight.data = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="before fully_shard"):
        init_as_full(layer, fails)


def test_what_other_ranks_have_is_not_made_up() -> None:
    """A function that reads what it has not written sees that it can't."""
    layer, seen = ColumnParallelLinear(2, 4, bias=False, process_group=TWO), []

    def reads(layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, FullWeightProxy) and isinstance(weight, Tensor)
        seen.append(weight.mul_(2).sum(1))

    own = layer.weight.to_local().detach().clone()
    init_as_full(layer, reads)
    assert seen[0][:2].isnan().all() and torch.equal(seen[0][2:], (own * 2).sum(1))
    assert torch.equal(layer.weight.to_local(), own * 2)
