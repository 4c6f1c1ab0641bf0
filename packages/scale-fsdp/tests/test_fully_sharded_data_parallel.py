"""`FullyShardedDataParallel` is a thin module around a sharded one, as FairScale's users construct and unwrap it."""

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import noise
from torch import nn

from scale_check.exact import assert_equal
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from scale_fsdp.api import UnitPrecision
from scale_fsdp.runtime.unit import unit_of, units_in


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.answer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 42

    def forward(self, x):
        return self.layers(x)

    def twice(self, x):
        return 2 * x


def test_it_unwraps_and_hands_attributes_on():
    module = Model()
    model = FullyShardedDataParallel(module)
    assert model.module is module
    assert model.answer == 42
    assert model.twice(3) == 6
    assert isinstance(model.layers, nn.Sequential)
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    sequential = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert isinstance(sequential[1], nn.ReLU)


def test_it_may_be_subclassed():
    class Mine(FullyShardedDataParallel):
        def forward(self, x):
            return super().forward(x) + 1

    plain = Model()
    x = noise(2, 3)
    expected = plain(x) + 1
    model = Mine(plain, mixed_precision=False)
    assert torch.equal(model(x), expected)
    assert type(model) is Mine


def test_the_first_arguments_may_be_positional_as_in_fairscale():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(Model(), None, False, policy, True)
    unit = unit_of(model.module)
    assert unit.reshard_after_forward is False
    assert unit.precision == UnitPrecision(param_dtype=torch.bfloat16)
    assert unit.buffers[0].flatten
    assert [name for name, _ in model.named_parameters()] == ["flat_param_0"]


def test_fairscales_own_tuning_arguments_warn_and_change_nothing():
    with pytest.warns(UserWarning, match="bucket_cap_mb, verbose"):
        model = FullyShardedDataParallel(Model(), bucket_cap_mb=25, verbose=True)
    assert_equal(model, Model())


@pytest.mark.parametrize("name", ["cpu_offload", "move_params_to_cpu", "move_grads_to_cpu"])
def test_fairscales_arguments_for_offloading_are_taken(name):
    for value in (False, True):
        model = FullyShardedDataParallel(Model(), **{name: value})
        assert_equal(model, Model())
        placement = unit_of(model.module).options.placement
        assert (placement.params_on_host, placement.grads_on_host) == (value and name != "move_grads_to_cpu", value)


def test_other_options_of_fairscale_may_only_be_declined():
    model = FullyShardedDataParallel(Model(), force_input_to_fp32=False)
    assert_equal(model, Model())
    message = r"force_input_to_fp32=.*mixed_precision=MixedPrecisionPolicy\(param_dtype=torch.float32\)"
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallel(Model(), force_input_to_fp32=True)


@pytest.mark.fault(91)
def test_an_unknown_argument_names_the_nearest_known_one():
    with pytest.raises(TypeError, match=r"'mixed_precison'; did you mean 'mixed_precision'"):
        FullyShardedDataParallel(Model(), mixed_precison=True)
    with pytest.raises(TypeError, match=r"'nonsense'; there are 'atom'"):
        FullyShardedDataParallel(Model(), nonsense=True)


@pytest.mark.ranks(1, 2)
def test_wrappers_nest_under_the_names_of_the_plain_model():
    plain, model = Model(), Model()
    model.layers[0] = FullyShardedDataParallel(model.layers[0])
    model.layers[1] = FullyShardedDataParallel(fully_shard(model.layers[1]))
    model.layers = FullyShardedDataParallel(FullyShardedDataParallel(model.layers))
    model = FullyShardedDataParallel(model)
    expected = [name for name, _ in plain.named_parameters()]
    assert (model.rank, model.world_size) == (dist.get_rank(), dist.get_world_size())
    assert model.process_group is dist.group.WORLD, "another group"
    assert [name for name, _ in model.named_parameters()] == expected
    assert [name for name, _ in model.named_parameters(prefix="a")] == [f"a.{name}" for name in expected]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(noise(4, 3, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with model.no_sync():
        model(noise(4, 3)).sum().backward()
    with model.summon_full_params():
        for name, param in model.named_parameters():
            assert param.shape == plain.get_parameter(name).shape, name
    assert_equal(model, plain)


def test_what_fairscales_users_read_of_it_is_there():
    model = FullyShardedDataParallel(
        Model(), reshard_after_forward=False, mixed_precision=True, flatten_parameters=True
    )
    assert (model.rank, model.world_size, model.process_group) == (0, 1, None)
    assert (model.flatten_parameters, model.reshard_after_forward, model.mixed_precision) == (True, False, True)
    model = FullyShardedDataParallel(Model())
    assert (model.flatten_parameters, model.reshard_after_forward, model.mixed_precision) == (False, True, False)


def test_around_a_unit_it_adds_nothing_and_can_change_nothing():
    module = fully_shard(Model(), reshard_after_forward=False)
    model = FullyShardedDataParallel(module)
    assert model.module is module
    assert units_in(model) == [unit_of(module)]
    assert_equal(model, Model())
    told = r"Model is sharded already.*give reshard_after_forward=1, limit_seconds=3.0 to the fully_shard\(\.\.\.\)"
    with pytest.raises(ValueError, match=told):
        FullyShardedDataParallel(module, reshard_after_forward=1, limit_seconds=3.0, init=None)


def test_modes_reach_the_module():
    model = FullyShardedDataParallel(Model())
    assert not model.eval().module.layers.training
    assert model.train().module.layers.training
    assert sum(1 for _ in model.parameters()) == 4
    assert next(iter(model.children())) is model.module


def test_an_unfinished_wrapper_does_not_recurse():
    with pytest.raises(AttributeError):
        _ = FullyShardedDataParallel.__new__(FullyShardedDataParallel).module
