"""contract.py: calls that were equal once are compared at the end of each pass, since NCCL has no tags for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.consistency.same_call import check_same_call
from scale_core.errors import ContractError, StepError
from scale_core.testing import run_ranks
from scale_fsdp import ShardOptions, fully_shard

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


def call_with_another_length() -> str:
    attention = build(1)
    with pytest.raises(ContractError) as caught:
        pass_with(attention, LENGTHS[dist.get_rank()])
    return str(caught.value)


def test_ranks_that_call_with_other_shapes_later_are_told_so() -> None:
    for error in run_ranks(call_with_another_length, 2):
        assert "made different calls: rank 0: attention: length 8; rank 1: attention: length 16. Each of" in error


def leave_a_call_out() -> str:
    attention = build(1)
    if dist.get_rank() == 1:
        attention.forward = attention.linear.forward  # type: ignore[method-assign]
    with pytest.raises(ContractError) as caught:
        pass_with(attention, LENGTHS[0])
    return str(caught.value)


def test_a_rank_that_leaves_a_call_out_is_named() -> None:
    for error in run_ranks(leave_a_call_out, 2):
        assert "rank 0: attention: length 8; rank 1: no further call. " in error


def call_with_other_lengths_in_other_parts() -> None:
    attention = build(2)
    pass_with(attention, LENGTHS[dist.get_rank() // 2])


def test_parts_of_the_ranks_may_have_lengths_of_their_own() -> None:
    run_ranks(call_with_other_lengths_in_other_parts, 4)


def go_on_after_a_failed_forward() -> None:
    attention = build(1)
    attention.fails = dist.get_rank() == 1
    with pytest.raises(ValueError if attention.fails else StepError):
        pass_with(attention, LENGTHS[0])
    attention.fails = False
    pass_with(attention, LENGTHS[1])


def test_calls_of_an_aborted_step_are_not_compared() -> None:
    run_ranks(go_on_after_a_failed_forward, 2)
