"""An evaluation on one rank: right with the module inside, an error that says so with the wrapper."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scale_core.errors import ScaleDistributedError
from scale_core.testing.ranks import scaled_by_load
from scale_oss import OSS, OSSOptions, ShardedDataParallel


@pytest.mark.ranks(2)
def test_an_evaluation_on_one_rank_says_what_to_write() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = OSS(inner.parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(limit_seconds=scaled_by_load(1.0)))
    model = ShardedDataParallel(inner, optimizer)
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    model.eval()
    if dist.get_rank() == 1:
        return
    with torch.no_grad():
        model.module(torch.ones(1, 2))
        with pytest.raises(ScaleDistributedError) as caught:
            model(torch.ones(1, 2))
    message = str(caught.value)
    assert "under ShardedDataParallel that rank can call model.module(batch)" in message
