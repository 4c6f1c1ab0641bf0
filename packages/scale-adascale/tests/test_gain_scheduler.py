"""Trainings that are counted in steps of the small batch."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import noise
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from scale_adascale import AdaScale, GainScheduler, until_steps


def build(num: int = 2) -> tuple[nn.Linear, AdaScale]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    return model, AdaScale(SGD(model.parameters(), lr=0.01), num_gradients_to_accumulate=num)


def loader(number: int = 6) -> DataLoader:
    data = TensorDataset(noise(number, 2, seed=1) + torch.tensor([1.0, 0.0]))
    return DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def test_it_ends_between_two_steps_when_the_gains_sum_up():
    model, optimizer = build()
    passes, gains = 0, []
    for (batch,) in until_steps(loader(), optimizer, steps=10):
        (model(batch).sum() / 2).backward()
        passes += 1
        if passes % 2 == 0:
            optimizer.step()
            gains.append(optimizer.gain())
            optimizer.zero_grad()
    assert passes % 2 == 0 and 12 <= passes < 20  # Several turns of 6 micro-batches.
    assert sum(gains) == pytest.approx(optimizer.progress) and sum(gains[:-1]) < 10 <= sum(gains)
    assert list(until_steps(loader(), optimizer, steps=10)) == []


def test_each_turn_has_an_order_of_its_own():
    _, optimizer = build()
    data = loader()
    seen = [data.sampler.epoch for _, _ in zip(range(13), until_steps(data, optimizer, 1), strict=False)]
    assert seen == [0] * 6 + [1] * 6 + [2]


def test_a_training_that_goes_on_has_other_orders_than_before():
    _, optimizer = build()
    optimizer._state.store(optimizer._state.estimates.with_progress(7.5))
    data = loader()
    seen = [data.sampler.epoch for _, _ in zip(range(7), until_steps(data, optimizer, 9), strict=False)]
    assert seen == [8] * 6 + [9]
    next(until_steps(data, optimizer, 9, first_epoch=3))
    assert data.sampler.epoch == 3


def test_batches_that_end_for_good_are_refused():
    _, optimizer = build()
    with pytest.raises(ValueError, match="iterator can't begin again"):
        list(until_steps(iter([1, 2]), optimizer, 1))
    with pytest.raises(ValueError, match="steps of 0 or more, got nan"):
        list(until_steps([1], optimizer, float("nan")))
    with pytest.raises(ValueError, match="steps of 0 or more, got '10'"):
        list(until_steps([1], optimizer, "10"))


def step(model: nn.Module, optimizer: AdaScale, orthogonal: bool) -> None:
    for sample in torch.eye(2) if orthogonal else torch.ones(2, 2):
        (model(sample).sum() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_scheduler_makes_the_steps_of_the_small_batch():
    """Each step is worth two; with a schedule for epochs of three steps it steps at 4 and 6."""
    model, optimizer = build()
    scheduler = GainScheduler(LambdaLR(optimizer, lambda count: 0.5**count), optimizer, steps_per_call=3)
    rates = []
    for _ in range(4):
        step(model, optimizer, orthogonal=True)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert optimizer.progress == pytest.approx(8)
    assert rates == pytest.approx([0.01, 0.005, 0.0025, 0.0025])


def test_a_scheduler_that_is_loaded_goes_on_where_it_was():
    model, optimizer = build()
    scheduler = GainScheduler(StepLR(optimizer, 2, 0.1), optimizer)
    for orthogonal in (True, False):
        step(model, optimizer, orthogonal)
        scheduler.step()
    other, loaded = build()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    again = GainScheduler(StepLR(loaded, 2, 0.1), loaded)
    again.load_state_dict(scheduler.state_dict())
    for each, its in ((scheduler, optimizer), (again, loaded)):
        step(model if each is scheduler else other, its, orthogonal=True)
        each.step()
    assert again.get_last_lr() == scheduler.get_last_lr()
    assert again.state_dict()["count"] == scheduler.state_dict()["count"] == int(optimizer.progress)


@pytest.mark.parametrize("steps", range(9, 14))
def test_one_cycle_ends_wherever_its_last_step_leads(steps):
    model, optimizer = build(8)
    scheduler = GainScheduler(OneCycleLR(optimizer, 0.01, total_steps=steps, cycle_momentum=False), optimizer)
    batches = until_steps([noise(3, 2, seed=seed) for seed in range(16)], optimizer, steps=steps)
    for number, batch in enumerate(batches, start=1):
        (model(batch).square().mean() / 8).backward()
        if number % 8 == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert optimizer.progress >= steps
    assert scheduler.state_dict()["count"] == steps - 1
    assert scheduler.get_last_lr() == pytest.approx([0.01 / 25 / 1e4])


def step_until(model: nn.Module, optimizer: AdaScale, progress: float) -> None:
    """Makes one step that ends there, as if it were worth that much."""
    step(model, optimizer, orthogonal=True)
    estimates = optimizer._state.estimates
    optimizer._state.store(estimates.with_progress(progress - estimates.progress))


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False, anneal_strategy="linear"),
        lambda optimizer: ChainedScheduler(
            [OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False), ExponentialLR(optimizer, 0.9)]
        ),
        lambda optimizer: SequentialLR(
            optimizer,
            [LinearLR(optimizer, total_iters=3), OneCycleLR(optimizer, 0.1, total_steps=7, cycle_momentum=False)],
            milestones=[3],
        ),
    ],
    ids=["by itself", "chained", "in sequence"],
)
def test_a_schedule_that_ends_stays_at_its_last_learning_rate(make):
    (small, one), (model, other) = build(), build()
    plain, scheduler = make(one), GainScheduler(make(other), other)
    rates = []
    for _ in range(9):
        step(small, one, orthogonal=True)
        plain.step()
        rates.append(plain.get_last_lr())
    for count in (2, 6, 9, 12, 40):
        step_until(model, other, count + 0.5)
        scheduler.step()
        assert scheduler.get_last_lr() == rates[min(count, 9) - 1]


def test_what_follows_a_schedule_that_ends_has_its_turn():
    model, optimizer = build()
    cycle = OneCycleLR(optimizer, 0.1, total_steps=4, cycle_momentum=False)
    rest = ConstantLR(optimizer, factor=0.5, total_iters=3)
    scheduler = GainScheduler(SequentialLR(optimizer, [cycle, rest], milestones=[4]), optimizer)
    step_until(model, optimizer, 20)
    scheduler.step()
    assert (cycle.last_epoch, rest.last_epoch, scheduler.state_dict()["count"]) == (3, 16, 20)


def test_a_schedule_with_a_given_end_is_left_alone_after_it():
    model, optimizer = build()
    rates = [1.0, 0.5, 0.25]
    scheduler = GainScheduler(LambdaLR(optimizer, rates.__getitem__), optimizer, steps_per_call=2, total_steps=3)
    for progress, rate in ((1.9, 1.0), (3.0, 0.5), (4.5, 0.25), (9.0, 0.25)):
        step_until(model, optimizer, progress)
        scheduler.step()
        assert scheduler.get_last_lr() == [0.01 * rate]


def test_a_scheduler_that_follows_a_measured_value_is_refused():
    _, optimizer = build()
    with pytest.raises(TypeError, match=r"got ReduceLROnPlateau, whose step\(metrics\).*Leave GainScheduler out"):
        GainScheduler(ReduceLROnPlateau(optimizer), optimizer)


def test_a_scheduler_of_no_steps_is_refused():
    _, optimizer = build()
    with pytest.raises(ValueError, match="steps_per_call above 0, got 0"):
        GainScheduler(StepLR(optimizer, 2), optimizer, steps_per_call=0)
    with pytest.raises(ValueError, match="steps_per_call above 0, got '2'"):
        GainScheduler(StepLR(optimizer, 2), optimizer, steps_per_call="2")
    with pytest.raises(ValueError, match="total_steps of 1 or more, got 0"):
        GainScheduler(StepLR(optimizer, 2), optimizer, total_steps=0)


def test_an_optimizer_that_counts_no_progress_is_refused():
    plain = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"expected the AdaScale that steps.*got SGD. Write optimizer = AdaScale"):
        next(until_steps([1], plain, 3))
    with pytest.raises(TypeError, match="got SGD"):
        GainScheduler(torch.optim.lr_scheduler.StepLR(plain, 3), plain)
