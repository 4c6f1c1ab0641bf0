"""torch_patches.py: torch's own scaler is refused on shards, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from sharded_by_hand import cut
from torch import nn
from torch.amp.grad_scaler import GradScaler

from scale_core.optim.grad_scaler import ShardedGradScaler

REFUSED = r"GradScaler.step\(Adam\): torch's scaler .* of '0.weight' other ranks have .*scale_core.ShardedGradScaler"


def stepped(model: nn.Module, scaler: GradScaler, *, fused: bool = False) -> None:
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # It stands between the caller and the step.
    scaler.scale(sum(param.sum() for param in model.parameters())).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_torch_s_own_scaler_is_refused_on_pieces_that_others_share(fused: bool) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        stepped(cut(nn.Sequential(nn.Linear(4, 4)), 0, 2), GradScaler("cpu"), fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_on_whole_parameters_and_in_a_world_of_one_it_is_not(fused: bool) -> None:
    stepped(nn.Sequential(nn.Linear(4, 4)), GradScaler("cpu"), fused=fused)
    stepped(cut(nn.Sequential(nn.Linear(4, 4)), 0, 1), GradScaler("cpu"), fused=fused)


def test_one_that_is_off_may_be_left_in_the_loop() -> None:
    stepped(cut(nn.Sequential(nn.Linear(4, 4)), 0, 2), GradScaler("cpu", enabled=False))


class Agreeing(GradScaler):
    """One of somebody who sees to it that the ranks agree."""

    def _unscale_grads_(self, *args, **kwargs):
        return super()._unscale_grads_(*args, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
def test_ours_and_those_that_have_ranks_agree_are_taken(fused: bool) -> None:
    model = cut(nn.Sequential(nn.Linear(4, 4)), 0, 1)
    stepped(model, ShardedGradScaler(), fused=fused)
    if not fused:
        stepped(cut(nn.Sequential(nn.Linear(4, 4)), 0, 2), Agreeing("cpu"))
