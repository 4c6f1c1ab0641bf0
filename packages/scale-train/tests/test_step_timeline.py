"""benchmarks/step_timeline.py: how much communication a step waits for; none of these figures may grow."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.simulation


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import step_timeline

    yield step_timeline
    for name in ("async_tp", "step_timeline", "report"):
        sys.modules.pop(name, None)


def test_a_reduction_runs_during_the_backward_of_a_full_unit(timeline: Any) -> None:
    """At 80 GB/s both take about as long: what waits at the first gradient does one after the other."""
    early, late = (
        timeline.measure(engine, 80, layers=4, width=4096, tokens=8192)
        for engine in ("fully_shard, waiting at the first gradient", "fully_shard")
    )
    assert late.step_seconds < 0.9 * early.step_seconds
    block_bytes = 4 * 4 * 4096**2 * 4  # One more flat gradient, in fp32
    assert late.peak_bytes <= early.peak_bytes + block_bytes


def test_a_step_waits_for_one_gather_more_than_torchs_at_most(timeline: Any) -> None:
    """The first one of the backward: torch's begins while the forward still computes, on a stream of its own."""
    ours, torchs = (timeline.measure(engine, 80, 4, 4096, 8192) for engine in ("fully_shard", "FSDP2"))
    gather_seconds = 4 * 4 * 4096**2 * 2 / 80e9
    assert ours.exposed_seconds <= torchs.exposed_seconds + gather_seconds


def test_pieces_hide_most_communication_of_divided_layers(timeline: Any) -> None:
    async_tp = importlib.import_module("async_tp")
    plain, overlapped = (async_tp.measure(True, pieces, 200, 2, 4096, 8192) for pieces in (None, 4))
    assert overlapped.exposed_seconds < 0.5 * plain.exposed_seconds
    assert overlapped.step_seconds < 0.9 * plain.step_seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_receives_ahead_make_a_pipeline_faster(name: str, timeline: Any) -> None:
    result = timeline.measure_pipeline(name, 40)
    assert result.without_transfers < result.ahead < result.at_their_turn


def test_transfers_pass_one_after_the_other_between_two_ranks(timeline: Any) -> None:
    """Of two ranks and two micro-batches: F0 F1 on the first, then both there and back."""
    programs = timeline.build_programs(timeline.get_schedule("gpipe", 2, 2, 1), timeline.CrossStageTensors())
    forward, transfer = timeline.FORWARD_SECONDS, timeline.FORWARD_SECONDS / 2
    # F0, its transfer; the second rank computes F0 and F1, whose transfer has ended by then, and both backwards;
    # the gradient of the second arrives last, and is used.
    late = timeline.makespan(programs, 1, transfer, ahead=False)
    ahead = timeline.makespan(programs, 1, transfer, ahead=True)
    assert timeline.makespan(programs, 1, 0.0, ahead=True) == pytest.approx(9 * forward)
    assert 9 * forward + 2 * transfer <= ahead + 1e-9 < late
