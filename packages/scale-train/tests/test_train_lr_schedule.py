import pytest

from scale_train.training.state import LRSchedule


def test_the_rate_climbs_in_a_line_and_falls_in_half_a_cosine():
    schedule = LRSchedule(peak=1.0, warmup=2, steps=6, floor=0.1)
    assert [round(schedule.at(step), 3) for step in range(7)] == [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]


def test_beyond_the_last_step_the_rate_stays_at_its_floor():
    assert LRSchedule(peak=2.0, warmup=0, steps=4).at(100) == pytest.approx(0.2)


def test_a_warm_up_as_long_as_the_training_never_falls():
    rates = [LRSchedule(peak=1.0, warmup=5, steps=5).at(step) for step in range(5)]
    assert rates == sorted(rates)
