"""Schedules in time: against formulas, by hand, and against the solver's own evaluation."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pipe_schedules import BUILDERS

from scale_pipe import Costs, simulate
from scale_pipe.schedules.classic import gpipe, one_forward_one_backward
from scale_pipe.schedules.list_scheduling import Problem, evaluate
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.solver.bounds import lower_bound
from scale_pipe.schedules.visualize import chrome_trace, draw, save_chrome_trace, save_drawing
from scale_pipe.schedules.zero_bubble import zb_v

UNEVEN = Costs.measured([1.0, 2.0], [1.5, 1.0], [0.5, 0.25], link=0.5)


def test_two_ranks_and_one_micro_batch_pass_as_by_hand() -> None:
    spans = {str(span.action): (span.start, span.end) for span in simulate(gpipe(2, 1), UNEVEN).spans}
    assert spans == {
        "F0.0": (0, 1),
        "SA0.0": (1, 1.5),
        "F1.0": (1.5, 3.5),
        "B1.0": (3.5, 4.75),
        "SG1.0": (4.75, 5.25),
        "B0.0": (5.25, 7.25),
    }


def test_tensors_pass_one_after_another_over_a_link() -> None:
    slow = Costs.uniform(2, link=5.0)
    sends = [span for span in simulate(gpipe(2, 3), slow).spans if str(span.action).startswith("SA")]
    assert [(span.start, span.end) for span in sends] == [(1, 6), (6, 11), (11, 16)]


def test_the_bubble_is_that_of_the_busiest_rank() -> None:
    simulation = simulate(gpipe(2, 4), Costs.measured([1, 3], [1, 3], [1, 3]))
    assert simulation.busy == (12, 36)
    assert simulation.bubble == 1 - 36 / simulation.makespan
    assert simulation.idle[0] == 1 - 12 / simulation.makespan


def test_live_micro_batches_rise_and_fall_with_the_passes() -> None:
    simulation = simulate(one_forward_one_backward(2, 2))
    assert simulation.live_over_time(0) == [(0, 0), (0, 1), (1, 2), (6, 1), (9, 0)]


def test_a_simulation_prints_as_a_table() -> None:
    assert str(simulate(one_forward_one_backward(2, 3))).splitlines() == [
        "1F1B: makespan 12, bubble 25.00%, peak 2 live micro-batches",
        "rank      busy     idle   peak",
        "   0         9   25.00%      2",
        "   1         9   25.00%      1",
    ]


@pytest.mark.parametrize("link", [0.0, 0.3])
def test_the_solver_and_the_simulator_agree_on_every_builder(link: float) -> None:
    for name, build in BUILDERS.items():
        schedule = build(3, 5)
        if not schedule.splits_backward:
            continue  # the solver sends a gradient before it computes those of the weights
        stages = schedule.num_stages
        costs = Costs.measured(
            [1 + stage / 8 for stage in range(stages)],
            [1.25] * stages,
            [0.5 + stage / 16 for stage in range(stages)],
            link,
        )
        problem = Problem.build(schedule.placement, 5, costs, (100,) * 3)
        rank_ends = evaluate(problem, problem.codes(schedule.compute_actions()))
        if name != "dualpipe-v":  # it has backwards of both kinds together, too
            assert max(rank_ends) == pytest.approx(simulate(schedule, costs).makespan, rel=1e-12)
        assert max(rank_ends) <= simulate(schedule, costs).makespan + 1e-9


def test_no_schedule_beats_its_bound() -> None:
    for build in BUILDERS.values():
        for ranks, batches in ((1, 2), (2, 1), (3, 5), (4, 8)):
            schedule = build(ranks, batches)
            stages = schedule.num_stages
            costs = Costs.measured(
                [1.0 + s % 3 for s in range(stages)], [1.5] * stages, [0.25 * s for s in range(stages)], 0.1
            )
            simulation = simulate(schedule, costs)
            caps = simulation.peak_live
            assert simulation.makespan >= lower_bound(schedule.placement, batches, costs, caps).makespan - 1e-9


@pytest.mark.parametrize(
    "ranks, batches, input_gradient, bubbles",
    [
        # V at peak P, P + 1, 1.5 P and without a cap; loop at P; wave of four at P: the bounds of the guide
        (4, 8, 1.0, (0.0588, 0.0588, 0.0588, 0.0588, 0.0588, 0.0303)),
        (4, 8, 1.4, (0.0805, 0.0588, 0.0588, 0.0588, 0.0805, 0.0419)),
        (4, 8, 1.6, (0.1241, 0.0805, 0.0661, 0.0588, 0.0943, 0.0476)),
        (8, 16, 1.4, (0.0994, 0.0751, 0.0680, 0.0680, 0.0926, 0.0486)),
        (8, 16, 1.6, (0.1459, 0.1241, 0.0857, 0.0680, 0.1128, 0.0551)),
    ],
)
def test_bounds_are_those_of_the_table(
    ranks: int, batches: int, input_gradient: float, bubbles: tuple[float, ...]
) -> None:
    def bound(placement: StagePlacement, cap: float | None) -> float:
        times = {"input_gradient": input_gradient, "weight_gradient": 2 - input_gradient}
        return round(lower_bound(placement, batches, Costs.uniform(placement.num_stages, **times), cap).bubble, 4)

    v, loop, wave = StagePlacement.wave(ranks), StagePlacement.loop(ranks, 2), StagePlacement.wave(ranks, 4)
    found = [bound(v, cap) for cap in (ranks, ranks + 1, 1.5 * ranks, None)] + [bound(loop, ranks), bound(wave, ranks)]
    assert found == list(bubbles)


def test_costs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_gradient has 1 where 2 are needed"):
        Costs.measured([1, 1], [1, 1], [1])
    with pytest.raises(ValueError, match=r"finite and not negative, but forward\[1\] is -1"):
        Costs.measured([1, -1], [1, 1], [1, 1])
    with pytest.raises(ValueError, match="the placement has 2 stages, but there are costs for 3"):
        simulate(gpipe(2, 2), Costs.uniform(3))


SVG = "{http://www.w3.org/2000/svg}"


def test_a_drawing_has_a_box_per_computation_a_row_per_rank() -> None:
    simulation = simulate(zb_v(2, 3))
    root = ElementTree.fromstring(draw(simulation))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 3 * 4 * 3
    assert "F0.0: 0 to 1" in titles
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "forward", "gradient of inputs", "gradient of weights"} <= set(texts)
    kinds = [box for box in root.iter(f"{SVG}rect") if box.get("width") == box.get("height") == "14"]
    places = [float(box.get("x", 0)) for box in kinds]  # of the legend, beside one another
    assert len(places) == 3 and places == sorted(set(places)) and places[0] >= 0


def test_several_simulations_are_drawn_on_one_scale() -> None:
    planned, other = simulate(gpipe(2, 2)), simulate(gpipe(2, 4))
    root = ElementTree.fromstring(draw([planned, other]))
    bands = [float(box.get("width", 0)) for box in root.iter(f"{SVG}rect") if box.get("fill") == "#eeeeee"]
    assert bands[0] / bands[2] == pytest.approx(planned.makespan / other.makespan, abs=1e-3)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one simulation"):
        draw([])
    with pytest.raises(ValueError, match="width is 5"):
        draw(simulate(gpipe(2, 2)), width=5)


def test_a_trace_has_each_action_in_microseconds(tmp_path: Path) -> None:
    simulation = simulate(gpipe(2, 2))
    events = chrome_trace(simulation)["traceEvents"]
    timed = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(timed) == len(simulation.spans)
    assert (timed["F1.0"]["pid"], timed["F1.0"]["ts"], timed["F1.0"]["dur"]) == (1, 1e6, 1e6)
    save_chrome_trace(simulation, tmp_path / "trace.json")
    save_drawing(simulation, tmp_path / "picture.svg")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == events
    assert (tmp_path / "picture.svg").read_text() == draw(simulation)
