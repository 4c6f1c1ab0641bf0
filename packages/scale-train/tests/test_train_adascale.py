"""`--adascale`: gains, what is recorded of them, and when a training is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_trainings import Records, changed, options_for, start, train_to
from torch import nn

from scale_adascale import AdaScale, suggest_batch_size
from scale_adascale.gain import Moments, bounded, gain
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_train.data.text import windows_at
from scale_train.options import Options
from scale_train.training.adascale import adascale_stats
from scale_train.training.checkpoint import CHECKPOINTS, load, save
from scale_train.training.trainer import seed_step, train


def options(text: Path, parallel: str = "none", accumulate: int = 4, **more: Any) -> Options:
    run = {"batch": 16, "steps": 12, "adascale": True, "save_every": 0, "evaluate_every": 0}
    return options_for(text, parallel, accumulate=accumulate, **{**run, **more})


@pytest.fixture
def text(sentences: Path) -> Path:
    return sentences


def facts(records: Records) -> list[tuple[Any, ...]]:
    return [(each.loss, each.gain, each.useful_steps, each.learning_rate) for each in records.steps]


def curve(options: Options) -> list[tuple[Any, ...]]:
    training = start(options)
    train(training, lambda now: None)
    assert training.schedule_step >= options.optimizer.steps
    return facts(training.reporter)


def test_a_training_is_over_when_its_gains_add_up_to_its_steps(text):
    training = start(options(text))
    held_out = train(training, lambda now: None)
    records = training.reporter
    assert isinstance(training.optimizer, AdaScale) and training.optimizer.scale == 4
    assert 0 < held_out < 10
    assert 4 <= training.step < 12 and len(records.steps) == training.step
    gains = [record.gain for record in records.steps]
    assert sum(gains) == pytest.approx(records.steps[-1].useful_steps) == pytest.approx(training.optimizer.progress)
    assert sum(gains[:-1]) < 12 <= sum(gains)
    # The schedule is that of the smaller batch: each step takes the rate of the useful steps before it.
    before = [0.0, *(record.useful_steps for record in records.steps[:-1])]
    assert [r.learning_rate for r in records.steps] == [training.schedule.at(int(useful)) for useful in before]
    assert records.advanced[-1] >= 12 and records.advanced == sorted(records.advanced)


def saved_and_resumed(options: Options, folder: Path) -> tuple[list[Any], list[Any]]:
    training = start(options)
    train_to(training, 2)
    save(training, folder / CHECKPOINTS)
    training.reporter = Records()
    train(training, lambda now: None)
    assert training.checkpoint is not None
    resumed = start(options)
    load(resumed, training.checkpoint)
    train(resumed, lambda now: None)
    return facts(training.reporter), facts(resumed.reporter)


def in_several_ways(several: list[Options], folder: Path) -> list[Any]:
    return [*map(curve, several), saved_and_resumed(several[0], folder)]


SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dual_pipe_v")


def first_gain_of_unequal(options: Options, sizes: list[int]) -> float:
    """The gain of the first step, of micro-batches of so many sequences each, by the expectations of both squares.

    With w the part of the batch that each is, W = sum w^2, L = sum |w g|^2 and T = |sum w g|^2 have the means
    W mu^2 + s^2 and mu^2 + s^2, s^2 being the variance of the gradient of the whole batch.
    """
    training = start(options)
    model, data = training.engine.model, options.data
    params = [param for param in model.parameters() if param.requires_grad]
    seed_step(options.run.seed, training.step, 0)
    rows = []
    for starts in training.sampler.starts(data.batch).split(sizes):
        loss = model(*windows_at(training.text.train, starts, data.sequence))
        grads = torch.autograd.grad(loss, params)
        rows.append(torch.cat([grad.double().flatten() for grad in grads]) * len(starts) / data.batch)
    local, total = sum(float(row @ row) for row in rows), float(sum(rows) @ sum(rows))
    square = (total - local) / (1 - sum((size / data.batch) ** 2 for size in sizes))
    variance = len(sizes) * (total - square)
    return gain(bounded(Moments(variance, square)), len(sizes))


def assert_same_facts(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert mine == pytest.approx(its, rel=1e-3)


def test_stages_have_the_same_gains_with_every_schedule(text: Path, tmp_path: Path) -> None:
    """Each micro-batch is one sample; the embedding and the head are one weight, on one rank or on two."""
    whole = options(text, steps=4, layers=4)
    ways = [changed(whole, parallel="pipe", schedule=each, accumulate=1, chunks=4) for each in SCHEDULES]
    # Sixteen sequences in at most seven micro-batches make five of three and one of one.
    ways.append(changed(ways[0], chunks=7))
    expected, of_unequal = curve(whole), first_gain_of_unequal(whole, [3, 3, 3, 3, 3, 1])
    for *curves, uneven, (went_on, resumed) in run_ranks(in_several_ways, 2, ways, tmp_path):
        assert uneven[0][1] == pytest.approx(of_unequal, rel=1e-3)
        for found in curves:
            assert_same_facts(found, expected)
        assert resumed == went_on and went_on


def test_all_ways_to_spread_have_and_resume_the_same_gains(text: Path, tmp_path: Path) -> None:
    """Two ranks of two micro-batches are one of four; ShardedDataParallel measures what fsdp does."""
    expected = curve(options(text, steps=8))
    ways = [options(text, "fsdp", 2, steps=8, sync_each_micro_batch=False), options(text, "sharded-ddp", 2, steps=8)]
    for *curves, (went_on, resumed) in run_ranks(in_several_ways, 2, ways, tmp_path):
        for found in curves:
            assert_same_facts(found, expected)
        assert resumed == went_on and went_on


def test_without_it_a_step_is_a_step(text):
    training = start(options(text, adascale=False, steps=3))
    train(training, lambda now: None)
    assert training.step == training.schedule_step == 3 and training.reporter.advanced == [1, 2, 3]
    assert set(training.reporter.gains) == {None}


def test_the_noise_scale_and_its_interval_are_in_each_record(text, monkeypatch):
    training = start(options(text))
    seconds = {4: 0.6, 16: 1.0}
    monkeypatch.setattr(training.microbatch_timer, "step_seconds_by_batch", lambda step, batch: seconds)
    train(training, lambda now: None)
    last, optimizer = training.reporter.steps[-1], training.optimizer
    noise = optimizer.noise_scale(16 / 4)
    assert (last.noise_scale, last.noise_scale_low) == (noise.value, noise.low) and 0 < noise.value < float("inf")
    assert last.noise_scale_high == (noise.high if noise.high < float("inf") else None)
    assert last.critical_batch == max(1, round(noise.value))
    assert last.suggested_batch == suggest_batch_size(seconds, noise.value, 4).batch_size


def test_the_batch_that_is_suggested_is_that_of_the_best_goodput(text):
    training = start(options(text))
    train(training, lambda now: None)
    noise = training.optimizer.noise_scale(4).value
    for seconds in ({16: 1.0, 4: 0.25}, {16: 1.0, 4: 0.99}):
        expected = max(
            (4, 8, 16, 32), key=lambda m, s=seconds: m / (s[4] + (m - 4) / 12 * (s[16] - s[4])) / (noise + m)
        )
        assert adascale_stats(training.optimizer, 16, seconds)["suggested_batch"] == expected
    assert adascale_stats(training.optimizer, 16, {})["suggested_batch"] is None


def test_what_adascale_keeps_in_groups_is_no_option(text):
    training = start(options(text))
    plain = start(options(text, adascale=False))
    keys, plain_keys = ({key for group in each.optimizer.param_groups for key in group} for each in (training, plain))
    assert keys - plain_keys == {"adascale", "adascale_run"}


@pytest.mark.ranks(2)
def test_a_hook_that_may_change_measured_gradients_is_refused() -> None:
    """The error of a step with a hook that scales a reduced gradient after AdaScale has measured it, and without."""
    model = fully_shard(nn.Linear(3, 2))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(4, 3) + group_of().rank
    handle = model.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.5))
    errors = []
    for _ in range(2):
        try:
            model(x).square().mean().backward()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
        handle.remove()
        optimizer.zero_grad()
    refused, without = errors
    assert "'weight' has a hook of register_post_accumulate_grad_hook()" in refused
    assert "param.register_hook" not in refused  # Which is refused on shards.
    assert not without
