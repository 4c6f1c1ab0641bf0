"""replicas.py: who takes ranks that hold parts for ranks that hold the same is refused before it has sent anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scale_tp
from scale_core.group import group_of
from scale_core.testing import run_ranks


def _divided() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    return scale_tp.parallelize(model, {"0": "colwise", "2": "rowwise"}, group_of())


def _over_ranks_that_divide() -> None:
    layers = nn.ModuleDict({"up": scale_tp.ColumnParallelLinear(4, 6, group=group_of())})
    for model, name in ((_divided(), "0.weight"), (layers, "up.weight")):
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(ValueError, match=rf"'{name}' is a part \[3, 4\] .*\[6, 4\].*\[0, 1\].*data axis"):
            DistributedDataParallel(model)
        assert all(torch.equal(param, held) for param, held in zip(model.parameters(), before, strict=True))
    # What is the same on both ranks is averaged as ever.
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), scale_tp.ParallelLayerNorm(2, group=group_of())))
    plain(torch.ones(1, 4)).sum().backward()


def test_distributed_data_parallel_over_the_ranks_of_a_layer_is_refused() -> None:
    run_ranks(_over_ranks_that_divide, 2)
