"""Actions and their text."""

import pytest

from scale_pipe.schedules.action import Action, Kind


@pytest.mark.parametrize("text", ["F2.5", "I0.0", "W12.3", "B7.31", "SA0.1", "RA1.1", "SG1.1", "RG0.1", "S2"])
def test_an_action_is_read_as_it_is_written(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_the_text_says_kind_stage_and_micro_batch() -> None:
    assert Action.parse("SG3.14") == Action(Kind.SEND_GRADIENT, 3, 14)


@pytest.mark.parametrize("text", ["", "F", "F2", "S2.1", "X1.1", "F1.1 ", "F-1.0"])
def test_what_is_no_action_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected an action such as F2\.5"):
        Action.parse(text)
