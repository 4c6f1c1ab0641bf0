"""The promise: how a training is spread over ranks changes its memory, not its result."""

from pathlib import Path

import pytest
import torch
from scale_core.group import group_of
from scale_core.testing import run_ranks
from scale_train.loop import one_step
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.progress import Silent, StepRecord
from scale_train.text import read_text
from scale_train.training import build

STEPS = 5


class Losses(Silent):
    def __init__(self) -> None:
        self.values: list[float] = []
        self.norms: list[float | None] = []

    def step(self, record: StepRecord) -> None:
        self.values.append(record.loss)
        self.norms.append(record.gradient_norm)


def options_for(
    text: Path, parallel: str, *, clip: float = 0.0, fused: bool = False, steps: int = STEPS, **more
) -> Options:
    return Options(
        data=DataOptions(text=(text,), sequence=16, batch=12),
        model=ModelOptions(layers=2, width=32, heads=2),
        parallel=ParallelOptions(parallel=parallel, device="cpu", **more),
        optimizer=OptimizerOptions(steps=steps, clip=clip, fused=fused, warmup=2),
        run=RunOptions(log_every=1, seed=1),
    )


def curve(options: Options) -> tuple[list[float], list[float | None]]:
    """Losses and gradient norms of all steps, on any rank."""
    training = build(options, read_text(options.data.text), group_of())
    training.reporter = losses = Losses()
    while training.step < options.optimizer.steps:
        one_step(training)
    return losses.values, losses.norms


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(97, 123, (5_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


def test_two_sharded_ranks_train_as_two_replicas_bit_for_bit(text):
    sharded = run_ranks(curve, 2, options_for(text, "fsdp"))
    replicated = run_ranks(curve, 2, options_for(text, "ddp"))
    assert len(set(sharded[0][0])) == STEPS
    assert sharded == replicated


@pytest.mark.parametrize("more", [{"reshard_after_forward": False}, {"checkpoint_activations": True}], ids=str)
def test_what_saves_memory_changes_no_bit(text, more):
    assert run_ranks(curve, 2, options_for(text, "fsdp", **more)) == run_ranks(curve, 2, options_for(text, "fsdp"))


def test_accumulating_without_sending_equals_replicas_that_do_so(text):
    sharded = run_ranks(curve, 2, options_for(text, "fsdp", accumulate=3, no_sync=True))
    assert sharded == run_ranks(curve, 2, options_for(text, "ddp", accumulate=3))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_any_number_of_ranks_trains_as_one_plain_process(text, parallel, ranks):
    (plain_losses, plain_norms), *_ = run_ranks(curve, 1, options_for(text, "none", clip=0.5, fused=True), backend=None)
    losses, norms = run_ranks(curve, ranks, options_for(text, parallel, clip=0.5, fused=True, accumulate=2))[0]
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert norms == pytest.approx(plain_norms, rel=1e-3)


def test_bf16_follows_fp32_from_afar(text):
    exact = run_ranks(curve, 2, options_for(text, "fsdp"))[0][0]
    for parallel in ("fsdp", "ddp"):
        rounded = run_ranks(curve, 2, options_for(text, parallel, precision="bf16"))[0][0]
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=1e-2)
