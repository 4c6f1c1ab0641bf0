"""Where stages stand."""

import pytest

from scale_pipe.schedules.placement import StagePlacement


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
