"""Where rows go, and what is sent."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from scale_core.comm.group import Group, group_of
from scale_moe import token_dispatcher as module
from scale_moe.token_dispatcher import combine, dispatch, experts_per_rank, plan_dispatch

# The example of the guide: tokens a to f, which have the values 1 to 6.
CHOICES = [[[0, 2], [0, 1], [3, 0]], [[1, 3], [0, 1], [2, 3]]]


@pytest.mark.ranks(2)
def test_the_example_of_the_guide_is_what_is_sent() -> None:
    """Four rows stay and two go, of four elements each; then the same way back, and both again in the backward pass."""
    rank, group = dist.get_rank(), group_of()
    tokens = torch.arange(1.0, 7.0).view(2, 3, 1)[rank].expand(3, 4).contiguous().requires_grad_()
    weight = torch.full((3, 2), 0.5, requires_grad=True)
    sent = []

    def counted(output: torch.Tensor, input: torch.Tensor, *args: object, **kwargs: list[int]) -> object:
        if input.is_floating_point():
            sent.append(kwargs["input_sizes"])
        return plain(output, input, *args, **kwargs)

    plain = module.all_to_all
    with mock.patch.object(module, "all_to_all", counted):
        plan = plan_dispatch(tokens, torch.tensor(CHOICES[rank]), weight, 4, group)
        rows = dispatch(tokens, plan)
        output = combine(10 * rows, weight, plan)
        output.sum().backward()
    assert tokens.grad is not None and weight.grad is not None
    assert torch.equal(tokens.grad, torch.full((3, 4), 10.0))
    assert torch.equal(weight.grad, 40 * tokens[:, :1].detach().expand(3, 2))
    expected = [
        ([1, 2, 3, 5, 2, 4, 5], [4, 3], [[16, 8], [16, 12], [16, 8], [16, 12]], [10, 20, 30]),
        ([1, 6, 3, 4, 6], [2, 3], [[12, 12], [8, 12], [12, 12], [8, 12]], [40, 50, 60]),
    ]
    assert (rows[:, 0].tolist(), plan.counts, sent, output[:, 0].tolist()) == expected[rank]


def test_choices_without_an_expert_send_nothing() -> None:
    tokens = torch.tensor([[1.0], [2.0], [3.0]])
    index = torch.tensor([[1, -1], [-1, -1], [2, 0]])
    weight = torch.tensor([[0.5, 9.0], [9.0, 9.0], [2.0, 3.0]])
    plan = plan_dispatch(tokens, index, weight, 2, Group())  # Expert 2 is none, as a sentinel of transformers.
    rows = dispatch(tokens, plan)
    assert rows.tolist() == [[3.0], [1.0]]
    assert plan.counts == [1, 1]
    assert combine(rows, weight, plan).tolist() == [[0.5], [0.0], [9.0]]


def test_a_token_may_have_one_expert_twice() -> None:
    tokens, weight = torch.tensor([[2.0]]), torch.tensor([[0.25, 0.5]])
    plan = plan_dispatch(tokens, torch.tensor([[1, 1]]), weight, 3, Group())
    assert combine(dispatch(tokens, plan), weight, plan).tolist() == [[1.5]]


def test_half_precision_is_added_in_fp32() -> None:
    tokens = torch.full((1, 1), 1.0, dtype=torch.bfloat16)
    index, weight = torch.arange(4)[None], torch.tensor([[256.0, 1.0, 1.0, 1.0]])
    plan = plan_dispatch(tokens, index, weight, 4, Group())
    assert combine(dispatch(tokens, plan), weight, plan).item() == 260  # In bfloat16 256 + 1 is 256.


def test_experts_are_divided_as_evenly_as_can_be() -> None:
    assert [experts_per_rank(*sizes) for sizes in ((8, 4), (5, 3), (2, 4))] == [[2, 2, 2, 2], [2, 2, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("index", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32)])
def test_shapes_that_do_not_fit_are_refused(index: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"the experts: expected tokens \[T, dim\] with the indices .* \[3, 4\], \["):
        plan_dispatch(torch.zeros(3, 4), index, torch.zeros(3, 2), 2, Group())
