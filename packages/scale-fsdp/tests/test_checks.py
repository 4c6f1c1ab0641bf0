"""checks.py: what holds a unit's parameters refuses to compute with shards."""

import pytest
import torch
from fsdp_parity import noise, sharded
from torch import nn

from scale_fsdp import fully_shard


class Model(nn.Module):
    """A unit with parameters of its own, whose head is used past it as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(x * self.scale)


@pytest.mark.fault(85)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "past, words",
    [
        ("head", ["a Linear of the root unit", "(weight, bias)", "call the Model itself, model(...)"]),
        ("forward", ["a Model of the root unit", "(scale)"]),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_a_call_past_the_unit_is_refused(past, words, reshard):
    model = sharded(Model(), [""], reshard_after_forward=reshard)
    with pytest.raises(RuntimeError, match="outside of the unit's forward") as caught:
        model(noise(2, 3)), getattr(model, past)(noise(2, 3))
    assert all(word in str(caught.value) for word in words)
    model(noise(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.ranks(2)
def test_the_ways_out_that_the_error_names_work():
    plain = Model()
    expected = plain.head(noise(2, 3))
    model, head = sharded(plain, [""]), sharded(plain, ["head", ""])
    with torch.no_grad(), model.summon_full_params():
        for call in (model.head, lambda x: model.forward(x)):
            assert torch.allclose(call(noise(2, 3)), expected), "summoned: other numbers"
    assert torch.equal(head.head(noise(2, 3)), expected), "a unit of its own: other numbers"


def test_in_a_world_of_one_nothing_is_in_the_way():
    plain = Model()
    model = sharded(plain, [""])
    assert torch.equal(model.head(noise(2, 3)), plain.head(noise(2, 3)))
    assert torch.equal(model.forward(noise(2, 3)), plain(noise(2, 3)))


def test_a_conversion_to_what_the_shards_are_already_is_none():
    model = fully_shard(Model())
    assert model.float().cpu().to(torch.float32) is model
    model(noise(2, 3)).sum().backward()
