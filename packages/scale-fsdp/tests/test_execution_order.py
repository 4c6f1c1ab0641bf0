"""recovery.py: the passes that other ranks expect, from the history of those before."""

from __future__ import annotations

import pytest

from scale_core.consistency.contract import History
from scale_core.consistency.execution_order import Event, LogEntry, PassKind
from scale_fsdp.runtime.recovery import coming_passes, remaining_passes

FORWARD, BACKWARD = PassKind("forward", True, True), PassKind("backward", True, True)
EVALUATION = PassKind("forward", False, False)


def run(history: History, kind: PassKind, log: str, *, ends: bool = True, closes: bool = False) -> None:
    """A letter is a phase of that unit, a capital one a transfer of its data."""
    history.begin(kind, new_step=kind is not BACKWARD)
    for letter in log:
        if letter.isupper():
            history.log.append(LogEntry(Event("gather", letter.lower()), is_transfer=True))
        else:
            history.add(Event("phase", letter))
    if ends:
        history.end(closes=closes)


def words(log: list[LogEntry]) -> str:
    return "".join(entry.event.unit.upper() if entry.is_transfer else entry.event.unit for entry in log)


def rest(history: History) -> list[str] | None:
    left = remaining_passes(history)
    return None if left is None else [words(each.log) for each in left]


def trained(num_steps: int = 1, *, in_order: bool = False) -> History:
    history = History(in_order=in_order)
    for _ in range(num_steps):
        run(history, FORWARD, "AaBb")
        run(history, BACKWARD, "bBaA", closes=True)
    return history


def test_the_order_is_known_from_the_second_pass_of_a_kind() -> None:
    history = History()
    run(history, FORWARD, "AaBb", ends=False)
    assert not history.matches_last_order and history.order == [] and history.position == 2
    history.end(closes=True)
    run(history, FORWARD, "a", ends=False)
    assert history.num_completed == 1
    assert history.matches_last_order and [event.unit for event in history.order] == ["a", "b"]
    history.add(Event("phase", "c"))
    assert not history.matches_last_order
    run(history, EVALUATION, "a", ends=False)
    assert not history.matches_last_order
    assert list(history.orders) == [FORWARD] and history.last_event == Event("phase", "a")


def test_the_rest_of_a_cycle_is_that_of_the_last_one() -> None:
    history = trained()
    run(history, FORWARD, "AaB", ends=False)
    assert rest(history) == ["b", "bBaA"]
    left = remaining_passes(history)
    assert left is not None and [(each.kind, each.new_step) for each in left] == [(FORWARD, False), (BACKWARD, False)]
    run(history, FORWARD, "AaBb")
    run(history, BACKWARD, "", ends=False)
    assert rest(history) == ["bBaA"]


def test_nothing_is_foretold_in_the_first_cycle_or_off_course() -> None:
    history = History()
    assert rest(history) is None
    run(history, FORWARD, "Aa", ends=False)
    assert rest(history) is None
    history = trained()
    assert rest(history) is None
    run(history, FORWARD, "Bb", ends=False)
    assert rest(history) is None
    run(history, EVALUATION, "Aa", ends=False)
    assert rest(history) is None
    history = trained()
    run(history, FORWARD, "AaBbCc")
    run(history, BACKWARD, "", ends=False)
    assert rest(history) is None


@pytest.mark.parametrize("in_order, expected", [(True, None), (False, ["b", "bBaA"])])
def test_earlier_transfers_count_if_they_are_told_apart(in_order: bool, expected: list[str] | None) -> None:
    history = trained(2, in_order=in_order)
    run(history, FORWARD, "ABa", ends=False)
    assert rest(history) == expected
    run(history, FORWARD, "ABBa", ends=False)
    assert rest(history) is None


def test_the_first_step_predicts_nothing_from_equal_order() -> None:
    # The second one prefetches units that the first one has gathered late.
    history = trained(1, in_order=True)
    run(history, FORWARD, "AaBb")
    assert history.predicts_nothing
    run(history, BACKWARD, "b", ends=False)
    assert rest(history) is None
    history = trained(2, in_order=True)
    run(history, FORWARD, "AaBb")
    assert not history.predicts_nothing
    run(history, BACKWARD, "b", ends=False)
    assert rest(history) == ["BaA"]


def test_cycles_of_another_kind_between_do_not_matter() -> None:
    history = trained()
    run(history, EVALUATION, "AaBb", closes=True)
    run(history, FORWARD, "Aa", ends=False)
    assert rest(history) == ["Bb", "bBaA"]
    history.reset()
    run(history, EVALUATION, "A", ends=False)
    assert rest(history) == ["aBb"]


def test_a_cycle_that_is_broken_off_leaves_the_last_whole_one() -> None:
    history = trained()
    run(history, FORWARD, "AaBb")
    run(history, BACKWARD, "b", ends=False)
    history.reset()
    run(history, FORWARD, "", ends=False)
    assert rest(history) == ["AaBb", "bBaA"]


def test_what_has_begun_to_move_since_the_last_event_is_known() -> None:
    history = History()
    assert not history.is_open
    history.begin(FORWARD, True)
    assert history.is_open and history.transfers == []
    history.log.append(LogEntry(Event("gather", "a#0"), is_transfer=True))
    history.add(Event("forward", "a"))
    assert history.transfers == []
    for number in range(2):
        history.log.append(LogEntry(Event("gather", f"b#{number}"), is_transfer=True))
    assert history.transfers == [Event("gather", "b#0"), Event("gather", "b#1")]
    history.end(closes=True)
    assert not history.is_open


def coming(history: History) -> list[PassKind]:
    return [each.kind for each in coming_passes(history)]


def test_a_backward_is_expected_after_the_forwards_of_a_cycle() -> None:
    history = History()
    run(history, FORWARD, "a")
    assert history.predicts_nothing and coming(history) == []  # There was no cycle yet.
    run(history, FORWARD, "a")
    run(history, BACKWARD, "a", closes=True)
    assert not history.predicts_nothing
    run(history, FORWARD, "a")
    assert coming(history) == []  # Another forward.
    run(history, FORWARD, "a")
    assert coming(history) == [BACKWARD] and not history.predicts_nothing
    history.reset()
    run(history, FORWARD, "ab")  # Another order.
    run(history, FORWARD, "a")
    assert coming(history) == []


def test_nothing_is_expected_where_programs_differ_afterwards() -> None:
    history = History()
    run(history, FORWARD, "a")
    run(history, BACKWARD, "a", closes=True)
    history.unpredictable.add(FORWARD)
    run(history, FORWARD, "a")
    assert history.predicts_nothing and coming(history) == []
    for _ in range(20):  # As of a model that never has a backward.
        run(history, FORWARD, "a")
    assert not history.predicts_nothing
