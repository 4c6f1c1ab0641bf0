"""Measuring a step: what is timed how often, with how many threads, and that no trace is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from scale_checkpoint.planner.step import SHORT_SECONDS, Step, least_seconds, preserve_state, single_threaded

CPU = torch.device("cpu")


def taking(times: list[float], log: list[float]) -> Callable[[], float]:
    def run() -> float:
        log.append(times[min(len(log), len(times) - 1)])
        return log[-1]

    return run


def test_the_least_counts_and_short_times_are_taken_more_often() -> None:
    long: list[float] = []
    assert least_seconds({"a": taking([3.0, 1.0, 2.0], long)}, repeats=3) == {"a": 1.0} and len(long) == 3
    short: list[float] = []
    least_seconds({"a": taking([SHORT_SECONDS / 7.5], short)}, repeats=2)
    assert len(short) == 8
    shortest: list[float] = []
    least_seconds({"a": taking([0.0], shortest)}, repeats=2)
    assert len(shortest) == 40, "a time that is nothing ends, too"
    assert least_seconds({"a": taking([1.0], [])}, repeats=0) == {"a": 0.0}


def test_the_cpu_is_timed_with_one_thread_and_gets_all_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), single_threaded(CPU):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_threaded(torch.device("meta")):
            assert torch.get_num_threads() == 2  # Another device's times are not those of the CPU.
    finally:
        torch.set_num_threads(before)


def test_gradients_buffers_and_random_numbers_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    gradient = model[0].weight.grad = torch.ones(3, 3)
    before, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    with preserve_state(model):
        assert Step(model, torch.randn(4, 3), None).seconds() > 0
        assert model[0].weight.grad is not gradient
    assert model[0].weight.grad is gradient and bool((gradient == 1).all())
    assert all(map(torch.equal, model.buffers(), before)) and torch.equal(torch.get_rng_state(), state)


class Replaces(nn.Module):
    """Assigns a buffer anew, and lets a table grow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("table", torch.zeros(1))
        self.table_length = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        if len(x) > self.table_length:
            self.table, self.table_length = torch.arange(float(len(x))), len(x)
        return x * self.weight * self.calls * self.table[: len(x)]


def test_reassigned_buffers_are_restored_except_grown_tables() -> None:
    model = Replaces()
    calls = model.calls
    with preserve_state(model):
        Step(model, torch.ones(3), None).run()
        assert torch.equal(model.calls, torch.ones(3))
    assert model.calls is calls and torch.equal(calls, torch.zeros(3))
    assert len(model.table) == model.table_length == 3


def test_a_model_that_is_not_initialized_has_nothing_to_measure() -> None:
    for model, name in (
        (nn.Sequential(nn.LazyLinear(2)), "0.weight"),
        (nn.LazyBatchNorm1d(affine=False), "running_me"),
    ):
        with pytest.raises(ValueError, match=rf"'{name}.* of a lazy module has no shape .* call model\(\.\.\.\) once"):
            Step(model, torch.ones(2, 2), None)
