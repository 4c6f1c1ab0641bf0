"""Models of diffusers, monai, x-transformers and vector-quantize-pytorch train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from client_libraries import CLIENTS, batches, blocks_of, step
from torch import nn

from scale_check import ParityVerdict, parity
from scale_checkpoint import checkpoint_wrapper
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")  # Of the libraries themselves, about what else they could import.


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def sharded(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block)
    return fully_shard(model)


def sharded_and_recomputed(model: nn.Module) -> nn.Module:
    blocks = blocks_of(model)
    inner = {part for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if block not in inner:
            checkpoint_wrapper(block)
    return sharded(model)


def with_sharded_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return ShardedDataParallel(model, optimizer), optimizer


@pytest.mark.parametrize("wrap", [sharded, sharded_and_recomputed, with_sharded_optimizer])
@pytest.mark.parametrize("client", CLIENTS)
def test_models_of_libraries_train_as_in_one_process(client: str, wrap: Callable[..., Any]) -> None:
    build, library = CLIENTS[client]
    pytest.importorskip(library)
    report = parity(build, step, wrap, batches=batches(3), optimizer=adamw)
    assert report.verdict in (ParityVerdict.EQUAL, ParityVerdict.ROUNDING) and report.num_compared > 100
