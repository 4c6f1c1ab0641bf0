"""Functions of several results, and gradients of several tensors, on sharded tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import ShardedTensor, mark_sharded, set_shard

SHARD = Shard("weight", (4, 3), 0, 6, (Axis(Group(0, 2, ranks=(0, 1)), Placement.SHARD),))


def part() -> Tensor:
    return torch.arange(6.0).view(2, 3)


def test_each_of_several_results_is_sharded() -> None:
    mantissa, exponent = torch.frexp(mark_sharded(part(), SHARD))
    for found, expected in zip((mantissa, exponent), torch.frexp(part()), strict=True):
        assert isinstance(found, ShardedTensor) and found.shape == (4, 3)
        assert torch.equal(found.to_local(), expected)


def test_gradients_of_several_tensors_are_sharded_like_them() -> None:
    weight, scale = nn.Parameter(part()), nn.Parameter(torch.tensor(2.0))
    loss = (weight * scale).sum()
    set_shard(weight, SHARD)
    weight_grad, scale_grad = torch.autograd.grad(loss, [weight, scale])
    assert isinstance(weight_grad, ShardedTensor) and weight_grad.shape == (4, 3)
    assert torch.equal(weight_grad.to_local(), torch.full((2, 3), 2.0))
    assert type(scale_grad) is Tensor and scale_grad == 15
