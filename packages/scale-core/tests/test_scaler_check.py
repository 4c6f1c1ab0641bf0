"""torch's own scaler on shards: all ranks that share them step, or none does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from scale_core.comm.group import group_of
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_an_infinity_on_one_rank_skips_the_step_on_all(fused: bool) -> None:
    group = group_of()
    for value, scale in ((torch.inf, 2.0), (1.0, 4.0)):
        param = nn.Parameter(torch.ones(2))
        set_shard(param, Shard("weight", (4,), 2 * group.rank, 2 * group.rank + 2, (Axis(group, Placement.SHARD),)))
        optimizer, scaler = torch.optim.Adam([param], fused=fused), GradScaler("cpu", init_scale=4.0)
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # It stands between the caller and the step.
        scaler.scale(torch.ones(()))
        param.grad = torch.ones_like(param).fill_(value if group.rank == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(param, torch.ones(4)) == (value == torch.inf)
        assert scaler.get_scale() == scale
