"""ordered_sum.py: what one process computes that adds up the tensors of all ranks, to the bit."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from scale_core.comm.group import group_of
from scale_core.comm.ordered_sum import start_ordered_sum
from scale_core.testing import run_ranks


def add(one: Tensor, other: Tensor) -> Tensor:
    return one + other


def sums_and_averages() -> None:
    group = group_of()
    for shape in ((0,), (1,), (3, 5)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            tensors = [
                (100 * torch.randn(shape, generator=torch.Generator().manual_seed(rank))).to(dtype).t()
                for rank in range(group.size)
            ]
            wide = torch.float32 if dtype is torch.bfloat16 else dtype
            *_, total = accumulate((tensor.to(wide) for tensor in tensors), add)
            for average in (False, True) if dtype.is_floating_point else (False,):
                own = tensors[group.rank].clone()
                work, finish = start_ordered_sum(own, group, tag=7, average=average)
                found = finish(work.wait())
                expected = (total / group.size if average else total).to(dtype)
                assert found.dtype == dtype
                assert torch.equal(found, expected), (shape, dtype, average)
                assert torch.equal(own, tensors[group.rank])
                assert found.data_ptr() != own.data_ptr() or not own.numel()


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_has_the_sum_in_rank_order(world: int) -> None:
    run_ranks(sums_and_averages, world)
