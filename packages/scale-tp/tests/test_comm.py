"""comm.py: sums and parts of tensors between ranks, along any dimension."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scale_core.comm.collectives import UNIT_TAGS
from scale_core.comm.group import Group, group_of
from scale_core.comm.work import CollectiveWork
from scale_core.errors import TransferError
from scale_tp.comm import (
    PendingTensor,
    accumulation_dtype,
    all_gather_along,
    all_reduce_sum,
    call_tag,
    check_sizes,
    gather_sizes,
    local_slice,
    reduce_scatter_along,
    to_accumulation_dtype,
)
from scale_tp.split import even_sizes

SHAPES = [(5,), (3, 4), (2, 5, 3), (1, 4), (0, 3), (7, 1, 2)]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 100)
    return torch.randn(shape, generator=generator).mul(1.7**rank).to(dtype)


def sum_in_rank_order(shape: tuple[int, ...], dtype: torch.dtype, num_ranks: int) -> Tensor:
    """The stated order and precision: fp32 for half precision, one rounding."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = tensor_of(0, shape, dtype).to(wide)
    for rank in range(1, num_ranks):
        total = total + tensor_of(rank, shape, dtype).to(wide)
    return total.to(dtype)


@pytest.mark.gloo("sums in rank order and in fp32")
@pytest.mark.ranks(2, 3)
def test_sums_are_in_rank_order_and_parts_are_of_any_size() -> None:
    group, checked = group_of(), 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in SHAPES:
            own = tensor_of(group.rank, shape, dtype)
            before = own.clone()
            expected = sum_in_rank_order(shape, dtype, group.size)
            assert torch.equal(all_reduce_sum(own, group), expected), (dtype, shape)
            for dim in range(-1, len(shape)):
                total = shape[dim]
                uneven = [*([0] * (group.size - 1)), total]
                for sizes in (None, even_sizes(total, group.size), uneven):
                    known = even_sizes(total, group.size) if sizes is None else sizes
                    mine = expected.split(list(known), dim)[group.rank]
                    part = reduce_scatter_along(own, group, dim, sizes)
                    assert torch.equal(part, mine), (dtype, shape, dim, sizes)
                    assert part.is_contiguous()
                    whole = all_gather_along(mine, group, dim, known)
                    assert torch.equal(whole, expected)
                    assert whole.is_contiguous()
                    assert torch.equal(local_slice(expected, group, dim, sizes), mine)
                    checked += 1
            assert torch.equal(own, before), "nobody writes to an argument"
    # Not told the sizes, ranks ask each other; what is not contiguous is read as it is.
    own = torch.full((2, group.rank + 1), float(group.rank)).T
    expected = torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in range(group.size)])
    assert torch.equal(all_gather_along(own, group, 0), expected)
    assert torch.equal(all_reduce_sum(torch.ones(3, 2).T, group), torch.full((2, 3), float(group.size)))
    assert torch.equal(all_reduce_sum(torch.tensor([2, 3]), group), torch.tensor([2, 3]) * group.size)
    assert gather_sizes(group.rank + 1, group) == [rank + 1 for rank in range(group.size)]
    assert checked == 171


def test_a_world_of_one_moves_nothing() -> None:
    tensor = torch.randn(3, 2)
    for move in (all_gather_along, reduce_scatter_along, local_slice):
        assert move(tensor, Group(), 0) is tensor
    assert all_reduce_sum(tensor, Group()) is tensor


def test_sizes_that_do_not_fit_are_refused() -> None:
    two = Group(rank=1, size=2, ranks=(0, 1))
    with pytest.raises(ValueError, match=r"parts of 2 ranks, which add up to the 5 .* got \[2, 2\]"):
        check_sizes(5, two, [2, 2])
    with pytest.raises(ValueError, match=r"of which rank 1 has the 3 of its tensor, got \[3, 2\]"):
        gather_sizes(3, two, [3, 2])
    with pytest.raises(ValueError, match="sizes of 2 ranks"):
        all_gather_along(torch.ones(3), two, 0, [1, 1, 1])
    with pytest.raises(ValueError, match="add up to the 3"):
        local_slice(torch.ones(3), two, 0, [1, 1])


class Failing:
    """A message that nobody has sent."""

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("Timed out waiting for recv operation to complete")


def test_a_transfer_that_fails_says_what_it_was_for() -> None:
    """What the transport says names a rank at most; that two inputs differ in shape is seen by their shapes."""
    two = Group(rank=1, size=2, ranks=(2, 5))
    pending = CollectiveWork("all_gather", [(0, Failing())], torch.zeros(6))
    coming = PendingTensor("a sum", torch.zeros(2, 3), two, pending)
    with pytest.raises(TransferError, match="all_gather with rank 0 failed: no answer within the limit") as caught:
        coming.wait()
    (note,) = caught.value.__notes__
    assert note.startswith("in a sum of [2, 3] torch.float32 over the ranks [2, 5]: all of them have to call the same")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
        (torch.complex64, torch.complex64),
    ],
)
def test_half_precision_is_widened_and_nothing_else(dtype: torch.dtype, expected: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert accumulation_dtype(dtype) == to_accumulation_dtype(tensor).dtype == expected
    assert (to_accumulation_dtype(tensor) is tensor) == (dtype == expected)


def test_tags_are_those_of_units_and_differ_where_a_word_does() -> None:
    words = ("sum", torch.float32, (2, 3))
    assert call_tag(*words) == call_tag("sum", torch.float32, (2, 3))
    assert call_tag(*words) in UNIT_TAGS
    assert len({call_tag("sum", torch.float32, (2, size)) for size in range(20)}) > 18
