"""mappings.py: gradients of copies, which are summed over the ranks that hold them."""

from __future__ import annotations

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_tp.layers.linear_ops import reduce_grads_of_copies
from scale_tp.split import Split, split_heads


def test_ranks_with_the_same_indices_have_copies() -> None:
    assert split_heads(6, 2, 4).key_value.has_copies
    assert not Split.even(3, 2).has_copies
    assert not Split.even(1, 3).has_copies  # Two ranks have nothing, which is no copy of anything.


def test_without_copies_a_parameter_is_left_as_it_is() -> None:
    param = torch.ones(2)
    assert reduce_grads_of_copies(param, Group(0, 2, None, "fake", (0, 1)), Split.even(4, 2)) is param
    assert reduce_grads_of_copies(param, Group(), Split(2, (((0, 2),),))) is param


def _summed(dtype: torch.dtype) -> list[float]:
    group = group_of()
    split = split_heads(4, 2, 3).key_value  # the first two ranks share the first head
    param = torch.ones(2, dtype=dtype, requires_grad=True)
    weight = torch.tensor([1.0, 256.0], dtype=dtype) * (1 + group.rank)
    (reduce_grads_of_copies(param, group, split) * weight).sum().backward()
    assert param.grad is not None
    return param.grad.tolist()


@pytest.mark.ranks(3)
def test_copies_get_the_sum_of_their_gradients() -> None:
    assert [_summed(dtype) for dtype in (torch.float32, torch.bfloat16)] == [[3.0, 768.0]] * 2
