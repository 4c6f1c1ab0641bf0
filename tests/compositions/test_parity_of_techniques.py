"""Each technique beside one process, tensor by tensor, by scale-check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from scale_check import ParityError, ParityVerdict, parity
from scale_check.harness import mean_square_step
from scale_checkpoint import checkpoint_wrapper
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_tp import parallelize


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)), nn.Linear(8, 4)
    )


def batches() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(12, 6, generator=drawn) for _ in range(3)]


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


def in_units(model: nn.Module) -> nn.Module:
    for module in (model.get_submodule("0"), model.get_submodule("2")):
        fully_shard(module)
    return fully_shard(model)


def checkpointed_in_units(model: nn.Module) -> nn.Module:
    checkpoint_wrapper(model.get_submodule("2"))
    return in_units(model)


def divided(model: nn.Module) -> nn.Module:
    return parallelize(model, {"0": "colwise", "2.0": "rowwise", "3": "replicate"}, dist.group.WORLD)


def oss(params: Iterable[nn.Parameter]) -> Optimizer:
    return OSS(params, AdamW, lr=0.01) if dist.is_initialized() else AdamW(params, lr=0.01)


def sharded_step(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    if not isinstance(optimizer, OSS):
        return mean_square_step(model, optimizer, batch)
    wrapped = vars(model).setdefault("wrapped_here", [])  # A list, so that the model does not hold it as a module.
    if not wrapped:
        wrapped.append(ShardedDataParallel(model, optimizer))
    return mean_square_step(wrapped[0], optimizer, batch)


TECHNIQUES: dict[str, dict[str, Any]] = {
    "fully_shard": {"wrap": in_units, "optimizer": adamw},
    "fully_shard on three ranks": {"wrap": in_units, "ranks": 3},
    "checkpointed": {"wrap": checkpointed_in_units, "optimizer": adamw},
    "tensor parallel": {"wrap": divided, "data": "all", "optimizer": adamw},
    "ShardedDataParallel": {"step": sharded_step, "optimizer": oss},
    "float32": {"wrap": in_units, "dtype": None},
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_one_process_but_for_rounding(name: str) -> None:
    report = parity(build, **{"batches": batches(), **TECHNIQUES[name]})
    assert report.verdict is not ParityVerdict.BUG and report.num_compared > 50
    assert report.largest_ratio < 20, report


def shifted(model: nn.Module) -> nn.Module:
    model = in_units(model)
    if dist.get_rank() == 1:
        model.get_submodule("2.0").register_forward_hook(lambda module, args, output: output + 1e-9)
    return model


def test_a_module_that_differs_on_one_rank_is_named() -> None:
    with pytest.raises(ParityError, match=r"^step 1: output of 2\.(0|1) differs"):
        parity(build, wrap=shifted, batches=batches())
