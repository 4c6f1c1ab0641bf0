"""One value that says how modules are sharded."""

import dataclasses

import pytest
import torch
from torch import nn

from scale_fsdp import FSDPConfig, FullyShardedDataParallel, MixedPrecision, fully_shard
from scale_fsdp.unit import unit_of


def test_only_what_differs_from_the_defaults_is_passed_on():
    assert FSDPConfig().as_kwargs() == {}
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    config = FSDPConfig(False, move_params_to_cpu=True, move_grads_to_cpu=False, mixed_precision=policy)
    assert config.as_kwargs() == {
        "reshard_after_forward": False,
        "move_params_to_cpu": True,
        "move_grads_to_cpu": False,
        "mixed_precision": policy,
    }


def test_it_wraps_a_module_as_it_says():
    linear = nn.Linear(3, 4)
    model = FSDPConfig(reshard_after_forward=False).wrap(linear)
    assert isinstance(model, FullyShardedDataParallel) and model.module is linear
    assert unit_of(linear).reshard_after_forward is False
    inner = fully_shard(nn.Linear(3, 4), **FSDPConfig(mixed_precision=True).as_kwargs())
    assert unit_of(inner).buffers[0].compute_dtype is torch.float16


def test_it_is_a_value():
    assert FSDPConfig() == FSDPConfig() and len({FSDPConfig(), FSDPConfig(), FSDPConfig(False)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        FSDPConfig().mixed_precision = True
    assert dataclasses.replace(FSDPConfig(), move_params_to_cpu=True).as_kwargs() == {"move_params_to_cpu": True}


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("reshard_after_forward", "false", "expected a bool, got 'false'; write reshard_after_forward=True"),
        ("move_params_to_cpu", None, "expected a bool, got None"),
        ("move_grads_to_cpu", 1, "expected a bool or None, got 1"),
        ("mixed_precision", torch.float16, r"expected a bool or a MixedPrecision, got torch.float16"),
    ],
)
def test_what_a_file_has_spelled_wrong_is_refused_by_name(name, value, expected):
    with pytest.raises(TypeError, match=rf"FSDPConfig\({name}=...\): {expected}"):
        FSDPConfig(**{name: value})
