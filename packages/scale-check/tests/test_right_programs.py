"""Right programs are found right, whatever wraps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check_models import (
    TiedModel,
    accumulating_step,
    adamw,
    averaging,
    batches,
    conv_net,
    ddp,
    fsdp2,
    fsdp2_in_one_unit,
    mlp,
    tokens,
    with_batch_norm,
)
from torch import nn

from scale_check import ParityVerdict, parity


def step_with_a_loss_module(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    output = model(batch)
    loss: torch.Tensor = nn.MSELoss()(output, torch.zeros_like(output))
    loss.backward()
    optimizer.step()
    return loss


MICRO_BATCHES = list(zip(batches(6), batches(6)[::-1], strict=True))
PROGRAMS: dict[str, dict[str, Any]] = {
    "DDP": {"build": mlp, "wrap": ddp, "batches": batches(6)},
    "FSDP2": {"build": mlp, "wrap": fsdp2, "batches": batches(6), "optimizer": adamw},
    "by hand": {"build": mlp, "wrap": averaging, "batches": batches(6)},
    "four ranks": {"build": mlp, "wrap": fsdp2, "batches": batches(6), "ranks": 4},
    "float32": {"build": mlp, "wrap": ddp, "batches": batches(6), "dtype": None, "optimizer": adamw},
    "accumulation and clipping": {
        "build": mlp,
        "step": accumulating_step,
        "wrap": ddp,
        "batches": MICRO_BATCHES,
    },
    "a loss that is a module": {
        "build": mlp,
        "step": step_with_a_loss_module,
        "wrap": ddp,
        "batches": batches(6),
    },
    "convolutions": {"build": conv_net, "wrap": ddp, "batches": batches(2, 5, 5)},
    "tied and checkpointed, DDP": {"build": TiedModel, "wrap": ddp, "batches": tokens()},
    "tied and checkpointed, FSDP2": {
        "build": TiedModel,
        "wrap": fsdp2_in_one_unit,
        "batches": tokens(),
        "optimizer": adamw,
    },
    "all ranks have all samples": {"build": mlp, "batches": batches(6), "data": "all"},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_is_equal_but_for_rounding(name: str) -> None:
    report = parity(**PROGRAMS[name])
    assert report.verdict in (ParityVerdict.EQUAL, ParityVerdict.ROUNDING) and report.first is None
    assert report.num_compared > 50
    # Far below what is called a bug.
    assert report.largest_ratio < 20, report


def test_one_rank_is_equal_to_the_bit() -> None:
    report = parity(mlp, ranks=1, batches=batches(6), optimizer=adamw)
    assert report.verdict is ParityVerdict.EQUAL and report.largest_ratio == 0
    assert str(report) == f"{report.num_compared} tensors are equal to the bit"


def test_dropout_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"'1' draws random numbers, .* build the model with Dropout\(p=0\)"):
        parity(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()), batches=[torch.ones(2, 2)])


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected samples that 3 ranks divide evenly, got .*\(8, 6\)"):
        parity(mlp, ranks=3, batches=batches(6))


def test_a_batch_norm_that_is_not_synchronized_is_where_it_differs_and_that_alone() -> None:
    with pytest.raises(AssertionError, match="output of 1 differs on ranks 0, 1"):
        parity(with_batch_norm, wrap=ddp, batches=batches(6))
