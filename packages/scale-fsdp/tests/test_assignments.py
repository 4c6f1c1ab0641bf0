"""What is put into a sharded model, and memory that was swapped, is refused by the next forward."""

import copy

import pytest
import torch
from torch import nn

from scale_fsdp import FullyShardedDataParallel, ShardOptions, full_state_dict, fully_shard, reshard_to


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
    return fully_shard(whole, options=ShardOptions(flatten_parameters=flatten))


def run(whole: nn.Module) -> None:
    whole(torch.arange(5)).sum().backward()


ASSIGNMENTS = {
    "tie": (
        lambda m: setattr(m.head, "weight", m.embed.weight),
        "'head.weight' was replaced by a different tensor, by an assign",
    ),
    "assign": (lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(11, 4))), "assign or tie it before"),
    "in a unit": (
        lambda m: setattr(m.body[0], "bias", nn.Parameter(torch.ones(4))),
        "'body.0.bias' was replaced by a different tensor, by an assignment .* unit 'body.0' would",
    ),
    "add": (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))), "'more' was put into the root unit"),
    "where there was none": (
        lambda m: setattr(m.head, "bias", nn.Parameter(torch.ones(11))),
        "'head.bias' was put into the root unit",
    ),
    "replace": (lambda m: setattr(m, "embed", nn.Embedding(12, 4)), "'embed.weight' was put into the root unit"),
    "replace a unit": (
        lambda m: m.body.__setitem__(0, nn.Linear(4, 4)),
        "'body.0.weight' was put into the root unit after that was sharded",
    ),
    "replace in a list": (lambda m: m.body.__setitem__(2, nn.Linear(4, 4)), "'body.2.weight' was put into the root"),
    "add a module": (
        lambda m: m.body.add_module("adapter", nn.Linear(4, 4)),
        "'body.adapter.weight' was put into .* change the model .* before fully_shard",
    ),
    "convert": (nn.SyncBatchNorm.convert_sync_batchnorm, "'body.1.weight' was put into the root unit"),
    "parametrize": (
        lambda m: nn.utils.parametrizations.weight_norm(m.head),
        "'head.parametrizations.weight.original0' was put into",
    ),
}


@pytest.mark.parametrize("how", ASSIGNMENTS)
def test_what_is_put_into_a_sharded_model_fails_the_next_forward(how):
    change, expected = ASSIGNMENTS[how]
    for has_run in (False, True):
        whole = model()
        if has_run:
            run(whole)
        change(whole)
        with pytest.raises(RuntimeError, match=expected):
            run(whole)


def test_a_copy_of_a_sharded_model_finds_what_is_put_into_it():
    whole = model()
    run(whole)
    copied = copy.deepcopy(whole)
    run(copied)
    copied.body.add_module("adapter", nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"'body.adapter.weight' was put into the root unit"):
        run(copied)
    run(whole)


REPLACERS = {
    "summon_full_params": lambda m: m.summon_full_params().__enter__(),
    "apply": lambda m: m.apply(lambda module: None),
    "unshard": lambda m: m.body[0].unshard(),
    "to": lambda m: m.to(torch.float64),
    "state_dict": lambda m: m.state_dict(),
    "full_state_dict": full_state_dict,
    "local_state_dict": lambda m: m.local_state_dict(),
    "reshard_to": lambda m: reshard_to(m, reshard_after_forward=False),
    "forward": run,
}


@pytest.mark.parametrize("how", REPLACERS)
@pytest.mark.ranks(2, in_turn=True)
def test_an_assigned_parameter_is_found_before_it_is_replaced(how):
    whole = model()
    run(whole)
    whole.body[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match=r"'body.0.weight' was replaced by a different tensor, by an assign"):
        REPLACERS[how](whole)


@pytest.mark.parametrize("how", ["summon_full_params", "apply", "unshard", "forward"])
@pytest.mark.ranks(1, 2, in_turn=True)
def test_a_parameter_assigned_while_its_unit_is_full_is_found(how):
    def assign(module: nn.Module) -> None:
        module.head.weight = nn.Parameter(torch.ones(11, 4))

    whole = model()
    run(whole)
    with pytest.raises(RuntimeError, match=r"'head.weight' was replaced by a different tensor, by an assign"):
        if how == "summon_full_params":
            with whole.summon_full_params():
                assign(whole)
        elif how == "apply":
            whole.apply(lambda module: assign(module) if module is whole else None)
        elif how == "unshard":
            whole.unshard()
            assign(whole)
            whole.reshard()
        else:
            whole.recurrent.register_forward_hook(lambda *_: assign(whole))
            run(whole)


def test_what_brings_no_parameters_may_be_put_in():
    whole = model()
    whole.body[2] = nn.Tanh()
    whole.head.weight = whole.head.weight
    whole.alias = whole.embed
    whole.extra = None
    whole.register_buffer("table", torch.ones(2))
    run(whole)


def test_modules_may_be_put_in_until_their_parent_is_sharded():
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


@pytest.mark.parametrize("name", ["embed.weight", "body.0.weight"])
@pytest.mark.ranks(1, in_turn=True)
def test_memory_that_was_swapped_is_found_by_the_next_forward(name):
    whole = model()
    run(whole)
    param = whole.get_parameter(name)
    param.data = torch.zeros_like(param)
    with pytest.raises(
        RuntimeError, match=rf"(?s)^'{name}' of .*has different memory than when it was sharded.*param\.copy_\(values\)"
    ):
        run(whole)


@pytest.mark.ranks(2)
def test_data_of_shards_may_be_assigned():
    whole = model()
    for param in whole.parameters():
        values = torch.arange(param.numel(), dtype=param.dtype).view(param.shape)
        param.data = values  # In the full shape, as of a plain parameter.
        assert torch.equal(param.full_tensor(), values)
        param.data = torch.zeros_like(param)
        assert not param.any()
    run(whole)


def test_values_may_be_written_in_place():
    whole = model()
    with torch.no_grad():
        for param in whole.parameters():
            param.copy_(torch.ones_like(param))
    whole.load_state_dict(whole.state_dict())
    whole.float()
    run(whole)
