"""Memory over a step, by numbers that are worked out by hand."""

from scale_checkpoint.planner.timeline import BoundaryTensor, Segment, SegmentPass, StrategyCost, timeline

KEEP = StrategyCost(seconds=1.0, kept_bytes=80, forward_bytes=90, backward_bytes=20)
RECOMPUTE = StrategyCost(seconds=1.5, kept_bytes=0, forward_bytes=40, backward_bytes=100)
STRATEGIES = {"keep": KEEP, "recompute": RECOMPUTE}


def test_kept_memory_counts_until_the_segments_own_backward() -> None:
    step = timeline([Segment("a", 1, 2, STRATEGIES), Segment("b", 3, 4, STRATEGIES)], (), ["keep", "recompute"])
    assert step.passes == (
        SegmentPass("a", False, 1, 91),
        SegmentPass("b", False, 83, 123),
        SegmentPass("b", True, 84, 184),
        SegmentPass("a", True, 82, 102),
    )
    assert (step.peak_bytes, step.seconds) == (184, 2.5)


def test_a_crossing_shared_by_two_segments_counts_once() -> None:
    tensor = BoundaryTensor(num_bytes=7, producer=0, last_reader=1)
    holding = {"keep": StrategyCost(1.0, 0, 0, 0, holds=(0,))}
    free = {"keep": StrategyCost(1.0, 0, 0, 0)}
    starts = {}
    for name, strategies in (("both", [holding, holding]), ("first", [holding, free]), ("second", [free, holding])):
        segments = [Segment(str(j), 0, 0, strategy) for j, strategy in enumerate([*strategies, free])]
        starts[name] = [moment.start_bytes for moment in timeline(segments, (tensor,), ["keep"] * 3).passes]
    # Forward of 0, 1, 2, then backward of 2, 1, 0: until its last reader a tensor is the profile's, not the plan's.
    assert starts == {
        "both": [0, 0, 7, 7, 7, 7],
        "first": [0, 0, 7, 7, 7, 7],
        "second": [0, 0, 7, 7, 7, 0],
    }


def test_early_fetches_count_between_two_fetching_segments() -> None:
    offload = {"offload": StrategyCost(1.0, 0, 0, 0, prefetched_bytes=5)}
    keep = {"keep": StrategyCost(1.0, 0, 0, 0)}
    segments = [Segment(str(j), 0, 0, strategies) for j, strategies in enumerate([offload, keep, offload, keep])]
    step = timeline(segments, (), ["offload", "keep", "offload", "keep"])
    assert [moment.start_bytes for moment in step.passes if moment.backward] == [0, 0, 5, 0]


def test_a_step_without_segments_takes_nothing() -> None:
    assert timeline((), (), ()).peak_bytes == 0
