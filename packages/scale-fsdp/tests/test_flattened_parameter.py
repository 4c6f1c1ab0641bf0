"""flattened_parameter.py: what stands in the module tree where a parameter is a part of a flat tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from through_a_file import through_a_file
from torch import Tensor, nn

from scale_fsdp import FullyShardedDataParallel, ShardOptions, fully_shard
from scale_fsdp.runtime.flattened_parameter import FlattenedParameter


class Block(nn.Module):
    """Asks whether its layer has a bias; and has an LSTM, which lists its weights itself."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(3, 3, bias=bias), nn.LSTM(3, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.layer.weight.t()
        return self.memory(x if self.layer.bias is None else x + self.layer.bias)[0]


@pytest.mark.ranks(2)
def test_a_part_of_a_flat_parameter_is_there_without_values() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(bias=True), Block(bias=False))
    model = copy.deepcopy(plain)
    fully_shard(model[0], options=ShardOptions(flatten_parameters=True))
    fully_shard(model, options=ShardOptions(flatten_parameters=True))
    x = torch.randn(4, 3)
    for _ in range(2):
        found = model(x)
        assert torch.equal(found, plain(x))
        found.sum().backward()
    with model.summon_full_params():
        assert torch.equal(model[0].layer.weight, plain[0].layer.weight)
    assert "bias=True" in repr(model[0].layer) and "bias=False" in repr(model[1].layer)
    for block, its in ((model[0], plain[0]), (model[1], plain[1])):
        assert {name for name, _ in block.named_parameters()} <= {"flat_param_0"}
        assert (block.layer.bias is None) is (its.layer.bias is None)
        weight = block.layer.weight
        assert isinstance(weight, FlattenedParameter) and block.layer.get_submodule("").weight is weight
        assert (weight.shape, weight.ndim, weight.dtype, weight.requires_grad) == ((3, 3), 2, torch.float32, True)
    model.requires_grad_(False)
    assert not model[0].layer.bias.requires_grad
    assert repr(model[0].layer.bias) == "FlattenedParameter('0.layer.bias', shape=(3,))"
    words = r"'0.layer.bias' .*of '0.flat_param_0', since.*flatten_parameters=True.*with model.summon_full_params\(\)"
    for use in (
        lambda bias: bias.data.zero_(),
        nn.init.zeros_,
        lambda bias: torch.ones(3) + bias,
        lambda bias: torch.nn.functional.linear(torch.ones(3), torch.ones(3, 3), bias=bias),
    ):
        with pytest.raises((AttributeError, RuntimeError), match=words):
            use(model[0].layer.bias)
    copied = copy.deepcopy(model)
    for again in (copied, through_a_file(model, weights_only=False)):
        assert torch.equal(again(x), plain(x)) and "bias=True" in repr(again[0].layer)
        assert again[0].layer.weight._buffer is not model[0].layer.weight._buffer
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    fully_shard(tied, options=ShardOptions(flatten_parameters=True))(x)
    assert tied[1].weight is tied[0].weight and tied[1].bias is not tied[0].bias
    wrapped = FullyShardedDataParallel(nn.Linear(3, 3), flatten_parameters=True)
    assert "bias=True" in repr(wrapped) and wrapped.module.bias is not None
