"""The built-in schedules: each runs at any size, holds what it says, and has the bubble that is known of it."""

import pytest
from pipe_schedules import BUILDERS, CAPS

from scale_pipe import Costs, Schedule, simulate
from scale_pipe.schedules.classic import interleaved_1f1b
from scale_pipe.schedules.validate import validate

RANKS, BATCHES = (1, 2, 3, 4, 5), (1, 2, 3, 5, 8)


def bubble(schedule: Schedule, input_gradient: float) -> float:
    """Returns the bubble where F = 1 and I + W = 2, to four digits."""
    times = {"input_gradient": input_gradient, "weight_gradient": 2 - input_gradient}
    return round(simulate(schedule, Costs.uniform(schedule.num_stages, **times)).bubble, 4)


@pytest.mark.parametrize("name", BUILDERS)
def test_each_runs_at_any_size_with_few_micro_batches_too(name: str) -> None:
    cap = CAPS.get(name, lambda ranks: None)
    for ranks in RANKS:
        for batches in BATCHES:
            schedule = BUILDERS[name](ranks, batches)
            assert (schedule.num_ranks, schedule.num_micro_batches) == (ranks, batches)
            validate(schedule, memory_cap=cap(ranks), transport="rendezvous")


@pytest.mark.parametrize("name", BUILDERS)
def test_what_runs_by_rendezvous_runs_in_the_other_two_models(name: str) -> None:
    for ranks, batches in ((2, 1), (3, 5), (4, 8)):
        for transport in ("posted", "buffered"):
            validate(BUILDERS[name](ranks, batches), transport=transport)


@pytest.mark.parametrize("ranks, batches", [(4, 8), (8, 16)])
def test_bubbles_are_those_of_the_formulas(ranks: int, batches: int) -> None:
    fill = ranks - 1
    assert bubble(BUILDERS["gpipe"](ranks, batches), 1) == round(fill / (batches + fill), 4)
    assert bubble(BUILDERS["1f1b"](ranks, batches), 1) == round(fill / (batches + fill), 4)
    assert bubble(BUILDERS["interleaved, 2 stages"](ranks, batches), 1) == round(fill / (2 * batches + fill), 4)
    assert bubble(BUILDERS["zb-h1"](ranks, batches), 1) == round(fill / (3 * batches + fill), 4)
    assert bubble(BUILDERS["zb-v"](ranks, batches), 1) == round(fill / (6 * batches + fill), 4)
    assert bubble(BUILDERS["dualpipe-v"](ranks, batches), 1) == round(fill / (6 * batches + fill), 4)


def test_interleaved_1f1b_is_as_short_as_can_be() -> None:
    for ranks, stages in ((2, 2), (3, 3), (4, 2), (4, 3)):
        for batches in range(ranks, 3 * ranks + 2):
            found = simulate(interleaved_1f1b(ranks, batches, stages))
            assert found.makespan == 3 * batches * stages + 3 * (ranks - 1), (ranks, batches, stages)
    assert simulate(interleaved_1f1b(4, 10)).makespan == 69, "as torch's"


def test_bubbles_at_uneven_costs_are_those_of_torchs_orders() -> None:
    assert [bubble(BUILDERS["dualpipe-v"](4, 8), i) for i in (1.4, 1.6)] == pytest.approx([0.104, 0.134], abs=6e-4)
    assert [bubble(BUILDERS["dualpipe-v"](8, 16), i) for i in (1.4, 1.6)] == pytest.approx([0.130, 0.162], abs=6e-4)


def test_peaks_are_those_that_are_known() -> None:
    peaks = {name: max(simulate(build(4, 8)).peak_live) for name, build in BUILDERS.items()}
    assert peaks["gpipe"] == peaks["breadth-first, 2 stages"] == 8
    assert peaks["1f1b"] == peaks["zb-h1"] == peaks["zb-v"] == 4
    assert peaks["interleaved, 2 stages"] == 5.5
    assert peaks["dualpipe-v"] == 4.5
    assert peaks["v-half"] == 3
    assert peaks["v-min"] == 2


def test_1f1b_holds_fewer_micro_batches_on_later_ranks() -> None:
    assert simulate(BUILDERS["1f1b"](4, 8)).peak_live == (4, 3, 2, 1)


@pytest.mark.parametrize("name", BUILDERS)
def test_sizes_that_are_not_positive_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, but is 0"):
        BUILDERS[name](0, 4)
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1, but is 0"):
        BUILDERS[name](4, 0)
