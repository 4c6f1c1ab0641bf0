"""Calls in an order that nobody means: the same comes of them as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fault_trainings import KINDS, build
from torch import Tensor, nn

from scale_core.sharded_tensor.tensor import local_tensor


def gradients_after(kind: str, backwards: int) -> list[Tensor]:
    """Those of one batch, by so many backward passes; with no dropout, which would draw anew."""
    training = build(kind, 60)
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for _ in range(backwards):
        training.backward(1)
    return [param.grad for param in training.model.parameters() if param.grad is not None]


@pytest.mark.fault(77, techniques=("fsdp", "oss", "tp", "pipe"))
@pytest.mark.ranks(2)
def test_no_backward_moves_nothing_and_two_add_up() -> None:
    wrong = []
    for kind in KINDS:
        training = build(kind, 60)
        before = [param.detach().clone() for param in training.model.parameters()]
        training.optimizer.step()
        if not all(torch.equal(*both) for both in zip(before, training.model.parameters(), strict=True)):
            wrong.append(f"{kind}: a step without a backward has moved something")
        if kind == "oss":
            continue  # Its gradients stand in buckets; test_grad_accumulation.py has their sums.
        once, twice = gradients_after(kind, 1), gradients_after(kind, 2)
        if not once or len(once) != len(twice):
            wrong.append(f"{kind}: {len(once)} gradients after one backward, {len(twice)} after two")
        for one, two in zip(once, twice, strict=False):
            torch.testing.assert_close(local_tensor(two), 2 * local_tensor(one))
    dist.barrier()
    assert wrong == []
