"""Balances: what is dear gets fewer neighbors, whether it is dear in time, in memory, or in the step."""

import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import scale_pipe.partition.balance as balance_module
from scale_check.exact import gather_values
from scale_core import Group
from scale_pipe import Costs, balance_by_size, balance_by_time, profile_stages, simulate
from scale_pipe.partition.balance import balance_by_makespan, best_balance
from scale_pipe.partition.block_partition import block_partition
from scale_pipe.partition.profile import StageTimes
from scale_pipe.schedules.classic import one_forward_one_backward


class Repeat(nn.Module):
    """Multiplies `number` times."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.number):
            x = x @ self.weight
        return x


def test_time_is_balanced() -> None:
    sample = torch.randn(64, 64)
    module = nn.Sequential(*(Repeat(number) for number in (100, 1, 1, 1, 1, 1)), nn.ReLU(inplace=True))
    assert balance_by_time(2, module, sample, seconds=0.3) == [1, 6]
    module = nn.Sequential(*reversed([*module]))
    assert balance_by_time(2, module, sample, seconds=0.3) == [6, 1]


class Waits(nn.Module):
    """Takes time without computing, as a layer does that asks another program."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__()
        self.seconds, self._clock = seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        self._clock[0] += self.seconds
        return x

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return Waits(self.seconds, self._clock)


def test_a_layer_that_waits_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    layers = [Waits(seconds, clock) for seconds in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)]
    assert balance_by_time(2, nn.Sequential(*layers), torch.rand(1), seconds=0.0) == [4, 2]
    assert balance_by_time(2, nn.Sequential(*reversed(layers)), torch.rand(1), seconds=0.0) == [2, 4]
    costs = profile_stages(layers[:3], torch.rand(1), seconds=0.0)
    assert costs.forward == pytest.approx((0.01, 0.02, 0.03)) and costs.weight_gradient == (0.0, 0.0, 0.0)


def test_the_timeout_is_wall_clock_and_the_quickest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs = [0.0], []

    class Slows(Waits):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(self.seconds)
            self.seconds += 1.0  # The first run, with 1.0, is not measured: the quickest of the others has 2.0.
            return super().forward(x)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    costs = profile_stages([Slows(0.0, clock)], torch.rand(1), seconds=10.0)
    assert costs.forward == (2.0,)
    assert runs == [0.0, 1.0, 2.0, 3.0, 4.0], "after two runs 3 + 4 + 5 seconds are more than 10"


@pytest.mark.ranks(2)
def test_ranks_that_measure_different_times_get_one_balance() -> None:
    """Each rank measures other times: rank 0 finds the first layer slow, rank 1 the last."""
    slow = torch.distributed.get_rank() * 5
    times = [StageTimes(9.0 if number == slow else 1.0, 0.0, 0.0) for number in range(6)]
    module, sample = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))), torch.ones(1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance_module, "layer_times", lambda *_: times)
        balances = [
            balance_by_time(2, module, sample),
            balance_by_makespan(2, module, sample, 4),
            balance_by_time(2, module, sample, process_group=Group()),
        ]
    first, second = gather_values(balances)
    assert first[:2] == second[:2] == [[3, 3], [3, 3]]
    assert (first[2], second[2]) == ([1, 5], [5, 1]), "by itself a rank uses its own times"


def test_memory_is_balanced_exactly() -> None:
    class Wide(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).repeat(1, self.times).tanh()[:, : x.shape[1]] + 0

    module = nn.Sequential(Wide(1), Wide(1), Wide(1), Wide(20))
    assert balance_by_size(2, module, torch.randn(8, 16)) == [3, 1]
    heavy = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4), *(nn.Linear(4, 4) for _ in range(4)))
    assert balance_by_size(2, heavy, torch.randn(2, 4), param_scale=4.0) == [1, 5]
    # With more micro-batches the activations count for less, and without parameters for all.
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64), nn.Identity())
    sample = torch.randn(64, 8)
    assert balance_by_size(2, layers, sample, param_scale=0.0) == [2, 2]
    assert balance_by_size(2, layers, sample, chunks=64, param_scale=100.0) == [2, 2]


