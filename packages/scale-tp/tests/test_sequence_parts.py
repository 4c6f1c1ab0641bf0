"""sequence_parts.py: how long the parts of a sequence are that the ranks hold between two layers."""

from __future__ import annotations

import itertools

import pytest

from scale_core.group import Group, group_of
from scale_core.testing import run_ranks
from scale_tp import sequence_parts
from scale_tp.sequence_parts import may_be_confused, parts_held, tell_parts
from scale_tp.split_sizes import even_sizes


def test_a_world_of_one_has_the_whole_sequence() -> None:
    tell_parts(Group(), [5])
    assert parts_held(Group(), 3) == (3,)


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


def count_questions() -> tuple[int, int, int]:
    group, asked = group_of(), []
    exchange = sequence_parts.exchange
    sequence_parts.exchange = lambda record, ranks: asked.append(record) or exchange(record, ranks)  # type: ignore
    try:
        for length in (4, 7, 9):
            sizes = even_sizes(length, group.size)
            assert parts_held(group, sizes[group.rank]) == sizes
        unknown = len(asked)
        for _ in range(20):
            tell_parts(group, even_sizes(4, group.size))
            assert parts_held(group, even_sizes(4, group.size)[group.rank]) == (2, 2)
        known = len(asked) - unknown
        # Rank 0 has as much of 3 as of 4, so all ask for a while.
        for length in (3, 4, 3, 3, 4):
            tell_parts(group, even_sizes(length, group.size))
            sizes = even_sizes(length, group.size)
            assert parts_held(group, sizes[group.rank]) == sizes
        return unknown, known, len(asked) - known - unknown
    finally:
        sequence_parts.exchange = exchange


def test_ranks_ask_each_other_only_where_one_of_them_can_not_know() -> None:
    assert run_ranks(count_questions, 2) == [(3, 0, 5)] * 2
