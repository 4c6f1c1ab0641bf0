"""Memory over a step, by numbers that are worked out by hand."""

from scale_checkpoint.planner.timeline import Crossing, Moment, Segment, Way, timeline

KEEP = Way(seconds=1.0, kept_bytes=80, forward_bytes=90, backward_bytes=20)
RECOMPUTE = Way(seconds=1.5, kept_bytes=0, forward_bytes=40, backward_bytes=100)
WAYS = {"keep": KEEP, "recompute": RECOMPUTE}


def test_what_is_kept_stands_at_every_segment_until_its_own_backward() -> None:
    step = timeline([Segment("a", 1, 2, WAYS), Segment("b", 3, 4, WAYS)], (), ["keep", "recompute"])
    assert step.moments == (
        Moment("a", False, 1, 91),
        Moment("b", False, 83, 123),
        Moment("b", True, 84, 184),
        Moment("a", True, 82, 102),
    )
    assert (step.peak_bytes, step.seconds) == (184, 2.5)


def test_a_crossing_that_two_hold_counts_once_until_the_first_of_them() -> None:
    crossing = Crossing(num_bytes=7, born=0, last=1)
    holding = {"keep": Way(1.0, 0, 0, 0, holds=(0,))}
    free = {"keep": Way(1.0, 0, 0, 0)}
    starts = {}
    for name, ways in (("both", [holding, holding]), ("first", [holding, free]), ("second", [free, holding])):
        segments = [Segment(str(j), 0, 0, way) for j, way in enumerate([*ways, free])]
        starts[name] = [moment.start_bytes for moment in timeline(segments, (crossing,), ["keep"] * 3).moments]
    # Forward of 0, 1, 2, then backward of 2, 1, 0: until its last reader a crossing is the profile's, not the plan's.
    assert starts == {
        "both": [0, 0, 7, 7, 7, 7],
        "first": [0, 0, 7, 7, 7, 7],
        "second": [0, 0, 7, 7, 7, 0],
    }


def test_what_is_fetched_early_stands_in_the_backward_between_two_that_fetch() -> None:
    offload = {"offload": Way(1.0, 0, 0, 0, early_bytes=5)}
    keep = {"keep": Way(1.0, 0, 0, 0)}
    segments = [Segment(str(j), 0, 0, ways) for j, ways in enumerate([offload, keep, offload, keep])]
    step = timeline(segments, (), ["offload", "keep", "offload", "keep"])
    assert [moment.start_bytes for moment in step.moments if moment.backward] == [0, 0, 5, 0]


def test_a_step_without_segments_takes_nothing() -> None:
    assert timeline((), (), ()).peak_bytes == 0