def test_cuts_are_moved_where_the_simulated_step_becomes_shorter() -> None:
    times = [StageTimes(1.0, 1.0, 1.0)] * 6 + [StageTimes(6.0, 0.0, 0.0)] + [StageTimes(0.5, 1.0, 0.5)] * 2
    schedule = one_forward_one_backward(3, 4)

    def makespan(costs: Costs) -> float:
        return simulate(schedule, costs).makespan

    def makespan_of(balance: list[int]) -> float:
        sums, start = [], 0
        for number in balance:
            sums.append([sum(column) for column in zip(*times[start : start + number], strict=True)])
            start += number
        return makespan(Costs.measured(*(list(column) for column in zip(*sums, strict=True))))  # type: ignore[arg-type]

    found = best_balance(times, 3, makespan)
    every = [[a, b, 9 - a - b] for a in range(1, 8) for b in range(1, 9 - a)]
    assert makespan_of(found) == pytest.approx(min(map(makespan_of, every)))
    assert best_balance(times, 3, makespan, max_balances=1) == [3, 3, 3]
    tried: list[Costs] = []

    def counted(costs: Costs) -> float:
        tried.append(costs)
        return makespan(costs)

    best_balance(times, 3, counted, max_balances=4)
    assert len(tried) == 4


def test_the_step_is_balanced_for_schedules_by_name() -> None:
    module, sample = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(4, 8)
    for partitions, schedule in ((2, "1f1b"), (4, "zb_v"), (2, "solve")):
        balance = balance_by_makespan(partitions, module, sample, 4, schedule=schedule, seconds=0.0)
        assert len(balance) == partitions and sum(balance) == 6 and min(balance) >= 1
    with pytest.raises(ValueError, match=r"'zb_v' has 2 stages on each rank.*partitions is 3"):
        balance_by_makespan(3, module, sample, 4, schedule="zb_v")


def test_numbers_that_do_not_fit_are_named() -> None:
    module, sample = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    with pytest.raises(ValueError, match="partitions is 2, but the module has only 1 layers"):
        balance_by_time(2, module, sample)
    with pytest.raises(ValueError, match="partitions must be at least 1, but is 0"):
        balance_by_time(0, module, sample)
    with pytest.raises(ValueError, match="number of chunks must be positive integer, got 0"):
        balance_by_size(1, module, sample, chunks=0)
    many: Any = "2"
    with pytest.raises(TypeError, match="partitions must be an integer, but is '2'"):
        balance_by_time(many, module, sample)
    with pytest.raises(ValueError, match="param_scale must not be negative, but is -1"):
        balance_by_size(1, module, sample, param_scale=-1.0)


def all_partitions(length: int, num_blocks: int) -> list[list[int]]:
    cuts = (combinations(range(1, length), num_blocks - 1)) if num_blocks > 1 else [()]
    return [[end - start for start, end in pairwise((0, *cut, length))] for cut in cuts]


def block_sums(costs: list[int], sizes: list[int]) -> list[int]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_dearest_block_is_cheap_then_the_sums_are_even(costs: list[int], data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, len(costs)))

    def key(sizes: list[int]) -> tuple[int, int]:
        sums = block_sums(costs, sizes)
        return max(sums), sum(cost * cost for cost in sums)

    found = block_partition(costs, num_blocks)
    assert len(found) == num_blocks and min(found) >= 1 and sum(found) == len(costs)
    best = min(map(key, all_partitions(len(costs), num_blocks)))
    assert key(found) == best


def test_the_docstrings_row() -> None:
    assert block_partition([1, 2, 3, 4, 5, 6], 3) == [3, 2, 1]
    assert block_partition([5e-6] * 96, 16) == [6] * 16


def test_blocks_that_are_equally_dear_are_seen_as_equal() -> None:
    """8 + 12 and 19 + 1: a rounded unit would make one of them dearer and take a less even cut."""
    assert block_partition([8, 12, 2, 6, 17, 19, 1], 5) == [1, 1, 2, 1, 2]
    assert block_partition([1e300, 1e-300, 1.0], 2) == [1, 2]
