"""sequence_lengths.py: how long the parts of a sequence are that the ranks hold between two layers."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from with_options import with_options

import scale_tp
from scale_core.comm.group import Group, group_of
from scale_core.errors import TransferError
from scale_tp import ColumnParallelLinear, LayerOptions, RowParallelLinear, comm, megatron, sequence_lengths
from scale_tp.sequence_lengths import is_ambiguous, record_lengths, shard_lengths
from scale_tp.split import even_sizes


def test_a_world_of_one_has_the_whole_sequence() -> None:
    record_lengths(Group(), [5])
    assert shard_lengths(Group(), torch.zeros(3, 2), 0) == (3,)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sequences_are_confused_where_a_rank_has_both_alike(num_ranks: int) -> None:
    for first, second in itertools.combinations(range(13), 2):
        one, other = even_sizes(first, num_ranks), even_sizes(second, num_ranks)
        assert is_ambiguous([one, other]) == any(a == b for a, b in zip(one, other, strict=True))
    assert not is_ambiguous([])


def test_lengths_are_remembered_however_often_one_was_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is recomputed asks for the length of a forward that many divisions of another one followed."""
    known, other = sequence_lengths._RecordedLengths(), sequence_lengths._RecordedLengths()  # Those of two ranks.
    for each in (known, other):
        each.record((2, 1))
        for _ in range(100):
            each.record((4, 4))
    assert known.lookup(0, 2) == other.lookup(1, 1) == (2, 1) and known.lookup(0, 4) == (4, 4)
    for each in (known, other):
        each.record((2, 2))  # Rank 0 can't tell, so none may be sure.
    assert known.lookup(0, 2) is other.lookup(1, 1) is known.lookup(0, 4) is None
    # In the end they are forgotten, and nobody has to ask any more.
    monkeypatch.setattr(sequence_lengths, "_NUM_REMEMBERED", 10)
    for _ in range(10):
        known.record((4, 4))
    assert known.lookup(0, 4) == (4, 4) and known.lookup(0, 2) is None and list(known.last_seen) == [(4, 4)]


@torch.no_grad()
def _held(group: Group, own: int) -> tuple[int, ...]:
    return shard_lengths(group, torch.zeros(1, own, 2), 1)


@pytest.mark.ranks(2)
def test_ranks_ask_each_other_only_where_one_can_not_know() -> None:
    group = group_of()
    with mock.patch.object(sequence_lengths, "exchange", wraps=sequence_lengths.exchange) as questions:
        for length in (4, 7, 9):
            sizes = even_sizes(length, group.size)
            assert _held(group, sizes[group.rank]) == sizes
        assert questions.call_count == 3
        for _ in range(20):
            record_lengths(group, even_sizes(4, group.size))
            assert _held(group, even_sizes(4, group.size)[group.rank]) == (2, 2)
        assert questions.call_count == 3
        # Rank 0 has as much of 3 as of 4, so all ask for a while.
        for length in (3, 4, 3, 3, 4):
            record_lengths(group, even_sizes(length, group.size))
            sizes = even_sizes(length, group.size)
            assert _held(group, sizes[group.rank]) == sizes
        assert questions.call_count == 8


@pytest.mark.ranks(2)
def test_parts_of_a_loader_are_known_by_recorded_lengths() -> None:
    """Parts that a loader has divided, of lengths that confuse: through two layers each, as in a training loop."""
    group, found = group_of(), []
    options = {"sequence_parallel": True, "process_group": group}
    for pieces in (None, 2):
        up = ColumnParallelLinear(
            3, 4, **with_options(LayerOptions, gather_output=False, overlap_pieces=pieces, **options)
        )
        down = RowParallelLinear(
            4, 3, **with_options(LayerOptions, input_is_parallel=True, overlap_pieces=pieces, **options)
        )
        for sizes in ((4, 4), (4, 3), (5, 4), (8, 7), (8, 8)):
            part = torch.ones(1, sizes[group.rank], 3)
            scale_tp.record_sequence_lengths(sizes, group)
            hidden = down(up(part)) + part
            found.append(tuple(down(up(hidden)).shape) == tuple(part.shape) and up(part).shape[1] == sum(sizes))
    assert found == [True] * 10


def test_lengths_that_are_recorded_are_those_of_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"a length for each of 2 ranks, got \[3\]"):
        scale_tp.record_sequence_lengths([3], Group(0, 2, None, "fake", (0, 1)))


def test_a_rank_that_waits_for_the_lengths_alone_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(record: object, group: Group) -> None:
        raise TransferError("exchange", 1, "timed out")

    monkeypatch.setattr(sequence_lengths, "exchange", unanswered)
    ranks: Any = Group(0, 2, Handle(), "gloo", (0, 1))  # type: ignore[arg-type]
    with pytest.raises(TransferError) as raised:
        shard_lengths(ranks, torch.zeros(7, 2), 0)
    (note,) = raised.value.__notes__
    assert "rank 0 has 7 positions of the sequence" in note and "scale_tp.record_sequence_lengths(lengths)" in note


def test_a_rank_that_gathers_alone_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(*_: object) -> None:
        raise TransferError("all_gather", 1, "timed out")

    monkeypatch.setattr(comm, "all_gather_along", unanswered)
    ranks: Any = Group(0, 2, Handle(), "gloo", (0, 1))  # type: ignore[arg-type]
    record_lengths(ranks, (3, 2))
    with pytest.raises(TransferError) as raised:
        megatron.gather_from_sequence_parallel_region(torch.ones(3, 2), ranks, dim=0)
    (note,) = raised.value.__notes__
    assert "rank 0 has 3 positions of the sequence" in note and "as long as one of another sequence" in note


class Handle:
    """Stands for a process group, of which nobody is asked."""
