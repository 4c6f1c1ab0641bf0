"""A schedule run on ranks of this machine: a small model of equal stages, whose last step is measured."""

from __future__ import annotations

import torch
from torch import nn

from scale_core.launch import init_distributed
from scale_pipe import DistributedPipe, PipelineOptions
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import ScheduleSimulation
from scale_train.errors import RanksLost
from scale_train.launch.launcher import launch_and_collect

WIDTH, ROWS, STEPS = 256, 64, 4
LIMIT_SECONDS, GRACE_SECONDS = 60.0, 10.0


def measure(schedule: Schedule | str, ranks: int, stages: int, chunks: int, device: str) -> ScheduleSimulation:
    """Starts ranks, runs some steps, and returns the last one.

    Raises:
        RanksLost: A rank has failed.
    """
    code, results = launch_and_collect(
        _run_rank, ranks, schedule, stages, chunks, device, device=device, grace=GRACE_SECONDS
    )
    if code or not results:
        raise RanksLost(f"the ranks ended with code {code}; see what they have printed above")
    measured: ScheduleSimulation = results[0]
    return measured


def _run_rank(schedule: Schedule | str, stages: int, chunks: int, device: str) -> ScheduleSimulation | None:
    """Returns the measurements of all ranks, on rank 0 only."""
    group = init_distributed(device=device, limit_seconds=LIMIT_SECONDS)
    torch.manual_seed(0)
    model = nn.Sequential(*(_stage() for _ in range(stages)))
    # Of a rank's own device; without one, the host.
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
    pipe = DistributedPipe(
        model,
        schedule,
        balance=[1] * stages,
        chunks=chunks,
        options=PipelineOptions(stages_per_rank=stages // group.size),
        process_group=group.process_group,
        device=where,
    )
    batch = torch.randn(ROWS * chunks, WIDTH, device=where)
    for _ in range(STEPS):
        pipe.step(batch, target=batch, loss_fn=nn.functional.mse_loss)
        for param in pipe.parameters():
            param.grad = None
    measured = pipe.measured()
    torch.distributed.destroy_process_group()
    return measured if group.rank == 0 else None


def _stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
