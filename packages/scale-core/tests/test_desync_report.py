"""flight_recorder.py: an error says who differs and where first, in the fewest words that say it."""

from __future__ import annotations

from scale_core.consistency.flight_recorder import (
    RankRecord,
    are_at_different_places,
    by_rank,
    format_desync,
    format_failures,
)


def test_ranks_that_say_the_same_stand_together() -> None:
    assert by_rank(["x"]) == "rank 0: x"
    assert by_rank(["x", "y", "x", "z", "y"]) == "ranks 0, 2: x; ranks 1, 4: y; rank 3: z"


def test_ranks_at_different_places_are_named_with_last_events() -> None:
    words = format_desync([RankRecord("here", ["a"], ["a", "b"]), RankRecord("there", ["a"], [])], "what they ran")
    assert words == (
        "the ranks are about to run different things: rank 0: here; rank 1: there. What they ran last: rank 0: a; "
        "then b; rank 1: nothing"
    )


def test_ranks_at_different_things_in_the_same_way_are_named() -> None:
    at_a, at_b = (RankRecord("the check", ["same"], [], of) for of in ("model a", "model b"))
    assert are_at_different_places([at_a, at_b]) and not are_at_different_places([at_a, at_a])
    words = format_desync([at_a, at_b], "it")
    assert words == "the ranks are about to run different units: rank 0: model a; rank 1: model b"


def test_ranks_at_one_place_are_named_by_their_first_difference() -> None:
    def standing(*lines: str) -> RankRecord:
        return RankRecord("the end", list(lines), [])

    assert format_desync([standing("a", "b", "c"), standing("a", "x"), standing("a", "b")], "the model") == (
        "the ranks differ in the model, first at place 2: ranks 0, 2: b; rank 1: x"
    )
    assert format_desync([standing("a", "b"), standing("a")], "it").endswith("place 2: rank 0: b; rank 1: nothing more")
    # More was done than is kept: what differs is among what was forgotten.
    assert format_desync([standing("a"), standing("a")], "it") == "the ranks differ in it"


def test_only_those_who_have_failed_are_named() -> None:
    assert format_failures(["", "ValueError", ""]).endswith("some have failed: rank 1: ValueError")
