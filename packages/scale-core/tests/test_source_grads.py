"""Gradients by the rank whose samples they are of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.hooks.source_grads import (
    call_source_grad_hooks,
    has_source_grad_hooks,
    mark_averaged,
    register_source_grad_hook,
    source_group,
    with_source_grads,
)
from scale_core.optim.step_checks import register_unsharded, sharded_param_of
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard

TWO = Group(0, 2, None, "fake", (0, 1))


def test_each_use_is_reported_with_its_gradient() -> None:
    param, seen = nn.Parameter(torch.tensor([2.0, 3.0])), list[tuple[Tensor, list[float], int]]()
    assert not has_source_grad_hooks()
    handle = register_source_grad_hook(lambda param, grad, source: seen.append((param, grad.tolist(), source)))
    assert has_source_grad_hooks()
    halves = [with_source_grads(param * 0.5, param, source) for source in (0, 1)]
    assert all(torch.equal(half, param * 0.5) for half in halves)
    (halves[0].sum() + (halves[1] * torch.tensor([5.0, 7.0])).sum()).backward()
    assert sorted(each[1:] for each in seen) == [([1.0, 1.0], 0), ([5.0, 7.0], 1)]
    assert all(each[0] is param for each in seen)
    assert param.grad is not None and param.grad.tolist() == [3.0, 4.0]
    handle.remove()
    assert not has_source_grad_hooks()
    call_source_grad_hooks(param, torch.ones(2), 0)
    assert len(seen) == 2


def test_parameters_say_whose_samples_their_gradients_are_of() -> None:
    plain, averaged, experts, divided = (nn.Parameter(torch.ones(2, 2)) for _ in range(4))
    mark_averaged(averaged, TWO)
    axis = Axis(TWO, Placement.SHARD)
    set_shard(divided, Shard("tensor parallel", (4, 2), 0, 4, (axis,)))
    data = Axis(Group(0, 3, None, "fake", (0, 2, 4)), Placement.SHARD)
    set_shard(experts, Shard("experts", (4, 2), 0, 4, (data, Axis(TWO, Placement.SHARD, num_sources=2))))
    assert source_group(plain) is source_group(divided) is None
    assert source_group(averaged) == source_group(experts) == TWO


class Owner:
    """As a flat buffer."""

    def __init__(self, shards: list[Tensor]) -> None:
        self.shards = shards

    def sharded_param(self, index: int) -> Tensor:
        return self.shards[index]


def test_an_unsharded_parameter_is_found_as_its_shard() -> None:
    whole, shards = [torch.ones(4), torch.ones(6)], [torch.ones(2), torch.ones(3)]
    owner = Owner(shards)
    register_unsharded(whole, owner)
    assert sharded_param_of(whole[1]) is shards[1] and sharded_param_of(shards[0]) is shards[0]
    del owner
    assert sharded_param_of(whole[0]) is whole[0]
