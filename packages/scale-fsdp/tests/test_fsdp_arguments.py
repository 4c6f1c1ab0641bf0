from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from torch import nn

from scale_fsdp import FSDPModule, FullyShardedDataParallel, OffloadOptimizer, fully_shard, size_policy


@pytest.mark.parametrize(
    ("call", "given", "text"),
    [
        (
            fully_shard,
            {"reshard_after_forward": "yes"},
            "reshard_after_forward: expected a bool, a number of ranks",
        ),
        (fully_shard, {"sync_module_states": None}, "expected sync_module_states to be a bool, got None"),
        (fully_shard, {"limit_seconds": "60"}, r"expected limit_seconds to be a number or None, got '60' \(str\)"),
        (fully_shard, {"compute_device": "gpu"}, "expected compute_device to be a torch.device or its name"),
        (FullyShardedDataParallel, {"flatten_parameters": "false"}, "; write flatten_parameters=False"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(call: Any, given: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    with pytest.raises((TypeError, ValueError), match=text):
        call(model, **(given if call is FullyShardedDataParallel else shard_arguments(**given)))
    assert type(model) is nn.Sequential and not model._forward_pre_hooks and not model[0]._forward_pre_hooks
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_what_is_right_is_still_taken() -> None:
    given: Any
    for given in ({"flatten_parameters": 0}, {"limit_seconds": 60}, {"compute_device": torch.device("cpu")}):
        assert isinstance(fully_shard(nn.Linear(2, 2), **shard_arguments(**given)), FSDPModule)
    FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=None)  # type: ignore[arg-type]  # FSDP1's default.
    OffloadOptimizer(torch.optim.AdamW, (param for param in fully_shard(nn.Linear(2, 2)).parameters()))
    size_policy(1e8)
    for layer in fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)]):
        assert isinstance(layer, FSDPModule)
