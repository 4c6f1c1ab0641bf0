"""What is put into a sharded model is refused at the line that does so; swapped memory, at the next forward."""

import pytest
import torch
from fsdp_beside import noise
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, fully_shard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Identity())
        self.head = nn.Linear(4, 11, bias=False)
        self.recurrent = nn.LSTM(4, 4)

    def forward(self, ids):
        return self.head(self.recurrent(self.body(self.embed(ids)))[0])


def model(flatten: bool = False) -> nn.Module:
    whole = Model()
    fully_shard(whole.body[0])
    return fully_shard(whole, flatten_parameters=flatten)


def run(whole: nn.Module) -> None:
    whole(torch.arange(5)).sum().backward()


ASSIGNMENTS = {
    "tie": (lambda m: setattr(m.head, "weight", m.embed.weight), "'head.weight' was given another parameter"),
    "assign": (lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(11, 4))), "assign it, or tie it, before"),
    "in a unit": (
        lambda m: setattr(m.body[0], "bias", nn.Parameter(torch.ones(4))),
        "'body.0.bias' was given another parameter after unit 'body.0' was sharded",
    ),
    "add": (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))), "'more' was given another parameter"),
    "replace": (lambda m: setattr(m, "embed", nn.Embedding(12, 4)), "'embed' was given a new Embedding"),
    "replace in a list": (lambda m: m.body.__setitem__(2, nn.Linear(4, 4)), "'body.2' was given a new Linear"),
    "add a module": (lambda m: m.body.add_module("adapter", nn.Linear(4, 4)), "'body.adapter' was given a new Linear"),
    "convert": (nn.SyncBatchNorm.convert_sync_batchnorm, "'body.1' was given a new SyncBatchNorm"),
    "parametrize": (
        lambda m: nn.utils.parametrizations.weight_norm(m.head),
        "'head.parametrizations.weight' was given a new",
    ),
}


@pytest.mark.parametrize("how", ASSIGNMENTS)
def test_parameters_and_modules_are_not_replaced_in_a_sharded_model(how):
    change, expected = ASSIGNMENTS[how]
    whole = model()
    with pytest.raises(RuntimeError, match=expected):
        change(whole)


def test_what_brings_no_parameters_may_be_put_in():
    whole = model()
    whole.body[2] = nn.Tanh()
    whole.head.weight = whole.head.weight
    whole.alias = whole.embed
    whole.extra = None
    whole.register_buffer("table", torch.ones(2))
    run(whole)


def test_modules_may_be_put_in_until_what_is_around_them_is_sharded():
    whole = Model()
    fully_shard(whole.body[0])
    whole.body[2] = nn.Linear(4, 4)
    whole.head = FullyShardedDataParallel(whole.head)
    run(fully_shard(whole))


@pytest.mark.parametrize("flatten", [True, False])
def test_a_module_that_sets_its_own_weights_is_left_alone(flatten):
    whole = model(flatten)
    run(whole)
    with whole.summon_full_params():
        assert whole.recurrent.weight_ih_l0.shape == (16, 4)
    run(whole)


def swap_memory(name: str) -> str:
    whole = model()
    run(whole)
    param = whole.get_parameter(name)
    param.data = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match="has got other memory since it was sharded") as caught:
        run(whole)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["embed.weight", "body.0.weight"])
def test_memory_that_was_swapped_is_found_by_the_next_forward(world, name):
    for message in run_ranks(swap_memory, world, name):
        assert message.startswith(f"'{name}' of ")
        assert "param.copy_(values)" in message


def test_values_may_be_written_in_place():
    whole = model()
    with torch.no_grad():
        for param in whole.parameters():
            param.copy_(torch.ones_like(param))
    whole.load_state_dict(whole.state_dict())
    whole.float()
    run(whole)
    assert noise(1).shape == (1,)
