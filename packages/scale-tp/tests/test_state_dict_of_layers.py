"""Writes to the state dict of divided layers reach this rank's shards; tied layers have one tensor in it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from scale_core.comm.group import group_of
from scale_tp import full_state_dict, parallelize

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise", "second_head": "colwise"}


class Net(nn.Module):
    """Layers that are divided by rows, by columns and not at all, and a tied weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.norm = nn.Linear(4, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.head, self.second_head = nn.Linear(5, 6), nn.Linear(5, 6)
        self.second_head.weight = self.head.weight
        self.double()


def divided(seed: int = 0) -> nn.Module:
    return parallelize(Net(seed), PLAN, group_of())


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    others = expected.state_dict()
    return [name for name, value in model.state_dict().items() if not torch.equal(value, others[name])]


@torch.no_grad()
def change(average: nn.Module, model: nn.Module) -> None:
    new = model.state_dict()
    for name, value in average.state_dict().items():
        if value.dtype.is_floating_point:
            value *= 0.5
            value += 0.5 * new[name].detach()
    state = average.state_dict()
    state["up.weight"][3:5] = 0
    state["down.weight"][:, 2:4].neg_()
    torch._foreach_add_([state["head.bias"], state["down.bias"]], 1.0)
    state["second_head.weight"].data.mul_(2)


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_averages_through_the_state_are_those_of_plain_pytorch(world):
    expected, model = Net(0), divided(0)
    change(expected, Net(1))
    change(model, divided(1))
    assert not differences(model, expected)


@pytest.mark.ranks(2)
def test_tied_layers_share_a_tensor_and_copies_do_not_write():
    """Tied names share a tensor, also in a given destination; files and copies are plain."""
    model = divided()
    state = model.state_dict()
    assert state["head.weight"] is state["second_head.weight"]
    with torch.no_grad():
        model.up.weight.zero_()
    model.state_dict(destination=state)
    assert not state["up.weight"].any()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    for copied in (loaded, copy.deepcopy(state), full_state_dict(model), get_model_state_dict(model, options=options)):
        for name in ("up.weight", "down.weight", "head.bias"):
            copied[name].fill_(7)
    expected = Net()
    with torch.no_grad():
        expected.up.weight.zero_()
    assert {type(value) for value in loaded.values()} == {Tensor}
    assert not differences(model, expected)


@pytest.mark.ranks(2)
def test_a_state_from_before_a_step_is_not_written_back():
    model = divided()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = model.state_dict()
    model.up(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"'up\.weight' of a state dict was written to"):
        state["up.weight"].zero_()
