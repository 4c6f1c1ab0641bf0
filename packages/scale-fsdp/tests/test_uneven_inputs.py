"""Uneven inputs: ranks that run out of data, against one process on the same samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.uneven_inputs import join
from scale_fsdp import fully_shard

LENGTHS = [2, 4, 3]


def batches(rank: int, last: int = 4) -> list[Tensor]:
    """[4, 3] each, but for the last of a rank's, which has `last` rows."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [4] * (LENGTHS[rank] - 1) + [last]
    return [torch.randn(size, 3, generator=generator) for size in sizes]


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    return plain, fully_shard(model)


@pytest.mark.ranks(3)
def test_ranks_with_fewer_batches_leave_the_average_alone() -> None:
    """The reference: the gradients of those that have a batch, summed in rank order, divided by how many they are."""
    plain, model = models()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]
    size, rank = group_of().size, group_of().rank
    for batch in join(batches(rank)):
        model(batch).square().mean().backward()
        model.clip_grad_norm_(1e6)
        optimizers[1].step()
        optimizers[1].zero_grad()
    by_rank = [batches(each) for each in range(size)]
    for step in range(max(LENGTHS[:size])):
        grads: list[list[Tensor]] = []
        for mine in by_rank:
            if step < len(mine):
                plain.zero_grad()
                plain(mine[step]).square().mean().backward()
                grads.append([param.grad.clone() for param in plain.parameters() if param.grad is not None])
        for param, *summands in zip(plain.parameters(), *grads, strict=True):
            param.grad = sum(summands[1:], summands[0]) / len(summands)
        optimizers[0].step()
    assert_equal(model, plain)


@pytest.mark.ranks(2)
def test_counted_by_samples_it_is_one_process_on_all_of_them() -> None:
    """The reference: one process, one batch of all samples that there are."""
    plain, model = models()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for batch in join(batches(group_of().rank, last=1), samples=len):
        model(batch).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    by_rank = [batches(each, last=1) for each in range(group_of().size)]
    for step in range(max(LENGTHS[: group_of().size])):
        plain.zero_grad()
        plain(torch.cat([mine[step] for mine in by_rank if step < len(mine)])).square().mean().backward()
        optimizers[0].step()
    # Another order of the same sums: a few units in the last place of numbers around 1.
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=1e-6)


@pytest.mark.ranks(2)
def test_micro_batches_under_no_sync_are_refused() -> None:
    _, model = models()
    for number, batch in enumerate(join(batches(group_of().rank))):
        if number < min(LENGTHS[:2]):
            model(batch).sum().backward()
            continue
        with model.no_sync(), pytest.raises(RuntimeError, match="yield all micro-batches of a step together"):
            model(batch).sum().backward()
        break
