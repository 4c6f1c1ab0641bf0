"""An OffloadOptimizer on the local shards of a sharded model: the numbers, the norm and the state of the plain one."""

from __future__ import annotations

import copy
from typing import Any

import offload_cases as cases
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.group import group_of
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadOptimizer, ShardOptions, fully_shard
from scale_fsdp.offload.backward import ConsumedGradient

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 17), nn.ReLU(), nn.Linear(17, 5), nn.LayerNorm(5))


def sharded(flatten: bool = False) -> nn.Module:
    built = model()
    for layer in (built[0], built[2]):
        fully_shard(layer, options=ShardOptions(flatten_parameters=flatten))
    return fully_shard(built, options=ShardOptions(flatten_parameters=flatten))


def backward(each: nn.Module, step: int) -> None:
    """A batch for each rank, and one step in which the last layer is not used."""
    generator = torch.Generator().manual_seed(10 * step + group_of().rank)
    x = torch.randn(6, 9, generator=generator)
    each(x).square().mean().backward()


def adam(each: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(each.parameters(), lr=0.01, fused=fused)


def offloaded(each: nn.Module, fused: bool, **kwargs: Any) -> OffloadOptimizer:
    return OffloadOptimizer(torch.optim.Adam, each.parameters(), lr=0.01, fused=fused, **kwargs)


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_it_steps_on_shards_as_without_offload() -> None:
    for flatten in (False, True):
        for fraction in (0.4, 1.0):
            for overlap_step in (False, True):
                mine, theirs = sharded(flatten), sharded(flatten)
                ours = offloaded(mine, not flatten, host_fraction=fraction, overlap_step=overlap_step)
                other = adam(theirs, not flatten)
                for step in range(STEPS):
                    for each, optimizer in ((mine, ours), (theirs, other)):
                        backward(each, step)
                        optimizer.step()
                        optimizer.zero_grad()
                assert_alike(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_it_clips_and_scales_over_all_ranks() -> None:
    mine, theirs = sharded(), sharded()
    ours, other = offloaded(mine, True, host_fraction=0.5), adam(theirs, True)
    scalers = [ShardedGradScaler(init_scale=64.0), ShardedGradScaler(init_scale=64.0)]
    for step in range(STEPS):
        norms = []
        for each, optimizer, scaler in ((mine, ours, scalers[0]), (theirs, other, scalers[1])):
            x = torch.randn(6, 9, generator=torch.Generator().manual_seed(step))
            scaler.scale(each(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            if optimizer is ours:
                norms.append(ours.clip_grad_norm_(0.05))
            else:
                norms.append(clip_grad_norm_(theirs.parameters(), 0.05))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert torch.equal(*norms)
    assert_alike(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_it_clips_in_half_precision() -> None:
    mine, theirs = (fully_shard(model().bfloat16()) for _ in range(2))
    ours, other = offloaded(mine, True, host_fraction=0.5), adam(theirs, True)
    for step in range(STEPS):
        x = torch.randn(6, 9, generator=torch.Generator().manual_seed(step)).bfloat16()
        for each in (mine, theirs):
            each(x).float().square().mean().backward()
        assert torch.equal(ours.clip_grad_norm_(0.01), clip_grad_norm_(theirs.parameters(), 0.01))
        for optimizer in (ours, other):
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_it_steps_on_shards_that_are_on_the_host() -> None:
    """ "cpu:0" is the host under another name, so that shards and gradients move; computed with in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for overlap_step in (False, True):
        mine, theirs = (
            fully_shard(
                model(),
                offload_policy=CPUOffloadPolicy(),
                options=ShardOptions(compute_device="cpu:0"),
                mp_policy=policy,
            )
            for _ in range(2)
        )
        ours, other = offloaded(mine, True, host_fraction=0.5, overlap_step=overlap_step), adam(theirs, True)
        for step in range(STEPS):
            for each, optimizer in ((mine, ours), (theirs, other)):
                backward(each, step)
                optimizer.step()
                optimizer.zero_grad()
        assert_alike(mine, theirs)


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
        assert_alike(mine, theirs)
        assert all(isinstance(shard.grad, ConsumedGradient) for shard in mine.parameters())
        ours.step()
        assert_alike(mine, theirs)


@pytest.mark.ranks(0, 2)
def test_the_state_of_shards_is_kept_by_name() -> None:
    mine, theirs = sharded(), sharded()
    ours, other = offloaded(mine, False, host_fraction=0.5), adam(theirs, False)
    for step in range(2):
        for each, optimizer in ((mine, ours), (theirs, other)):
            backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    saved, plain = sharded_state_dict(mine, ours), sharded_state_dict(theirs, other)
    assert saved.keys() == plain.keys()
    for key in saved:
        one, two = (getattr(state[key], "tensor", state[key]) for state in (saved, plain))
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    again = sharded()
    its = offloaded(again, False, host_fraction=0.8)
    load_sharded_state_dict(copy.deepcopy(plain), again, its)
    for step in range(2, STEPS):
        for each, optimizer in ((again, its), (theirs, other)):
            backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(again, theirs)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.ranks(2)
def test_under_ddp_gradients_are_those_of_all_ranks(away: bool) -> None:
    """DDP reduces gradients after autograd has told of them: early copies are seen to be none."""
    if away:
        cases.let_parameters_be_away(pytest.MonkeyPatch())  # For the rest of the rank's life.
    mine, theirs = DistributedDataParallel(model()), DistributedDataParallel(model())
    ours, other = offloaded(mine, True, host_fraction=0.5), adam(theirs, True)
    for step in range(STEPS):
        for each, optimizer in ((mine, ours), (theirs, other)):
            backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(mine, theirs)
    overlapped = offloaded(mine, True, host_fraction=0.5, overlap_step=True)
    with pytest.raises(RuntimeError, match="was used for its update during the backward pass"):
        backward(mine, 0)
    del overlapped
