"""What the packages log: nothing unless asked, each plan once, on the first rank of its group."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch
from torch import nn

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, Pipe
from scale_tp import parallelize

PACKAGES = ["core", "fsdp", "oss", "pipe", "tp", "adascale", "checkpoint", "train"]


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def plans(level: int) -> list[str]:
    records = Records()
    for package in PACKAGES:
        logger = logging.getLogger(f"scale_{package}")
        logger.addHandler(records)
        logger.setLevel(level)
    model = layers()
    for part in (*model, model):
        fully_shard(part)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    model = layers()
    ShardedDataParallel(model, OSS(model.parameters(), torch.optim.Adam))
    DistributedPipe(layers(), "1f1b", balance=[1, 1], chunks=2)
    Pipe(layers(), [1, 1], devices=["cpu", "cpu"], chunks=2)
    parallelize(layers(), {"0": "colwise", "1": "rowwise"}, group_of())
    return records.texts


def test_each_plan_is_logged_once_by_the_first_rank() -> None:
    first, second = run_ranks(plans, 2, logging.INFO)
    pipe = "INFO scale_pipe.one_process.pipe: Pipe: [1, 1] layers on ['cpu', 'cpu']; 2 micro-batches, "
    assert first == [
        "INFO scale_fsdp.runtime.root: fully_shard of Sequential: 3 units over 2 ranks, 4 parameters, 160 bytes of "
        "shards on this rank; the largest is unit '0' with 192 bytes while it is gathered",
        "INFO scale_oss.oss: OSS of Adam: 4 parameters over 2 ranks in 1 buckets of 256 bytes in all, 0 of shards that "
        "are stepped on in place, 0 of shards that are put together; tensors are cut",
        "INFO scale_oss.sharded_ddp: ShardedDataParallel of Sequential: gradients in 1 buckets over 2 ranks; "
        "broadcast_buffers=True, reduce_fp16=False, overlap_gather=True",
        "INFO scale_pipe.distributed.pipe: DistributedPipe: 2 stages on 2 ranks (stages by rank: ((0,), (1,))), "
        "schedule 1F1B of 2 micro-batches, 0 shared parameters; checkpoint=never",
        f"{pipe}checkpoint=except_last",
        "INFO scale_tp.conversion.parallelize: parallelize of Sequential: 1 ColumnParallelMixin, 1 RowParallelMixin "
        "over 2 ranks",
    ]
    assert second == [f"{pipe}checkpoint=except_last"]  # It is in one process, and knows of no rank.


def test_plans_are_no_warnings() -> None:
    assert run_ranks(plans, 2, logging.WARNING) == [[], []]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_program_that_configures_no_logging_sees_none(package: str) -> None:
    importlib.import_module(f"scale_{package}")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger(f"scale_{package}").handlers)
