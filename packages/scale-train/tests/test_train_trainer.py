"""The loop of a training: steps, saves, judgements, and what ends it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_trainings import changed, options_for, start
from rank_values import by_rank

from scale_core.comm.group import Group, group_of
from scale_core.launch import StopSignal
from scale_core.testing import run_ranks
from scale_train.data.text import windows_at
from scale_train.errors import Interrupted, TrainingDiverged
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.options import OptimizerOptions, Options, ParallelOptions
from scale_train.training import trainer as loop
from scale_train.training.parallel.engine import make_engine
from scale_train.training.parallel.parallelize_gpt import parallel_dims
from scale_train.training.reports.reporters import EvaluationRecord, Reporter, StepRecord
from scale_train.training.state import TrainState
from scale_train.training.trainer import (
    forward_backward,
    held_out_loss,
    held_out_starts,
    save_if_finite,
    seed_step,
    sum_over_ranks,
    train,
)


class Diary(Reporter):
    """What happens, in its order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def step(self, record: StepRecord) -> None:
        self.entries.append(f"step {record.step}")

    def evaluation(self, record: EvaluationRecord) -> None:
        self.entries.append(f"evaluation {record.step}")


@pytest.fixture
def options(sentences: Path) -> Options:
    run = {"save_every": 2, "evaluate_every": 3, "log_every": 2}
    return options_for(sentences, batch=4, steps=5, warmup=1, **run)


def test_a_training_steps_saves_evaluates_and_ends_with_both(options: Options) -> None:
    training = start(options)
    training.reporter = diary = Diary()
    entries = diary.entries

    def save(now: TrainState) -> None:
        now.saved_step = now.step
        entries.append(f"save {now.step}")

    held_out = train(training, save)
    assert 0 < held_out < 10
    assert entries == [
        *("step 2", "save 2", "evaluation 3", "step 4", "save 4", "step 5", "save 5", "evaluation 5"),
    ]


def test_micro_batches_have_the_gradient_of_the_whole_batch(options):
    whole, parts = start(options), start(changed(options, accumulate=2))
    losses = [forward_backward(training) for training in (whole, parts)]
    torch.testing.assert_close(*losses)
    for one, other in zip(whole.engine.raw_model.parameters(), parts.engine.raw_model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.fault(9)
def test_a_signal_ends_the_training_after_the_step_and_its_save(options, monkeypatch):
    training, entries = start(options), []
    monkeypatch.setattr(StopSignal, "on_any_rank", lambda self, group: 2 if training.step == 3 else 0)
    with pytest.raises(Interrupted, match="stopped after step 3, which is saved") as caught:
        train(training, lambda now: entries.append(f"save {now.step}"))
    assert caught.value.exit_code == 130
    assert entries[-1] == "save 3"


@pytest.mark.fault(71)
def test_a_loss_that_is_no_number_stops_the_training(options):
    training = start(options)
    with torch.no_grad():
        training.engine.raw_model.norm.weight.fill_(float("nan"))
    message = (
        r"the loss is nan, .*weight embedding.weight is not finite at step 2, which is not saved: take a smaller --lr"
    )
    with pytest.raises(TrainingDiverged, match=message):
        train(training, lambda now: None)


@pytest.mark.fault(71)
@pytest.mark.parametrize("where", ["loss", "weight", "moment"])
def test_a_state_with_a_number_that_is_not_finite_is_never_saved(options, monkeypatch, where):
    training = start(changed(options, save_every=1, log_every=100, evaluate_every=0))
    saved: list[int] = []

    def save(now: TrainState) -> None:
        now.saved_step = now.step
        now.checkpoint = Path("runs/a/checkpoints", f"step-{now.step:08}")
        saved.append(now.step)
        weight = now.engine.raw_model.norm.weight
        if now.step == 2:
            monkeypatch.setattr(loop, "train_step", lambda now: spoil(now, weight))

    def spoil(now: TrainState, weight: torch.Tensor) -> None:
        now.step += 1
        if where == "loss":
            now.loss = torch.tensor(float("nan"))
        elif where == "weight":
            weight.data[0] = float("inf")
        else:
            now.optimizer.state[weight]["exp_avg"][0] = float("nan")

    found = {
        "loss": "the loss is nan",
        "weight": "weight norm.weight is not finite",
        "moment": "exp_avg of norm.weight in the optimizer is not finite",
    }[where]
    message = f"^{found} at step 3, which is not saved: .*; go on with --resume runs/a, from step-00000002$"
    with pytest.raises(TrainingDiverged, match=message):
        train(training, save)
    assert saved == [1, 2]


def spoil_rank_1() -> str:
    training = SimpleNamespace(
        group=group_of(), loss=torch.tensor(math.nan if group_of().rank else 1.0), norm=None, step=2, saved_step=-1
    )
    weights = list(torch.nn.Linear(1, 1).parameters())
    training.engine = SimpleNamespace(params=lambda: weights, raw_model=torch.nn.Linear(1, 1))
    training.optimizer = torch.optim.SGD(weights)
    training.resume_hint = lambda: ""
    try:
        save_if_finite(training, lambda now: None)
    except TrainingDiverged as error:
        return str(error)
    return ""


def test_all_ranks_refuse_to_save_what_one_has_lost():
    for message in run_ranks(spoil_rank_1, 2):
        assert message.startswith("rank 1: the loss is nan at step 2, which is not saved")


def test_the_random_state_is_that_of_seed_step_and_rank():
    def drawn(*where: int) -> float:
        seed_step(*where)
        return torch.rand(()).item()

    assert drawn(0, 3, 1) == drawn(0, 3, 1)
    assert len({drawn(seed, step, rank) for seed in (0, 1) for step in (0, 1) for rank in (0, 1)}) == 8


TEXT = torch.arange(150, dtype=torch.uint8)
CPU = torch.device("cpu")


def evaluated(parallel: str, group: Group) -> float:
    torch.manual_seed(0)
    options = ParallelOptions(parallel=parallel)
    engine = make_engine(
        GPT(ModelConfig(1, 16, 2)), options, OptimizerOptions(), parallel_dims(options, group.size), CPU
    )
    starts = held_out_starts(len(TEXT), 8, 0)
    loss = held_out_loss(engine, TEXT, starts, 8, 4, group)
    assert engine.model.training
    return loss


def test_windows_are_spread_evenly_over_all_bytes():
    starts = held_out_starts(num_bytes=101, sequence=10, most_tokens=50)
    assert starts.tolist() == [0, 22, 45, 67, 90]
    assert held_out_starts(101, 10, 0).tolist() == list(range(0, 100, 10))
    assert held_out_starts(11, 10, 5).tolist() == [0]


def test_the_held_out_loss_is_the_mean_over_the_windows():
    torch.manual_seed(0)
    model = GPT(ModelConfig(1, 16, 2))
    expected = model(*windows_at(TEXT, held_out_starts(len(TEXT), 8, 0), 8)).item()
    assert evaluated("none", Group()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks, parallel", [(2, "fsdp"), (3, "fsdp"), (2, "ddp")])
@pytest.mark.ranks("ranks")
def test_ranks_that_do_not_divide_the_windows_find_the_same(ranks, parallel):
    of_ranks = by_rank(evaluated(parallel, group_of()))
    assert len(set(of_ranks)) == 1
    assert of_ranks[0] == pytest.approx(evaluated("none", Group()), rel=1e-6)


@pytest.mark.ranks(3)
def test_a_sum_over_ranks_has_the_same_bits_on_all():
    assert sum_over_ranks(0.1 + group_of().rank, group_of()) == math.fsum([0.1, 1.1, 2.1])
