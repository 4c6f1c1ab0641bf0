"""What a training begins with, its learning rate, and its timers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_trainings import options_for, start

from scale_train.training import state
from scale_train.training.state import LRSchedule, MicrobatchTimer, StepTimer


def test_the_same_seed_builds_the_same_weights(text: Path) -> None:
    first, second = (start(options_for(text)) for _ in range(2))
    for one, other in zip(first.engine.raw_model.parameters(), second.engine.raw_model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.step == 0 and first.saved_step == -1 and first.sampler.num_bytes == len(first.text.train)


@pytest.mark.parametrize(("parallel", "shown"), [("none", False), ("fsdp", True)])
def test_a_bar_is_shown_where_units_get_their_values_one_by_one(text: Path, monkeypatch, parallel, shown):
    plain, asked = state.initialization_bar, []

    def bar(*, shown: bool):
        asked.append(shown)
        return plain(shown=False)

    monkeypatch.setattr(state, "uses_progress_bar", lambda _: True)
    monkeypatch.setattr(state, "initialization_bar", bar)
    start(options_for(text, parallel))
    assert asked == [shown]


def test_speed_leaves_out_pauses_and_the_time_left_does_not(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("scale_train.training.state.time", SimpleNamespace(monotonic=lambda: now.seconds))
    clock = StepTimer(started=100.0, _last=100.0)
    now.seconds, clock.steps = 110.0, 5
    assert clock.steps_per_second() == 0.5
    with clock.paused():
        now.seconds = 118.0
    now.seconds, clock.steps = 120.0, 10
    assert clock.steps_per_second() == 2.5
    assert clock.seconds_for(10) == 20.0


def test_a_pass_is_timed_without_the_last_one_of_a_step(monkeypatch):
    times = iter([0.0, 9.0, 10.0, 12.0, 14.0, 16.0])
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: next(times)))
    timer = MicrobatchTimer(torch.device("cpu"))
    assert timer.microbatch_seconds() is None and timer.step_seconds_by_batch(1.0, 32) == {}
    for index in (0, 1, 0, 1, 2, 3):  # Of two steps; the passes of the last one take two seconds.
        timer.record_start(index)
    assert timer.microbatch_seconds() == pytest.approx(2.0)
    assert timer.step_seconds_by_batch(11.0, 32) == pytest.approx({32: 11.0, 8: 5.0})


def test_a_step_without_a_pass_to_time_tells_nothing(monkeypatch):
    times = iter([0.0, 5.0, 10.0])
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: next(times)))
    timer = MicrobatchTimer(torch.device("cpu"))
    timer.record_start(0)
    assert timer.step_seconds_by_batch(1.0, 32) == {}
    for index in (0, 1):
        timer.record_start(index)
    assert timer.step_seconds_by_batch(1.0, 32) == {}


def test_the_rate_climbs_in_a_line_and_falls_in_half_a_cosine():
    schedule = LRSchedule(peak=1.0, warmup=2, steps=6, floor=0.1)
    assert [round(schedule.at(step), 3) for step in range(7)] == [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]


def test_beyond_the_last_step_the_rate_stays_at_its_floor():
    assert LRSchedule(peak=2.0, warmup=0, steps=4).at(100) == pytest.approx(0.2)


def test_a_warm_up_as_long_as_the_training_never_falls():
    rates = [LRSchedule(peak=1.0, warmup=5, steps=5).at(step) for step in range(5)]
    assert rates == sorted(rates)
