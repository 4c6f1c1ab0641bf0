"""AdaScale around the optimizer of a pipeline: each micro-batch of each replica is one sample, as on one process.

Two pipelines of two ranks, each stage sharded over its replicas, or reduced into the pieces of an OSS. What it would
measure wrong is refused, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel

pytest.importorskip("scale_pipe")
pytest.importorskip("scale_adascale")
from scale_adascale import AdaScale
from scale_pipe import DistributedPipe, StageError

CHUNKS, STEPS, LR = 4, 3, 0.1


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def sharded(pipe: DistributedPipe, replicas: dist.ProcessGroup) -> torch.optim.Optimizer:
    for stage in pipe.stages.values():
        fully_shard(stage, replicas)
    return torch.optim.SGD(pipe.parameters(), lr=LR)


def in_pieces(pipe: DistributedPipe, replicas: dist.ProcessGroup) -> torch.optim.Optimizer:
    ((index, stage),) = pipe.stages.items()
    optimizer = OSS(stage.parameters(), torch.optim.SGD, replicas, lr=LR)
    pipe.stages[index] = ShardedDataParallel(stage, optimizer, replicas)
    return optimizer


def gains() -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))
    replicas, replica, ranks = mesh.get_group("replica"), mesh.get_local_rank("replica"), mesh.get_group("pipe")
    found: dict[str, list[float]] = {}
    for schedule, wrap in (("1f1b", sharded), ("zb_h1", sharded), ("1f1b", in_pieces)):
        pipe = DistributedPipe(layers(), schedule, balance=[3, 2], chunks=CHUNKS, group=ranks)
        optimizer = AdaScale(
            wrap(pipe, replicas),
            num_gradients_to_accumulate=CHUNKS,
            process_group=replicas,
            model_parallel_group=ranks,
        )
        numbers = found[f"{schedule}, {wrap.__name__}"] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            x, target = batch_of(step, replica)
            pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
            numbers.append(optimizer.gain())
            optimizer.step()
    return found


@pytest.fixture
def plain() -> Iterator[list[float]]:
    model, numbers = layers(), list[float]()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=LR), num_gradients_to_accumulate=2 * CHUNKS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            x, target = batch_of(step, replica)
            for part, to in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
                (nn.functional.mse_loss(model(part), to) / (2 * CHUNKS)).backward()
        numbers.append(optimizer.gain())
        optimizer.step()
    yield numbers
    optimizer.unhook()


def test_the_gain_is_that_of_one_process(plain: list[float]) -> None:
    for rank, found in enumerate(run_ranks(gains, 4)):
        for way, numbers in found.items():
            assert numbers == pytest.approx(plain, rel=1e-5), (rank, way)


def tied_layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].weight = model[1].weight
    return model


def refused() -> list[str]:
    """Two ranks: one pipeline, whose stages have no replicas but where they are wrapped in DistributedDataParallel."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    x, target = batch_of(0, 0)
    found = []
    for schedule, model, balance, wrapped in (
        ("1f1b", layers(), [3, 2], True),
        ("zb_h1", layers(), [3, 2], False),
        ("zb_v", layers(), [1, 2, 1, 1], False),
        ("1f1b", tied_layers(), [2, 2], False),
    ):
        pipe = DistributedPipe(model, schedule, balance=balance, chunks=CHUNKS)
        if wrapped:
            for index, stage in pipe.stages.items():
                pipe.stages[index] = DistributedDataParallel(stage, process_group=alone)
        optimizer = AdaScale(
            torch.optim.SGD(pipe.parameters(), lr=LR),
            num_gradients_to_accumulate=CHUNKS,
            process_group=alone,
            model_parallel_group=dist.group.WORLD,
        )
        with pytest.raises(StageError) as error:
            pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
        found.append(str(error.value))
        optimizer.unhook()
        pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    return found


def test_a_gain_that_would_be_wrong_is_refused_on_all_ranks() -> None:
    words = (
        "wrap it in fully_shard or in ShardedDataParallel",
        'take schedule="1f1b"',
        "take a schedule of one stage for each rank",
        "use no tied parameters",
    )
    for found in run_ranks(refused, 2):
        for error, word in zip(found, words, strict=True):
            assert "would be measured wrong in this pipeline" in error and word in error
