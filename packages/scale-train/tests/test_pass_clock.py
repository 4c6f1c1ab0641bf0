from types import SimpleNamespace

import pytest
import torch

from scale_train import state as pass_clock
from scale_train.state import PassClock


def test_a_pass_is_timed_without_the_last_one_of_a_step(monkeypatch):
    times = iter([0.0, 9.0, 10.0, 12.0, 14.0, 16.0])
    monkeypatch.setattr(pass_clock, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = PassClock(torch.device("cpu"))
    assert clock.seconds() is None and clock.seconds_by_batch(1.0, 32) == {}
    for index in (0, 1, 0, 1, 2, 3):  # Of two steps; the passes of the last one take two seconds.
        clock.begin(index)
    assert clock.seconds() == pytest.approx(2.0)
    assert clock.seconds_by_batch(11.0, 32) == pytest.approx({32: 11.0, 8: 5.0})


def test_a_step_of_one_pass_or_one_that_was_faster_than_its_passes_tells_nothing(monkeypatch):
    times = iter([0.0, 5.0, 10.0])
    monkeypatch.setattr(pass_clock, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = PassClock(torch.device("cpu"))
    clock.begin(0)
    assert clock.seconds_by_batch(1.0, 32) == {}
    for index in (0, 1):
        clock.begin(index)
    assert clock.seconds_by_batch(1.0, 32) == {}
