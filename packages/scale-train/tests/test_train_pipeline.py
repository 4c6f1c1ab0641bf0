"""A model in stages trains as one process that accumulates, and any number of stages goes on from its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_trainings import changed, options_for, start, train_to
from torch import Tensor

from scale_core.testing import run_ranks
from scale_train.configuration.resolve import check_options, options_without_effect, pipeline_shape
from scale_train.errors import InputError
from scale_train.model.gpt import generate
from scale_train.options import Options
from scale_train.training.checkpoint import load, save
from scale_train.training.parallel.pipeline_gpt import stage_boundaries
from scale_train.training.trainer import evaluate

STEPS = 4
PIPED: dict[str, Any] = {
    "layers": 4,
    "held_out_tokens": 80,
    "steps": STEPS,
    "seed": 1,
    "clip": 0.5,
    "optimizer_kernel": "plain",
    "chunks": 3,
}


def piped(text: Path, **more: Any) -> Options:
    return options_for(text, "pipe", **{**PIPED, **more})


def in_one_process(text: Path) -> Options:
    return options_for(text, "none", accumulate=3, **PIPED)


@dataclass
class Trained:
    """Of a training that was saved half-way: losses, norms, bits per byte and a sample at the end, the checkpoint."""

    losses: list[float]
    norms: list[float | None]
    bits: float
    sample: list[int]
    point: Path


def trained(options: Options, folder: Path) -> Trained:
    training = start(options)
    first = train_to(training, STEPS // 2)
    point = save(training, folder)
    rest = train_to(training)
    bits, prompt = evaluate(training), torch.tensor([97])
    sample = generate(training.engine.raw_model, prompt, 2, context=16, seed=0, temperature=0.5).tolist()
    return Trained(first.losses + rest.losses, first.norms + rest.norms, bits, sample, point)


def resumed(options: Options, point: Path) -> list[float]:
    training = start(options)
    load(training, point)
    return train_to(training).losses


def check_as_one_process(text: Path, folder: Path, ranks: int, ways: list[Options], others: list[Options]) -> None:
    """Trains each way as one process, and goes on from the first one in the other ways, and in one process."""
    plain = trained(in_one_process(text), folder / "plain")
    second_half = pytest.approx(plain.losses[STEPS // 2 :], rel=1e-4)
    for number, options in enumerate(ways):
        by_rank = run_ranks(trained, ranks, options, folder / str(number))
        for each in by_rank:
            assert each.losses == pytest.approx(plain.losses, rel=1e-5)
            assert each.norms == pytest.approx(plain.norms, rel=1e-4)
            assert each.bits == pytest.approx(plain.bits, rel=1e-5)
            assert each.sample == plain.sample
    point = folder / "0" / plain.point.name
    for other in others:
        assert run_ranks(resumed, ranks, other, point) == [second_half] * ranks
    for alone in (in_one_process(text), piped(text, schedule="gpipe")):
        assert resumed(alone, point) == second_half


def test_stages_train_judge_write_save_and_resume_as_one_process(text: Path, tmp_path: Path) -> None:
    ways = [piped(text, schedule="1f1b"), piped(text, schedule="solve", checkpoint_activations="all")]
    others = [piped(text, schedule="gpipe", stages=4), options_for(text, "fsdp", **PIPED)]
    check_as_one_process(text, tmp_path, 2, ways, others)
    plain = trained(in_one_process(text), tmp_path / "again")
    by_stages = resumed(piped(text, schedule="gpipe"), plain.point)
    assert by_stages == pytest.approx(plain.losses[STEPS // 2 :], rel=1e-5)


@pytest.mark.composition("scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-checkpoint", "scale-pipe", "scale-tp")
def test_divided_or_sharded_stages_train_as_one_process(text: Path, tmp_path: Path) -> None:
    divided = piped(text, tensor_parallel=2, sequence_parallel=True, checkpoint_activations="all")
    sharded = piped(text, stages=2, data_parallel="fsdp")
    others = [sharded, options_for(text, "fsdp", tensor_parallel=2, **PIPED)]
    check_as_one_process(text, tmp_path, 4, [divided, sharded], others)


@pytest.mark.composition("scale-pipe", "scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "scale-tp", "DistributedDataParallel")
@pytest.mark.soak
def test_three_axes_of_two_ranks_train_as_one_process(text: Path, tmp_path: Path) -> None:
    ways = [piped(text, data_parallel=kind, tensor_parallel=2, stages=2) for kind in ("fsdp", "ddp")]
    ways.append(piped(text, tensor_parallel=2, stages=4, schedule="zb_v", checkpoint_activations="all"))
    check_as_one_process(text, tmp_path, 8, ways, [options_for(text, "fsdp", tensor_parallel=2, **PIPED)])


def trained_stages(
    options: Options, folder: Path
) -> tuple[tuple[int, int], dict[str, Tensor], Trained, dict[str, Tensor]]:
    """Where this rank is, the values of its stages before the first step and after the last one."""
    training = start(options)
    engine = training.engine
    first = {name: param.detach().clone() for name, param in engine.pipeline.named_parameters()}
    head = train_to(training, STEPS // 2)
    point = save(training, folder)
    rest = train_to(training)
    result = Trained(head.losses + rest.losses, head.norms + rest.norms, evaluate(training), [], point)
    last = {name: param.detach() for name, param in engine.pipeline.named_parameters()}
    return (engine.batch_group.rank, engine.pipeline.group.rank), first, result, last


def test_each_rank_of_several_pipelines_makes_its_own_stages(text: Path, tmp_path: Path) -> None:
    by_rank = run_ranks(trained_stages, 4, piped(text, stages=2), tmp_path / "pipe")
    plain = trained(in_one_process(text), tmp_path / "plain")
    model = start(in_one_process(text)).engine.raw_model
    values = dict(model.named_parameters())
    values["head.weight"] = values["embedding.weight"]
    stages: dict[int, dict[str, Tensor]] = {}
    for where, first, result, last in by_rank:
        assert result.losses == pytest.approx(plain.losses, rel=1e-5)
        assert result.norms == pytest.approx(plain.norms, rel=1e-4)
        assert result.bits == pytest.approx(plain.bits, rel=1e-5)
        assert all(torch.equal(tensor, values[name]) for name, tensor in first.items())
        # All pipelines have the same stages, which stay equal to the bit.
        others = stages.setdefault(where[1], last)
        assert others.keys() == last.keys() and all(torch.equal(others[name], last[name]) for name in last)
    assert [where for where, *_ in by_rank] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert set(stages[0]) | set(stages[1]) >= set(values) - {"head.weight"}
    second_half = resumed(in_one_process(text), by_rank[0][2].point)
    assert second_half == pytest.approx(plain.losses[STEPS // 2 :], rel=1e-5)


@pytest.mark.parametrize(
    ("num_ranks", "flags", "shape"),
    [
        (2, {}, (2, 1, 1)),
        (4, {"schedule": "zb_v"}, (4, 1, 2)),
        (4, {"stages": 4}, (4, 1, 1)),
        (4, {"stages": 4, "schedule": "zb_v"}, (2, 2, 2)),
        (4, {"stages": 2}, (2, 2, 1)),
        (4, {"tensor_parallel": 2}, (2, 1, 1)),
        (8, {"tensor_parallel": 2, "stages": 2}, (2, 2, 1)),
        (6, {"stages": 3}, (3, 2, 1)),
        (6, {"stages": 4, "schedule": "gpipe"}, (2, 3, 2)),
        (1, {"stages": 2, "schedule": "gpipe"}, (1, 1, 2)),
    ],
)
def test_ranks_make_one_pipeline_or_several_beside_each_other(text, num_ranks, flags, shape):
    assert pipeline_shape(piped(text, **flags).parallel, num_ranks) == shape


def test_blocks_are_divided_evenly():
    assert stage_boundaries(4, 2) == ["blocks.2"]
    assert stage_boundaries(10, 4) == ["blocks.2", "blocks.5", "blocks.7"]
    assert stage_boundaries(3, 1) == []


def test_a_weight_of_two_stages_on_one_rank_is_not_sharded(text):
    folded = piped(text, stages=4, schedule="zb_v", data_parallel="fsdp")
    with pytest.raises(InputError, match=r"--schedule zb_v: the first and the last stage share .*--data-parallel ddp"):
        check_options(folded, 4)
    check_options(changed(folded, untied_embeddings=True), 4)
    check_options(folded, 2)  # One pipeline: there is nothing to shard among.


def test_pipelines_that_solve_do_not_communicate_in_between(text):
    """Each would run another schedule after two steps, and wait for the others for ever."""
    two = piped(text, stages=2, schedule="solve")
    check_options(two, 4)  # The gradients of two replicas are averaged once, after the last micro-batch.
    experts = changed(two, experts=4)
    check_options(experts, 2)
    for options, flag, instead in (
        (experts, "--experts 4", "as many --ranks as one pipeline has"),
        (piped(text, stages=2, schedule="solve", data_parallel="fsdp"), "--data-parallel fsdp", "--data-para"),
        (piped(text, schedule="solve", tensor_parallel=2), "--tensor-parallel 2", "--tensor-parallel 1"),
    ):
        usual = "zb_h1" if options.parallel.stages else "zb_v"
        with pytest.raises(InputError, match=f"--schedule solve: .*{flag} .*take --schedule {usual}, or {instead}"):
            check_options(options, 4)


def test_any_batch_will_do_and_what_has_no_effect_is_said(text):
    options = piped(text)
    check_options(changed(options, batch=7), 2)
    assert options_without_effect(options) == []
    flags = options_for(text, "ddp", **PIPED, stages=2, schedule="zb_v", data_parallel="fsdp")
    assert options_without_effect(flags) == [
        f"{flag} has no effect with --parallel ddp"
        for flag in ("--stages", "--schedule", "--chunks", "--data-parallel")
    ]
