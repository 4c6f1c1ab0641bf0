"""contract.py: what is compared at the end of each pass, before an optimizer gets gradients of different things."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import scale_fsdp.offload.backward
from scale_check.exact import assert_equal
from scale_core.comm.group import Group, group_of
from scale_core.consistency.same_call import check_same_call
from scale_core.errors import ContractError, ScaleDistributedError, StepError
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing.async_gloo import BACKEND
from scale_fsdp import OffloadOptimizer, ShardOptions, fully_shard

LENGTHS = (8, 16)


class Attention(nn.Module):
    """Stands for ring attention: the ranks of a group have to call it with one length."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.linear, self.group, self.length, self.fails = nn.Linear(4, 4), group, LENGTHS[0], False

    def forward(self, x: Tensor) -> Tensor:
        check_same_call("attention", f"length {self.length}", self.group)
        if self.fails:
            raise ValueError("on purpose")
        y: Tensor = self.linear(x)
        return y


def pass_with(model: Attention, length: int) -> None:
    model.length = length
    model(torch.ones(2, 4)).sum().backward()


def build(num_parts: int) -> Attention:
    """A model whose attention is over `num_parts` of two ranks each, and whose parameters are over all ranks."""
    parts = [dist.new_group([2 * part, 2 * part + 1]) for part in range(num_parts)]
    attention: Attention = fully_shard(
        Attention(group_of(parts[dist.get_rank() // 2])), options=ShardOptions(limit_seconds=20)
    )
    for length in (*LENGTHS, *LENGTHS):
        pass_with(attention, length)
    return attention


@pytest.mark.ranks(2)
def test_ranks_that_call_with_other_shapes_later_are_told_so() -> None:
    attention = build(1)
    with pytest.raises(ContractError) as caught:
        pass_with(attention, LENGTHS[dist.get_rank()])
    words = "made different calls: rank 0: attention: length 8; rank 1: attention: length 16. Each of"
    assert words in str(caught.value)


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_a_call_out_is_named() -> None:
    attention = build(1)
    if dist.get_rank() == 1:
        attention.forward = attention.linear.forward  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="rank 0: attention: length 8; rank 1: no further call\\. "):
        pass_with(attention, LENGTHS[0])


@pytest.mark.ranks(4)
def test_parts_of_the_ranks_may_have_lengths_of_their_own() -> None:
    attention = build(2)
    pass_with(attention, LENGTHS[dist.get_rank() // 2])


@pytest.mark.ranks(2)
def test_calls_of_an_aborted_step_are_not_compared() -> None:
    attention = build(1)
    attention.fails = dist.get_rank() == 1
    with pytest.raises(ValueError if attention.fails else StepError):
        pass_with(attention, LENGTHS[0])
    attention.fails = False
    pass_with(attention, LENGTHS[1])


@pytest.mark.ranks(2, backend=BACKEND)
def test_no_gradient_of_different_micro_batches_is_used() -> None:
    """Each step accumulates two micro-batches; in the last one rank 1 has the second only, and answers for the first.

    Rank 0 gathers for its second forward what rank 1 reduces in its only backward. Only where operations match by their
    order alone, as on NCCL, an optimizer that updates in the backward pass could get that: over gloo, tags keep the
    units apart.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=False, options=ShardOptions(limit_seconds=3.0))
    optimizer = OffloadOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, overlap_step=True)

    def backward(*, has_first: bool = True) -> None:
        if has_first:
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(3):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [local_tensor(param).detach().clone() for param in model.parameters()]
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ScaleDistributedError):
        monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 1)  # Each gradient is used when it comes.
        backward(has_first=dist.get_rank() == 0)
    assert_equal([local_tensor(param).detach() for param in model.parameters()], before)
