"""execution_order.py: numbers that are the same everywhere, and words for people."""

from __future__ import annotations

from scale_core.comm.collectives import UNIT_TAGS, fingerprint_of
from scale_core.consistency.execution_order import END, Event, message_tag, unit_title


def test_an_identity_is_equal_in_every_process() -> None:
    assert fingerprint_of("forward", "a") == 1450230638849073103
    assert fingerprint_of("ab", "c") != fingerprint_of("a", "bc")


def test_tags_are_those_that_callers_may_choose() -> None:
    tags = {message_tag(Event(phase, unit)) for phase in ("gather", "reduction") for unit in map(str, range(500))}
    assert len(tags) == 1000
    assert all(tag in UNIT_TAGS for tag in tags)


def test_units_and_events_have_names_for_people() -> None:
    assert unit_title("") == "the root unit"
    assert str(Event("forward", "a.b")) == "forward of unit 'a.b'"
    assert str(END) == "the end of the pass"
