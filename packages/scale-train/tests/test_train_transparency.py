"""The promise: how a training is spread over ranks changes its memory, not its result."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_core.testing import run_ranks
from scale_train.data import read_text
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.training.reporters import Reporter, StepRecord
from scale_train.training.state import build_state
from scale_train.training.trainer import train_step

STEPS = 5


class Curve(NamedTuple):
    losses: list[float]
    norms: list[float | None]


class Recorder(Reporter):
    def __init__(self) -> None:
        self.curve = Curve([], [])

    def step(self, record: StepRecord) -> None:
        self.curve.losses.append(record.loss)
        self.curve.norms.append(record.gradient_norm)


def options_for(text: Path, parallel: str, *, clip: float = 0.0, kernel: str = "plain", **more) -> Options:
    return Options(
        data=DataOptions(text=(text,), sequence=16, batch=12),
        model=ModelOptions(layers=2, width=32, heads=2),
        parallel=ParallelOptions(parallel=parallel, device="cpu", **more),
        optimizer=OptimizerOptions(steps=STEPS, clip=clip, optimizer_kernel=kernel, warmup=2),
        run=RunOptions(log_every=1, seed=1),
    )


def curve_of(options: Options, group: Group) -> Curve:
    training = build_state(options, read_text(options.data.text), group)
    training.reporter = recorder = Recorder()
    while training.step < options.optimizer.steps:
        train_step(training)
    return recorder.curve


def curves(*several: Options) -> list[Curve]:
    """The curves of several trainings, one after the other; on any rank."""
    return [curve_of(options, group_of()) for options in several]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(97, 123, (5_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


@pytest.mark.composition("scale-checkpoint", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "OSS")
def test_two_sharded_ranks_train_as_two_replicas_bit_for_bit_whatever_saves_memory(text):
    sharded, *same = run_ranks(
        curves,
        2,
        options_for(text, "fsdp"),
        options_for(text, "ddp"),
        options_for(text, "fsdp", reshard_after_forward=False),
        options_for(text, "fsdp", checkpoint_activations="all"),
        options_for(text, "oss", checkpoint_activations="all"),
        options_for(text, "sharded-ddp"),
        options_for(text, "sharded-ddp", checkpoint_activations="all"),
    )[0]
    assert len(set(sharded.losses)) == STEPS
    assert same == [sharded] * 6


def test_accumulating_without_sending_equals_replicas_that_do_so(text):
    replicated, *sharded = run_ranks(
        curves,
        2,
        options_for(text, "ddp", accumulate=3),
        options_for(text, "oss", accumulate=3),
        *(
            options_for(text, parallel, accumulate=3, sync_each_micro_batch=False)
            for parallel in ("fsdp", "sharded-ddp")
        ),
    )[0]
    assert sharded == [replicated] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_trains_as_one_plain_process(text, ranks):
    plain = curve_of(options_for(text, "none", clip=0.5, kernel="fused"), Group())
    ways = ("fsdp", "ddp", "oss", "sharded-ddp")
    spread = [options_for(text, parallel, clip=0.5, kernel="fused", accumulate=2) for parallel in ways]
    for by_rank in run_ranks(curves, ranks, *spread):
        for curve in by_rank:
            assert curve.losses == pytest.approx(plain.losses, rel=1e-4)
            assert curve.norms == pytest.approx(plain.norms, rel=1e-3)


@pytest.mark.composition("scale-tp", "OSS")
@pytest.mark.composition("scale-checkpoint", "scale-tp", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-tp", "OSS")
def test_divided_layers_train_as_one_plain_process(text):
    plain = curve_of(options_for(text, "none", clip=0.5, kernel="fused"), Group())
    divided = [
        options_for(text, parallel, clip=0.5, kernel="fused", tensor_parallel=2, **more)
        for parallel, more in (
            ("fsdp", {"sequence_parallel": True}),
            ("ddp", {"accumulate": 2}),
            ("sharded-ddp", {"sequence_parallel": True, "checkpoint_activations": "all", "overlap_pieces": 2}),
            ("oss", {"overlap_pieces": 1, "checkpoint_activations": "selective"}),
        )
    ]
    for by_rank in run_ranks(curves, 4, *divided):
        for curve in by_rank:
            assert curve.losses == pytest.approx(plain.losses, rel=1e-4)
            assert curve.norms == pytest.approx(plain.norms, rel=1e-3)


@pytest.mark.composition("context parallel", "scale-fsdp")
@pytest.mark.composition("context parallel", "ShardedDataParallel")
@pytest.mark.composition("context parallel", "DistributedDataParallel")
@pytest.mark.composition("context parallel", "OSS")
@pytest.mark.composition("scale-checkpoint", "context parallel", "scale-fsdp")
@pytest.mark.composition("scale-checkpoint", "context parallel", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "context parallel", "OSS")
@pytest.mark.composition("scale-tp", "context parallel", "DistributedDataParallel")
def test_divided_sequences_train_as_one_plain_process(text):
    plain = curve_of(options_for(text, "none", clip=0.5, kernel="fused"), Group())
    divided = [
        options_for(text, parallel, clip=0.5, kernel="fused", **more)
        for parallel, more in (
            ("fsdp", {"context_parallel": 2, "accumulate": 3}),
            ("ddp", {"context_parallel": 4, "context_attention": "ulysses"}),
            ("sharded-ddp", {"context_parallel": 4, "checkpoint_activations": "all"}),
            ("oss", {"context_parallel": 2, "context_attention": "ulysses", "checkpoint_activations": "selective"}),
            ("fsdp", {"context_parallel": 2, "checkpoint_activations": "selective", "offload_activations": True}),
            ("ddp", {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
        )
    ]
    for by_rank in run_ranks(curves, 4, *divided):
        for curve in by_rank:
            assert curve.losses == pytest.approx(plain.losses, rel=1e-5)
            assert curve.norms == pytest.approx(plain.norms, rel=1e-3)


def test_bf16_follows_fp32_from_afar(text):
    several = [options_for(text, parallel, precision="bf16") for parallel in ("fsdp", "ddp", "sharded-ddp")]
    exact, *rounded = run_ranks(curves, 2, options_for(text, "fsdp"), *several)[0]
    for curve in rounded:
        assert curve != exact
        assert curve.losses == pytest.approx(exact.losses, rel=1e-2)
