from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scale_adascale import AdaScale, suggest_batch_size
from scale_adascale.gain import Moments, bounded, gain
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_train.data import read_text, windows_at
from scale_train.errors import InputError
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.resolve import check_options
from scale_train.training.adascale import adascale_stats
from scale_train.training.checkpoint import CHECKPOINTS, load, save
from scale_train.training.reporters import Reporter, StepRecord
from scale_train.training.state import TrainState, build_state
from scale_train.training.trainer import seed_step, train, train_step


class Records(Reporter):
    def __init__(self) -> None:
        self.found: list[StepRecord] = []
        self.advanced: list[int] = []

    def step(self, record: StepRecord) -> None:
        self.found.append(record)

    def advance(self, step: int) -> None:
        self.advanced.append(step)


def options_for(text: Path, parallel: str = "none", accumulate: int = 4, **optimizer) -> Options:
    return Options(
        data=DataOptions(text=(text,), sequence=16, batch=16),
        model=ModelOptions(layers=1, width=16, heads=2),
        parallel=ParallelOptions(parallel=parallel, device="cpu", accumulate=accumulate),
        optimizer=OptimizerOptions(**{"steps": 12, "warmup": 2, "adascale": True, **optimizer}),
        run=RunOptions(log_every=1, save_every=0, evaluate_every=0),
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    return path


def start(options: Options) -> tuple[TrainState, Records]:
    training = build_state(options, read_text(options.data.text), group_of())
    training.reporter = records = Records()
    return training, records


def facts(records: Records) -> list[tuple[float, ...]]:
    return [(r.loss, r.gain, r.useful_steps, r.learning_rate) for r in records.found]


def curve(options: Options) -> tuple[list[tuple[float, ...]], list[int]]:
    training, records = start(options)
    train(training, lambda now: None)
    assert training.schedule_step >= options.optimizer.steps
    return facts(records), records.advanced


def test_a_training_is_over_when_its_steps_were_worth_those_of_the_smaller_batch(text):
    training, records = start(options_for(text))
    held_out = train(training, lambda now: None)
    assert isinstance(training.optimizer, AdaScale) and training.optimizer.scale == 4
    assert 0 < held_out < 10
    assert 4 <= training.step < 12 and len(records.found) == training.step
    gains = [record.gain for record in records.found]
    assert sum(gains) == pytest.approx(records.found[-1].useful_steps) == pytest.approx(training.optimizer.progress)
    assert sum(gains[:-1]) < 12 <= sum(gains)
    # The schedule is that of the smaller batch: each step takes the rate of the useful steps before it.
    before = [0.0, *(record.useful_steps for record in records.found[:-1])]
    assert [r.learning_rate for r in records.found] == [training.schedule.at(int(useful)) for useful in before]
    assert records.advanced[-1] >= 12 and records.advanced == sorted(records.advanced)


def saved_and_resumed(options: Options, folder: str) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    training, records = start(options)
    for _ in range(2):
        train_step(training)
    save(training, Path(folder) / CHECKPOINTS)
    first = len(records.found)
    train(training, lambda now: None)
    assert training.checkpoint is not None
    resumed, again = start(options)
    load(resumed, training.checkpoint)
    train(resumed, lambda now: None)
    return facts(records)[first:], facts(again)


def in_several_ways(several: list[Options], folder: str) -> list[object]:
    return [curve(options) for options in several] + [saved_and_resumed(several[0], folder)]


SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dual_pipe_v")


def in_stages(options: Options, schedule: str) -> Options:
    parallel = replace(options.parallel, parallel="pipe", schedule=schedule, accumulate=1, chunks=4)
    return replace(options, parallel=parallel)


def first_gain_of_unequal(options: Options, sizes: list[int]) -> float:
    """The gain of the first step, of micro-batches of so many sequences each, by the expectations of both squares.

    With w the part of the batch that each is, W = sum w^2, L = sum |w g|^2 and T = |sum w g|^2 have the means
    W mu^2 + s^2 and mu^2 + s^2, s^2 being the variance of the gradient of the whole batch.
    """
    training, _ = start(options)
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


def test_a_model_in_stages_has_the_same_gains_with_every_schedule(text, tmp_path):
    """Each micro-batch is one sample; the embedding and the head are one weight, on one rank or on two."""
    whole = options_for(text, steps=4)
    whole = replace(whole, model=replace(whole.model, layers=4))
    expected, _ = curve(whole)
    ways = [in_stages(whole, schedule) for schedule in SCHEDULES]
    # Sixteen sequences in at most seven micro-batches make five of three and one of one.
    ways.append(replace(ways[0], parallel=replace(ways[0].parallel, chunks=7)))
    of_unequal = first_gain_of_unequal(whole, [3, 3, 3, 3, 3, 1])
    for *curves, (uneven, _), (went_on, resumed) in run_ranks(in_several_ways, 2, ways, str(tmp_path)):
        assert uneven[0][1] == pytest.approx(of_unequal, rel=1e-3)
        for schedule, (found, _) in zip(SCHEDULES, curves, strict=True):
            assert len(found) == len(expected), schedule
            for mine, its in zip(found, expected, strict=True):
                assert mine == pytest.approx(its, rel=1e-3), schedule
        assert resumed == went_on and went_on


def test_all_ways_to_spread_have_the_same_gains_and_a_resumed_run_goes_on_with_them(text, tmp_path):
    """Two ranks of two micro-batches are one of four; ShardedDataParallel measures what fsdp does."""
    expected, _ = curve(options_for(text, steps=8))
    ways = [options_for(text, parallel, accumulate=2, steps=8) for parallel in ("fsdp", "sharded-ddp")]
    ways[0] = replace(ways[0], parallel=replace(ways[0].parallel, sync_each_micro_batch=False))
    for *curves, (went_on, resumed) in run_ranks(in_several_ways, 2, ways, str(tmp_path)):
        for found, _ in curves:
            assert len(found) == len(expected)
            for mine, its in zip(found, expected, strict=True):
                assert mine == pytest.approx(its, rel=1e-3)
        assert resumed == went_on and went_on


def test_without_it_a_step_is_a_step(text):
    training, records = start(options_for(text, adascale=False, steps=3))
    train(training, lambda now: None)
    assert training.step == training.schedule_step == 3 and records.advanced == [1, 2, 3]
    assert all(record.gain is None for record in records.found)


def test_the_noise_scale_its_interval_and_what_follows_of_it_are_in_each_record(text, monkeypatch):
    training, records = start(options_for(text))
    seconds = {4: 0.6, 16: 1.0}
    monkeypatch.setattr(training.microbatch_timer, "step_seconds_by_batch", lambda step, batch: seconds)
    train(training, lambda now: None)
    last, optimizer = records.found[-1], training.optimizer
    noise = optimizer.noise_scale(16 / 4)
    assert (last.noise_scale, last.noise_scale_low) == (noise.value, noise.low) and 0 < noise.value < float("inf")
    assert last.noise_scale_high == (noise.high if noise.high < float("inf") else None)
    assert last.critical_batch == max(1, round(noise.value))
    assert last.suggested_batch == suggest_batch_size(seconds, noise.value, 4).batch_size


def test_the_batch_that_is_suggested_is_that_of_the_best_goodput(text):
    training, _ = start(options_for(text))
    train(training, lambda now: None)
    noise = training.optimizer.noise_scale(4).value
    for seconds in ({16: 1.0, 4: 0.25}, {16: 1.0, 4: 0.99}):
        expected = max(
            (4, 8, 16, 32), key=lambda m, s=seconds: m / (s[4] + (m - 4) / 12 * (s[16] - s[4])) / (noise + m)
        )
        assert adascale_stats(training.optimizer, 16, seconds)["suggested_batch"] == expected
    assert adascale_stats(training.optimizer, 16, {})["suggested_batch"] is None


@pytest.mark.parametrize(
    "parallel, optimizer, words",
    [
        ("none", {"adascale": True, "adascale_scale": 0.5}, "--adascale-scale 0.5: at least 1 is needed"),
        ("none", {"adascale": False, "adascale_scale": 4.0}, "--adascale-scale 4 has no effect without --adascale"),
    ],
)
def test_what_can_not_be_measured_is_refused(text, parallel, optimizer, words):
    with pytest.raises(InputError, match=words):
        check_options(options_for(text, parallel, **optimizer), 1)


def test_what_adascale_keeps_in_parameter_groups_is_no_option_of_the_command_line(text):
    training, _ = start(options_for(text))
    plain, _ = start(options_for(text, adascale=False))
    options, own = ({key for group in each.optimizer.param_groups for key in group} for each in (training, plain))
    assert options - own == {"adascale", "adascale_run"}


def raised_with_a_hook_on_a_shard() -> list[str]:
    """A hook that scales a reduced gradient, which AdaScale has measured before it."""
    model = fully_shard(nn.Linear(3, 2))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(4, 3) + group_of().rank

    def scale(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    found = []
    handle = model.weight.register_post_accumulate_grad_hook(scale)
    for _ in range(2):
        try:
            model(x).square().mean().backward()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
        handle.remove()
        optimizer.zero_grad()
    return found


def test_a_hook_on_a_shard_that_may_change_measured_gradients_is_refused():
    for refused, without in run_ranks(raised_with_a_hook_on_a_shard, 2):
        assert "'weight' has a hook of register_post_accumulate_grad_hook()" in refused
        assert "param.register_hook" not in refused  # Which is refused on shards.
        assert not without
