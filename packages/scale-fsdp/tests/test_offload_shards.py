"""An OffloadOptimizer on the local shards of a sharded model: the numbers, the norm and the state of the plain one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import offload_cases as cases
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadOptimizer, ShardOptions, fully_shard
from scale_fsdp.offload.backward import ConsumedGradient

STEPS = 4
Pair = tuple[nn.Module, torch.optim.Optimizer]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 17), nn.ReLU(), nn.Linear(17, 5), nn.LayerNorm(5))


def sharded(flatten: bool = False) -> nn.Module:
    built = model()
    for layer in (built[0], built[2]):
        fully_shard(layer, options=ShardOptions(flatten_parameters=flatten))
    return fully_shard(built, options=ShardOptions(flatten_parameters=flatten))


def backward(each: nn.Module, step: int) -> None:
    """A batch for each rank."""
    generator = torch.Generator().manual_seed(10 * step + group_of().rank)
    x = torch.randn(6, 9, generator=generator)
    each(x).square().mean().backward()


def adam(each: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(each.parameters(), lr=0.01, fused=fused)


def offloaded(each: nn.Module, fused: bool, **kwargs: Any) -> OffloadOptimizer:
    return OffloadOptimizer(torch.optim.Adam, each.parameters(), lr=0.01, fused=fused, **kwargs)


def train_both(mine: Pair, theirs: Pair, steps: range = range(STEPS)) -> None:
    """Takes the steps with both models and their optimizers, and compares the weights."""
    for step in steps:
        for each, optimizer in (mine, theirs):
            backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(mine[0], theirs[0])


@pytest.mark.ranks(0, 2)
def test_it_steps_on_shards_as_without_offload() -> None:
    for flatten, fraction, overlap_step in itertools.product((False, True), (0.4, 1.0), (False, True)):
        mine, theirs = sharded(flatten), sharded(flatten)
        ours = offloaded(mine, not flatten, host_fraction=fraction, overlap_step=overlap_step)
        train_both((mine, ours), (theirs, adam(theirs, not flatten)))


@pytest.mark.ranks(0, 2)
def test_it_clips_and_scales_over_all_ranks() -> None:
    """With a scaler, and in half precision without one."""
    for half in (False, True):
        mine, theirs = (fully_shard(model().bfloat16()) if half else sharded() for _ in range(2))
        ours, other = offloaded(mine, True, host_fraction=0.5), adam(theirs, True)
        scalers = [ShardedGradScaler(init_scale=64.0, enabled=not half) for _ in range(2)]
        for step in range(STEPS):
            x = torch.randn(6, 9, generator=torch.Generator().manual_seed(step)).to(mine[0].weight.dtype)
            for each, optimizer, scaler in ((mine, ours, scalers[0]), (theirs, other, scalers[1])):
                scaler.scale(each(x).float().square().mean()).backward()
                scaler.unscale_(optimizer)
            max_norm = 0.01 if half else 0.05
            assert torch.equal(ours.clip_grad_norm_(max_norm), clip_grad_norm_(theirs.parameters(), max_norm))
            for optimizer, scaler in ((ours, scalers[0]), (other, scalers[1])):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert_equal(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_it_steps_on_shards_that_are_on_the_host() -> None:
    """ "cpu:0" is the host under another name, so that shards and gradients move; computed with in bf16."""
    policies: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(),
        "options": ShardOptions(compute_device="cpu:0"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for overlap_step in (False, True):
        mine, theirs = (fully_shard(model(), **policies) for _ in range(2))
        ours = offloaded(mine, True, host_fraction=0.5, overlap_step=overlap_step)
        train_both((mine, ours), (theirs, adam(theirs, True)))


@pytest.mark.ranks(0, 2)
def test_a_shard_is_updated_when_its_reduction_is_reported() -> None:
    """The engine tells when reductions have ended: the update has been made when the backward pass returns."""
    mine, theirs = sharded(), sharded()
    ours, other = offloaded(mine, True, host_fraction=0.5, overlap_step=True), adam(theirs, True)
    for step in range(STEPS):
        backward(mine, step)
        backward(theirs, step)
        other.step()
        other.zero_grad()
        assert_equal(mine, theirs)
        assert all(isinstance(shard.grad, ConsumedGradient) for shard in mine.parameters())
        ours.step()
        assert_equal(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_the_state_of_shards_is_kept_by_name() -> None:
    mine, theirs, again = sharded(), sharded(), sharded()
    ours, other = offloaded(mine, False, host_fraction=0.5), adam(theirs, False)
    train_both((mine, ours), (theirs, other), range(2))
    saved, plain = sharded_state_dict(mine, ours), sharded_state_dict(theirs, other)
    assert_equal(*({key: getattr(value, "tensor", value) for key, value in state.items()} for state in (saved, plain)))
    its = offloaded(again, False, host_fraction=0.8)
    load_sharded_state_dict(copy.deepcopy(plain), again, its)
    train_both((again, its), (theirs, other), range(2, STEPS))


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_under_ddp_gradients_are_those_of_all_ranks(away: bool) -> None:
    """DDP reduces gradients after autograd has told of them: early copies are seen to be none."""
    if away:
        cases.let_parameters_be_away(pytest.MonkeyPatch())  # For the rest of the rank's life.
    mine, theirs = DistributedDataParallel(model()), DistributedDataParallel(model())
    train_both((mine, offloaded(mine, True, host_fraction=0.5)), (theirs, adam(theirs, True)))
    overlapped = offloaded(mine, True, host_fraction=0.5, overlap_step=True)
    with pytest.raises(RuntimeError, match="was used for its update during the backward pass"):
        backward(mine, 0)
    del overlapped
