"""Under a launcher's variables and without a process group each rank would train alone: every package refuses it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from scale_adascale import AdaScale
from scale_core import ShardedGradScaler, clip_grad_norm_, grad_norm, group_of, join
from scale_core.comm.collectives import all_reduce
from scale_core.errors import LaunchError
from scale_core.launch import StopSignal
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe
from scale_snapshot import load_snapshot, save_snapshot
from scale_tp import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from scale_tp.parallel_state import initialize_model_parallel


def layer() -> nn.Linear:
    made = nn.Linear(4, 4)
    made.weight.grad = torch.ones(4, 4)
    return made


CALLS: dict[str, Callable[[], object]] = {
    "fully_shard": lambda: fully_shard(layer()),
    "OSS": lambda: OSS(layer().parameters(), torch.optim.SGD, lr=0.1),
    "ShardedDataParallel": lambda: ShardedDataParallel(layer(), OSS(layer().parameters(), torch.optim.SGD, lr=0.1)),
    "AdaScale": lambda: AdaScale(torch.optim.SGD(layer().parameters(), lr=0.1)),
    "DistributedPipe": lambda: DistributedPipe(nn.Sequential(layer(), layer()), chunks=2),
    "ColumnParallelLinear": lambda: ColumnParallelLinear(4, 4),
    "RowParallelLinear": lambda: RowParallelLinear(4, 4),
    "ParallelEmbedding": lambda: ParallelEmbedding(4, 4),
    "initialize_model_parallel": lambda: initialize_model_parallel(1),
    "join": lambda: list(join([1])),
    "clip_grad_norm_": lambda: clip_grad_norm_(layer().parameters(), 1.0),
    "grad_norm": lambda: grad_norm(layer().parameters()),
    "ShardedGradScaler": lambda: _unscale(),
    "all_reduce": lambda: all_reduce(torch.ones(1), group_of()).wait(),
    "save_snapshot": lambda: save_snapshot("runs", 1, {"x": torch.ones(1)}),
    "load_snapshot": lambda: load_snapshot("runs", {"x": torch.ones(1)}),
    "StopSignal": lambda: StopSignal().on_any_rank(),
}


def _unscale() -> None:
    made = layer()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    scaler = ShardedGradScaler()
    scaler.scale(made(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)


@pytest.mark.fault(86)
@pytest.mark.parametrize("name", CALLS)
def test_what_needs_other_ranks_asks_for_a_process_group(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"one of 2 ranks \(WORLD_SIZE\).*call scale_core.launch.init_distributed"):
        CALLS[name]()
    assert not list(tmp_path.iterdir())
