"""The promise: how a training is spread over ranks changes its memory, not its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_trainings import curves, options_for, start, train_to

from scale_core.comm.group import Group
from scale_core.testing import run_ranks
from scale_train.options import Options

STEPS = 5


def options(text: Path, parallel: str, **more: Any) -> Options:
    sizes: dict[str, Any] = {"layers": 2, "width": 32, "clip": 0.0, "optimizer_kernel": "plain", "steps": STEPS}
    return options_for(text, parallel, **{**sizes, "seed": 1, **more})


def clipped(text: Path, parallel: str, **more: Any) -> Options:
    return options(text, parallel, clip=0.5, optimizer_kernel="fused", **more)


def assert_as_plain(text: Path, *ways: Options, loss_rel: float = 1e-4) -> None:
    """Compares what this rank reports with one process."""
    plain = train_to(start(clipped(text, "none"), Group()))
    for records in curves(*ways):
        assert records.losses == pytest.approx(plain.losses, rel=loss_rel)
        assert records.norms == pytest.approx(plain.norms, rel=1e-3)


@pytest.mark.composition("scale-checkpoint", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "OSS")
def test_sharded_ranks_train_as_replicas_to_the_bit(text: Path) -> None:
    sharded, *same = run_ranks(
        curves,
        2,
        options(text, "fsdp"),
        options(text, "ddp"),
        options(text, "fsdp", reshard_after_forward=False),
        options(text, "fsdp", checkpoint_activations="all"),
        options(text, "oss", checkpoint_activations="all"),
        options(text, "sharded-ddp"),
        options(text, "sharded-ddp", checkpoint_activations="all"),
    )[0]
    assert len(set(sharded.losses)) == STEPS
    assert [(each.losses, each.norms) for each in same] == [(sharded.losses, sharded.norms)] * 6


def test_accumulating_without_sending_equals_replicas_that_do_so(text: Path) -> None:
    replicated, *sharded = run_ranks(
        curves,
        2,
        options(text, "ddp", accumulate=3),
        options(text, "oss", accumulate=3),
        *(options(text, parallel, accumulate=3, sync_each_micro_batch=False) for parallel in ("fsdp", "sharded-ddp")),
    )[0]
    assert [each.losses for each in sharded] == [replicated.losses] * 3


@pytest.mark.ranks(1, 2, 3)
def test_any_number_of_ranks_trains_as_one_plain_process(text: Path) -> None:
    assert_as_plain(text, *(clipped(text, way, accumulate=2) for way in ("fsdp", "ddp", "oss", "sharded-ddp")))


@pytest.mark.composition("scale-tp", "OSS")
@pytest.mark.composition("scale-checkpoint", "scale-tp", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-tp", "OSS")
@pytest.mark.parametrize(
    "parallel, more",
    [
        ("fsdp", {"sequence_parallel": True}),
        ("ddp", {"accumulate": 2}),
        ("sharded-ddp", {"sequence_parallel": True, "checkpoint_activations": "all", "overlap_pieces": 2}),
        ("oss", {"overlap_pieces": 1, "checkpoint_activations": "selective"}),
    ],
)
@pytest.mark.ranks(4, in_turn=True)
def test_divided_layers_train_as_one_plain_process(text: Path, parallel: str, more: dict[str, Any]) -> None:
    assert_as_plain(text, clipped(text, parallel, tensor_parallel=2, **more))


@pytest.mark.composition("context parallel", "scale-fsdp")
@pytest.mark.composition("context parallel", "ShardedDataParallel")
@pytest.mark.composition("context parallel", "DistributedDataParallel")
@pytest.mark.composition("context parallel", "OSS")
@pytest.mark.composition("scale-checkpoint", "context parallel", "scale-fsdp")
@pytest.mark.composition("scale-checkpoint", "context parallel", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "context parallel", "OSS")
@pytest.mark.composition("scale-tp", "context parallel", "DistributedDataParallel")
@pytest.mark.parametrize(
    "parallel, more",
    [
        ("fsdp", {"context_parallel": 2, "accumulate": 3}),
        ("ddp", {"context_parallel": 4, "context_attention": "ulysses"}),
        ("sharded-ddp", {"context_parallel": 4, "checkpoint_activations": "all"}),
        ("oss", {"context_parallel": 2, "context_attention": "ulysses", "checkpoint_activations": "selective"}),
        ("fsdp", {"context_parallel": 2, "checkpoint_activations": "selective", "offload_activations": True}),
        ("ddp", {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    ],
)
@pytest.mark.ranks(4, in_turn=True)
def test_divided_sequences_train_as_one_plain_process(text: Path, parallel: str, more: dict[str, Any]) -> None:
    assert_as_plain(text, clipped(text, parallel, **more), loss_rel=1e-5)


def test_bf16_follows_fp32_from_afar(text: Path) -> None:
    several = [options(text, parallel, precision="bf16") for parallel in ("fsdp", "ddp", "sharded-ddp")]
    exact, *rounded = run_ranks(curves, 2, options(text, "fsdp"), *several)[0]
    for records in rounded:
        assert records.losses != exact.losses
        assert records.losses == pytest.approx(exact.losses, rel=1e-2)
