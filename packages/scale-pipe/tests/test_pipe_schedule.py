"""A schedule is data: printed, saved, and read again."""

from pathlib import Path

import pytest
from pipe_schedules import BUILDERS

from scale_pipe import Schedule
from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.classic import one_forward_one_backward
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.registry import get_schedule
from scale_pipe.schedules.zero_bubble import zb_v


def test_a_schedule_prints_as_the_table_of_what_ranks_compute() -> None:
    assert str(one_forward_one_backward(2, 3)).splitlines() == [
        "1F1B: 2 stages on 2 ranks (loop), 3 micro-batches",
        "rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
        "rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
    ]


def test_what_is_no_schedule_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"expected a schedule or its name, but got int: one of 1f1b|gpipe"):
        get_schedule(4, 2, 4, None)  # type: ignore[arg-type]


def test_a_whole_list_has_transfers_and_the_step_in_it() -> None:
    schedule = one_forward_one_backward(2, 1)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 SA0.0 RG0.0 B0.0 S0",
        "RA1.0 F1.0 B1.0 SG1.0 S1",
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_saved_is_read_as_the_same_schedule(name: str, tmp_path: Path) -> None:
    schedule = BUILDERS[name](3, 5)
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule


def test_a_file_that_holds_no_schedule_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    for text, told in (
        ("{", "Expecting"),
        ("[]", "no schedule"),
        ('{"format": 7}', "format 7; build it again"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=told) as caught:
            Schedule.load(path)
        assert str(path) in str(caught.value)


def test_there_is_one_list_for_each_rank() -> None:
    with pytest.raises(ValueError, match="the placement has 3 ranks, but there are 2 lists"):
        Schedule("short", StagePlacement.loop(3), 1, ((), ()))


def test_a_schedule_says_whether_gradients_are_computed_apart() -> None:
    assert zb_v(2, 4).splits_backward
    assert not one_forward_one_backward(2, 4).splits_backward


@pytest.mark.parametrize("text", ["F2.5", "I0.0", "W12.3", "B7.31", "SA0.1", "RA1.1", "SG1.1", "RG0.1", "S2"])
def test_an_action_is_read_as_it_is_written(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_the_text_says_kind_stage_and_micro_batch() -> None:
    assert Action.parse("SG3.14") == Action(Kind.SEND_GRADIENT, 3, 14)


@pytest.mark.parametrize("text", ["", "F", "F2", "S2.1", "X1.1", "F1.1 ", "F-1.0"])
def test_what_is_no_action_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected an action such as F2\.5"):
        Action.parse(text)


def test_placements_are_those_of_the_table() -> None:
    assert StagePlacement.loop(4, 2).stages_of == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert StagePlacement.wave(4).stages_of == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert StagePlacement.wave(4, 4).stages_of == ((0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12))


def test_a_placement_says_its_shape() -> None:
    shapes = [
        StagePlacement.loop(3),
        StagePlacement.loop(3, 2),
        StagePlacement.wave(3),
        StagePlacement.wave(3, 4),
        StagePlacement((0, 0, 1)),
    ]
    assert [one.shape for one in shapes] == ["loop", "loop", "V", "wave", "ranks 0 0 1"]


@pytest.mark.parametrize(
    "rank_of, told", [((), "at least one stage"), ((0, 2), "rank 1 holds none"), ((0, -1), "there is rank -1")]
)
def test_a_placement_without_a_stage_for_each_rank_is_refused(rank_of: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        StagePlacement(rank_of)


def test_numbers_are_positive_integers() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, but is 0"):
        StagePlacement.wave(0)
    with pytest.raises(TypeError, match=r"stages_per_rank must be an integer, but is 2\.0"):
        StagePlacement.loop(4, 2.0)  # type: ignore[arg-type]
