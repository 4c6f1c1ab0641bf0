"""sequence_lengths.py: how long the parts of a sequence are that the ranks hold between two layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_core.comm.work import TransferError
from scale_core.testing import run_ranks
from scale_tp import ColumnParallelLinear, RowParallelLinear, scatter_to_sequence_parallel_region
from scale_tp import sequence_lengths as sequence_parts
from scale_tp.sequence_lengths import explained, may_be_confused, parts_held, tell_parts
from scale_tp.split import even_sizes


def test_a_world_of_one_has_the_whole_sequence() -> None:
    tell_parts(Group(), [5])
    assert parts_held(Group(), torch.zeros(3, 2), 0) == (3,)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sequences_can_be_confused_exactly_where_some_rank_has_as_much_of_both(num_ranks: int) -> None:
    for first, second in itertools.combinations(range(13), 2):
        one, other = even_sizes(first, num_ranks), even_sizes(second, num_ranks)
        assert may_be_confused([one, other]) == any(a == b for a, b in zip(one, other, strict=True))
    assert not may_be_confused([])


def test_lengths_are_remembered_however_often_one_of_them_was_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is recomputed asks for the length of a forward that many divisions of another one followed."""
    known, other = sequence_parts._Divided(), sequence_parts._Divided()  # Those of two ranks.
    for each in (known, other):
        each.tell((2, 1))
        for _ in range(100):
            each.tell((4, 4))
    assert known.found(0, 2) == other.found(1, 1) == (2, 1) and known.found(0, 4) == (4, 4)
    for each in (known, other):
        each.tell((2, 2))  # Rank 0 can't tell, so none may be sure.
    assert known.found(0, 2) is other.found(1, 1) is known.found(0, 4) is None
    # In the end they are forgotten, and nobody has to ask any more.
    monkeypatch.setattr(sequence_parts, "_NUM_REMEMBERED", 10)
    for _ in range(10):
        known.tell((4, 4))
    assert known.found(0, 4) == (4, 4) and known.found(0, 2) is None and list(known.last) == [(4, 4)]


@torch.no_grad()
def _held(group: Group, own: int) -> tuple[int, ...]:
    return parts_held(group, torch.zeros(1, own, 2), 1)


def count_questions() -> tuple[int, int, int]:
    group, asked = group_of(), []
    exchange = sequence_parts.exchange
    sequence_parts.exchange = lambda record, ranks: asked.append(record) or exchange(record, ranks)  # type: ignore
    try:
        for length in (4, 7, 9):
            sizes = even_sizes(length, group.size)
            assert _held(group, sizes[group.rank]) == sizes
        unknown = len(asked)
        for _ in range(20):
            tell_parts(group, even_sizes(4, group.size))
            assert _held(group, even_sizes(4, group.size)[group.rank]) == (2, 2)
        known = len(asked) - unknown
        # Rank 0 has as much of 3 as of 4, so all ask for a while.
        for length in (3, 4, 3, 3, 4):
            tell_parts(group, even_sizes(length, group.size))
            sizes = even_sizes(length, group.size)
            assert _held(group, sizes[group.rank]) == sizes
        return unknown, known, len(asked) - known - unknown
    finally:
        sequence_parts.exchange = exchange


def test_ranks_ask_each_other_only_where_one_of_them_can_not_know() -> None:
    assert run_ranks(count_questions, 2) == [(3, 0, 5)] * 2


def of_a_loader() -> list[bool]:
    """Parts that nobody has told of, of lengths that confuse: through two layers each, as in a training loop."""
    group, found = group_of(), []
    asked: list[int] = []
    exchange = sequence_parts.exchange
    sequence_parts.exchange = lambda record, ranks: asked.append(record) or exchange(record, ranks)  # type: ignore
    options = {"sequence_parallel": True, "group": group}
    for pieces in (None, 2):
        up = ColumnParallelLinear(3, 4, gather_output=False, overlap_pieces=pieces, **options)
        down = RowParallelLinear(4, 3, input_is_parallel=True, overlap_pieces=pieces, **options)
        for sizes in ((4, 4), (4, 3), (5, 4), (8, 7), (8, 8)):
            part = torch.ones(1, sizes[group.rank], 3)
            asked.clear()
            hidden = down(up(part)) + part
            assert len(asked) == 1, "what the layers divide themselves is known"
            found.append(tuple(down(up(hidden)).shape) == tuple(part.shape) and up(part).shape[1] == sum(sizes))
    # A loader's part times what all of another sequence gives, of which rank 0 has as much.
    other = scatter_to_sequence_parallel_region(torch.ones(1, 5, 3, requires_grad=True), group, dim=1)
    gates = (other.mean(), other[:, :1], other.sum(1, keepdim=True))
    found += [up(torch.ones(1, 3, 3) * gate).shape[1] == 6 for gate in gates]
    sequence_parts.exchange = exchange
    return found


def test_parts_of_a_loader_of_data_are_asked_for_though_one_rank_has_had_as_much() -> None:
    assert run_ranks(of_a_loader, 2) == [[True] * 13] * 2


def test_a_rank_that_asks_alone_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(record: object, group: Group) -> None:
        raise TransferError("exchange", 1, "timed out")

    monkeypatch.setattr(sequence_parts, "exchange", unanswered)
    for enabled, expected, absent in ((False, WITHOUT_A_GRAPH, "alone"), (True, "lengthens its part alone", "no_grad")):
        with pytest.raises(TransferError) as raised, torch.set_grad_enabled(enabled):
            sequence_parts._asked(Group(0, 2, None, "gloo", (0, 1)), 7)
        (note,) = raised.value.__notes__
        assert "rank 0 asked how long the parts of a sequence are, of which it has 7" in note
        assert expected in note and absent not in note


WITHOUT_A_GRAPH = "Without a graph, as under torch.no_grad() and in the forward of a reentrant checkpoint"


def test_a_rank_that_gathers_alone_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Group(0, 2, None, "gloo", (0, 1))

    def unanswered() -> None:
        raise TransferError("all_gather", 1, "timed out")

    monkeypatch.setattr(sequence_parts, "parts_remembered", lambda group, own: (3, 2) if own == 3 else None)
    part = scatter_to_sequence_parallel_region(torch.ones(5, 2, requires_grad=True), ranks, dim=0)
    for enabled, expected, absent in ((False, WITHOUT_A_GRAPH, "alone"), (True, "lengthens its part alone", "no_grad")):
        with pytest.raises(TransferError) as raised, torch.set_grad_enabled(enabled):
            explained(unanswered, ranks, part, 0, (3, 2))
        (note,) = raised.value.__notes__
        assert "rank 0 has 3 positions of a sequence that was divided into [3, 2]" in note
        assert expected in note and absent not in note
    with pytest.raises(TransferError) as raised:  # What has been asked is known.
        explained(unanswered, ranks, part.detach(), 0, (3, 2))
    assert not hasattr(raised.value, "__notes__")


class Handle:
    """Stands for a process group, of which nobody is asked."""


def test_a_part_that_was_stretched_is_refused_before_anything_is_sent() -> None:
    ranks: Any = Group(0, 2, Handle(), "gloo", (0, 1))  # type: ignore[arg-type]
    part = scatter_to_sequence_parallel_region(torch.ones(1, 2, 3, requires_grad=True), ranks, dim=1)
    assert parts_held(ranks, part * 2, 1) == (1, 1)
    with pytest.raises(
        ValueError, match=r"rank 0 has 4 positions of .* divided into \[1, 1\] .* gather what is of anoth"
    ):
        parts_held(ranks, torch.ones(1, 4, 3) * part, 1)
