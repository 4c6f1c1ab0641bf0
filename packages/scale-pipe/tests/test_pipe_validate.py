"""The validator finds each kind of mistake, and says rank, action and reason."""

from dataclasses import replace
from typing import Any

import pytest
from pipe_schedules import changed

from scale_pipe import Schedule
from scale_pipe.schedules.action import Action
from scale_pipe.schedules.classic import gpipe
from scale_pipe.schedules.lowering import build_schedule
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import DeadlockError, MemoryCapError, ScheduleError
from scale_pipe.schedules.validate import validate
from scale_pipe.schedules.zero_bubble import zb_h1


def swapped(schedule: Schedule, rank: int, one: str, other: str) -> Schedule:
    """Returns a schedule in which two actions of a rank have changed places."""

    def change(row: list[Action]) -> None:
        first, second = row.index(Action.parse(one)), row.index(Action.parse(other))
        row[first], row[second] = row[second], row[first]

    return changed(schedule, rank, change)


def refused(schedule: Schedule, rank: int, action: str, told: str, **options: Any) -> None:
    """Checks that a schedule is refused for this."""
    with pytest.raises(ScheduleError, match=told) as caught:
        validate(schedule, **options)
    assert (caught.value.rank, str(caught.value.action)) == (rank, action)
    assert str(caught.value).startswith(f"rank {rank}, {action}: ")


def test_an_action_that_is_missing_is_named() -> None:
    refused(changed(gpipe(2, 2), 1, lambda row: row.remove(Action.parse("B1.1"))), 1, "I1.1", "is missing")
    refused(changed(gpipe(2, 2), 0, lambda row: row.remove(Action.parse("SA0.1"))), 0, "SA0.1", "is missing")
    refused(changed(gpipe(2, 2), 0, lambda row: row.remove(Action.parse("S0"))), 0, "S0", "is missing")


def test_an_action_that_stands_twice_is_named() -> None:
    refused(changed(gpipe(2, 2), 0, lambda row: row.insert(0, Action.parse("F0.1"))), 0, "F0.1", "a second time")
    refused(changed(gpipe(2, 2), 1, lambda row: row.insert(0, Action.parse("W1.0"))), 1, "B1.0", "a second time")


@pytest.mark.parametrize(
    "action, told",
    [
        ("F1.0", "stage 1 is on rank 1"),
        ("F5.0", "there are stages 0 to 1 only"),
        ("F0.2", "there are micro-batches 0 to 1 only"),
        ("SG0.0", "nothing to transfer"),
    ],
)
def test_an_action_that_belongs_elsewhere_is_named(action: str, told: str) -> None:
    refused(changed(gpipe(2, 2), 0, lambda row: row.append(Action.parse(action))), 0, action, told)


def test_an_action_before_what_it_needs_is_named() -> None:
    refused(swapped(gpipe(2, 2), 0, "F0.0", "SA0.0"), 0, "SA0.0", "needs F0.0")
    refused(swapped(gpipe(2, 2), 1, "RA1.0", "F1.0"), 1, "F1.0", "needs RA1.0")
    refused(swapped(zb_h1(2, 2), 1, "I1.0", "W1.0"), 1, "W1.0", "needs I1.0")
    refused(swapped(gpipe(2, 2), 0, "S0", "B0.0"), 0, "S0", "needs W0.0")


def test_ranks_that_wait_for_one_another_are_named() -> None:
    # rank 1 receives in the other order than rank 0 sends
    crossed = swapped(gpipe(2, 2), 1, "RA1.0", "RA1.1")
    crossed = swapped(crossed, 1, "F1.0", "F1.1")
    validate(crossed, transport="posted")
    validate(replace(gpipe(2, 2), actions=[*map(list, gpipe(2, 2).actions)]), transport="rendezvous")
    refused(crossed, 1, "RA1.1", "would receive SA0.0 of rank 0", transport="buffered")
    with pytest.raises(DeadlockError, match=r"rank 0 waits at SA0\.0 for RA1\.0 of rank 1; rank 1 waits at RA1\.1"):
        validate(crossed, transport="rendezvous")


def test_a_real_deadlock_is_found_in_every_model() -> None:
    placement = StagePlacement.loop(2)
    rows = ("F0.0 SA0.0 RG0.0 B0.0 F0.1 SA0.1 RG0.1 B0.1 S0", "RA1.0 RA1.1 F1.0 F1.1 B1.0 SG1.0 B1.1 SG1.1 S1")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule("stuck", placement, 2, actions)
    for transport in ("posted", "buffered", "rendezvous"):
        with pytest.raises(
            DeadlockError, match=r"rank 0 waits at .* for .* of rank 1; rank 1 waits at .* for .* of rank 0"
        ):
            validate(schedule, transport=transport)


def test_orders_that_deadlock_are_refused_where_they_are_woven() -> None:
    orders = [[Action.parse(text) for text in row.split()] for row in ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")]
    with pytest.raises(DeadlockError, match=r"rank 0 waits before B0\.0 for I1\.0 or B1\.0; rank 1 waits before F1\.1"):
        build_schedule("stuck", StagePlacement.loop(2), 2, orders)


def test_the_action_that_goes_over_the_memory_cap_is_named() -> None:
    validate(gpipe(2, 4), memory_cap=4)
    refused(gpipe(2, 4), 0, "F0.3", "holds 4 micro-batches .* where 3.5 fit", memory_cap=3.5)
    with pytest.raises(MemoryCapError, match="rank 1"):
        validate(gpipe(2, 4), memory_cap=(4, 3))


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="expected transport to be one of posted, buffered, rendezvous"):
        validate(gpipe(2, 2), transport="pigeon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a memory_cap for each of 2 ranks, or one number, but got 3"):
        validate(gpipe(2, 2), memory_cap=(1, 2, 3))
    with pytest.raises(ValueError, match=r"memory_cap must be positive, but is 0\.0 for rank 0"):
        validate(gpipe(2, 2), memory_cap=0)
