"""Each position is held by one rank, in stretches that are as even as they can be."""

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_tp.attention.load_balance import (
    join_sequence,
    position_ids,
    rank_positions,
    split_sequence,
)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [0, 1, 3, 7, 12, 29])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_position_is_held_once_and_lengths_are_even(length: int, num_ranks: int, order: str) -> None:
    held = rank_positions(length, num_ranks, order)
    assert sorted(at for ranges in held.ranges for bounds in ranges for at in range(*bounds)) == list(range(length))
    assert sum(held.sizes) == length and max(held.sizes) - min(held.sizes) <= 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_in_zigzag_order_all_ranks_have_as_many_pairs(num_ranks: int) -> None:
    pairs = [sum(at + 1 for held in ranges for at in range(*held)) for ranges in rank_positions(24, num_ranks).ranges]
    assert len(set(pairs)) == 1
    if num_ranks > 1:
        first, *_, last = [
            sum(at + 1 for held in ranges for at in range(*held))
            for ranges in rank_positions(24, num_ranks, "contiguous").ranges
        ]
        assert last > 2 * first


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("local", [1, 2, 5])
def test_a_sequence_that_divides_needs_no_length(local: int, num_ranks: int) -> None:
    for order in ("zigzag", "contiguous"):
        assert rank_positions(local * num_ranks, num_ranks, order).sizes == (local,) * num_ranks


def test_an_unknown_order_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"expected order to be one of 'zigzag', 'contiguous', got 'striped'"):
        rank_positions(8, 2, "striped")  # type: ignore[arg-type]


def test_positions_are_those_that_a_split_of_all_positions_gives() -> None:
    for rank in range(3):
        group = Group(rank, 3, None, "fake", (0, 1, 2))
        whole = torch.arange(11)
        assert torch.equal(position_ids(11, group), split_sequence(whole, group, dim=0))


def test_a_gradient_of_a_part_is_zero_for_the_other_positions() -> None:
    whole = torch.ones(1, 6, requires_grad=True)
    split_sequence(whole, Group(1, 2, None, "fake", (0, 1))).sum().backward()
    assert whole.grad is not None and whole.grad.tolist() == [[0, 0, 1, 1, 1, 0]]


@pytest.mark.ranks(3)
def test_what_was_split_is_joined_again() -> None:
    group = group_of()
    for length, order in ((7, "zigzag"), (8, "contiguous"), (1, "zigzag")):
        whole = torch.arange(2 * length * 3.0).view(2, length, 3)
        part = split_sequence(whole, group, order=order)
        assert torch.equal(join_sequence(part, group, length=length, order=order), whole)
        assert torch.equal(join_sequence(part, group, order=order), whole)
    # Every rank is told, before a message of another length can end a process.
    wrong = torch.zeros(1, 5 if group.rank == 0 else 2)
    for options in ({"length": 9}, {}, {"length": 5 + group.rank}):
        with pytest.raises(
            ValueError,
            match=r"join_sequence: (expected the ranks to hold \[3, 3, 3\] .*got \[5, 2, 2\]|"
            r"the ranks bring different things: rank 0: 5 positions .*length=5; rank 1: .*length=6)",
        ):
            join_sequence(wrong, group, **options)
    with pytest.raises(ValueError, match=r"rank 0: 1 positions of \[2\] each, torch.float32.*rank 1: .*torch.float64"):
        join_sequence(torch.zeros(2, 1, dtype=torch.float64 if group.rank else torch.float32), group)
