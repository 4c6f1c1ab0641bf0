"""Experts in `scale-train lm`: however ranks divide them, the training is that of one process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_trainings import changed, options_for, start, train_to
from rank_values import by_rank

from scale_checkpoint.wrapper import is_checkpointed
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_train.cli import main
from scale_train.configuration.checks import option_problems
from scale_train.configuration.resolve import model_config
from scale_train.data.text import windows_at
from scale_train.errors import InputError
from scale_train.model.gpt import GPT
from scale_train.options import ModelOptions, OptimizerOptions, Options, ParallelOptions
from scale_train.training.checkpoint import CHECKPOINTS, load, save
from scale_train.training.experts import balance_of
from scale_train.training.memory import count_active_parameters, count_parameters
from scale_train.training.trainer import evaluate, forward_backward

STEPS = 4


@dataclass
class Trained:
    """Of each step loss, norm, imbalance and part of the choices that was dropped; and the loss of held-out text."""

    numbers: list[list[float]]
    held_out: float


def mixture(
    text: Path, parallel: str, expert_parallel: int = 1, *, aux_loss_coef: float = 0.05, **more: Any
) -> Options:
    sizes = {"sequence": 8, "batch": 8, "layers": 2, "experts": 4, "shared_experts": 1, "steps": STEPS, "clip": 0.5}
    # What looks at a batch looks at a micro-batch.
    balance = {"aux_loss_coef": aux_loss_coef, "capacity_factor": 0.9 if aux_loss_coef else 0.0}
    return options_for(text, parallel, **{"expert_parallel": expert_parallel, "seed": 1, **sizes, **balance, **more})


def trained(options: Options, folder: Path | None = None, *, resumes: bool = False) -> Trained:
    """Trains, and saves at half; or goes on from there."""
    training = start(options)
    if folder is not None and resumes:
        load(training, folder / f"step-0000000{STEPS // 2}")
    steps = [] if resumes else train_to(training, STEPS // 2).steps
    if folder is not None and not resumes:
        save(training, folder)
    steps += train_to(training).steps
    names = ("loss", "gradient_norm", "expert_imbalance", "dropped_tokens")
    return Trained([[getattr(record, name) for name in names] for record in steps], evaluate(training))


def compare(found: Trained, expected: Trained) -> None:
    for numbers, others in zip(found.numbers, expected.numbers[-len(found.numbers) :], strict=True):
        assert numbers == pytest.approx(others, rel=1e-4)
    assert found.held_out == pytest.approx(expected.held_out, rel=1e-5)


def two_ranks(text: Path, alone: Trained, folder: Path) -> None:
    """Divided experts, whose checkpoint goes on with whole ones, and with such that are divided in themselves."""
    save_dir = folder / CHECKPOINTS
    compare(trained(mixture(text, "fsdp", 2, checkpoint_activations="all"), save_dir), alone)
    for options in (mixture(text, "oss"), mixture(text, "fsdp", tensor_parallel=2)):
        compare(trained(options, save_dir, resumes=True), alone)


@pytest.mark.composition("scale-moe", "OSS")
@pytest.mark.composition("scale-checkpoint", "scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-moe", "scale-tp")
def test_experts_on_two_ranks_train_and_resume_as_on_one_process(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(mixture(text, "none"))
    assert alone.numbers[0][2] > 1 and 0 < alone.numbers[0][3] < 1
    run_ranks(two_ranks, 2, text, alone, tmp_path / "run")
    compare(trained(mixture(text, "none"), tmp_path / "run" / CHECKPOINTS, resumes=True), alone)
    assert main(["ppl", str(tmp_path / "run"), "--text", str(text)]) == 0
    assert "bits per byte" in capsys.readouterr().out


def four_ranks(text: Path, alone: Trained, by_two: Trained, folder: Path) -> None:
    """Experts beside divided layers, and in stages of two pipelines; each goes on from the checkpoint of another."""
    divided = mixture(text, "fsdp", 2, tensor_parallel=2)
    compare(trained(divided, folder / "divided"), alone)
    ways = [
        mixture(text, "pipe", 2, stages=2, chunks=2, data_parallel="fsdp", checkpoint_activations="all"),
        mixture(text, "pipe", 2, stages=2, chunks=2),
    ]
    for way, other in zip(ways, reversed(ways), strict=True):
        place = folder / way.parallel.data_parallel
        compare(trained(way, place), by_two)
        compare(trained(other, place, resumes=True), by_two)


@pytest.mark.composition("scale-moe", "scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "scale-moe", "DistributedDataParallel")
def test_experts_in_stages_and_divided_layers_are_one_process(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(mixture(text, "none"))
    by_two = trained(mixture(text, "none", accumulate=2))
    assert abs(by_two.numbers[0][1] / alone.numbers[0][1] - 1) > 1e-3  # Losses for balance look at a micro-batch.
    run_ranks(four_ranks, 4, text, alone, by_two, tmp_path / CHECKPOINTS)
    for place in ("fsdp", "ddp"):
        again = mixture(text, "none", accumulate=2)
        compare(trained(again, tmp_path / CHECKPOINTS / place, resumes=True), by_two)
        point = next((tmp_path / CHECKPOINTS / place).glob("step-*"))
        assert main(["ppl", str(point), "--text", str(text), "--json"]) == 0
    first, second = (json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines())
    assert first == pytest.approx(second, rel=1e-5)


def planned_together(text: Path, alone: Trained) -> list[bool]:
    """The smallest budget, for which blocks are recomputed: ranks that planned differently would hang."""

    def asked(budget: str) -> Options:
        return mixture(text, "sharded-ddp", 2, checkpoint_activations=budget)

    with pytest.raises(InputError, match="no plan fits") as refused:
        start(asked("budget:1KB"))
    least = int(re.findall(r"write --checkpoint-activations budget:(\d+)B", str(refused.value))[0])
    compare(trained(asked(f"budget:{least}B")), alone)
    model = start(asked(f"budget:{least}B")).engine.raw_model
    return [is_checkpointed(block) for block in model.blocks]


@pytest.mark.soak
@pytest.mark.composition("scale-checkpoint", "scale-moe", "ShardedDataParallel")
def test_a_memory_budget_is_measured_by_all_ranks_together(text: Path) -> None:
    alone = trained(mixture(text, "none"))
    first, second = run_ranks(planned_together, 2, text, alone)
    assert first == second and any(first)


@pytest.mark.ranks(2)
def test_a_memory_budget_is_planned_for_uneven_experts(text: Path) -> None:
    asked = mixture(text, "sharded-ddp", 2, experts=5, checkpoint_activations="budget:1GB")
    layers = start(asked).engine.expert_layers()
    first, second = by_rank(
        sum(local_tensor(param).numel() for layer in layers.values() for param in layer.experts.parameters())
    )
    assert first * 2 == second * 3


@pytest.mark.parametrize("how", [{}, {"schedule": "interleaved_1f1b", "stages": 2}], ids=["one stage", "two stages"])
def test_a_smaller_micro_batch_counts_less_in_the_balancing_loss(text: Path, how: Any) -> None:
    training = start(mixture(text, "pipe", chunks=3, **how))
    plain = GPT(model_config(training.options))
    plain.load_state_dict({name: value.clone() for name, value in training.engine.raw_model.pipe.state_dict().items()})
    starts = replace(training.sampler).starts(8)
    forward_backward(training)
    for part in starts.split(3):  # Three, three and two of eight sequences.
        for block in plain.blocks:
            block.moe.aux_loss_scale = len(part) / 8
        (plain(*windows_at(training.text.train, part, 8)) * len(part) / 8).backward()
    for name, param in training.engine.raw_model.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=1e-7, msg=name)
    tokens = 8 * 8 * 2  # of two blocks, each to two experts
    assert training.balance._counts is not None and int(training.balance._counts[:, :-1].sum()) == 2 * tokens


def all_ways(text: Path, found: dict[str, Trained], ranks: int, folder: Path) -> None:
    halves = {"expert_parallel": max(1, ranks // 2)}
    divided = sorted({1, halves["expert_parallel"], ranks})
    ways: list[tuple[str, dict[str, Any]]] = [
        *((way, {"expert_parallel": each}) for way in ("fsdp", "ddp", "oss", "sharded-ddp") for each in divided),
        ("fsdp", {**halves, "cpu_offload": True}),
        ("fsdp", {**halves, "reshard_after_forward": False, "checkpoint_activations": "selective"}),
        ("sharded-ddp", {**halves, "checkpoint_activations": "all", "offload_activations": True}),
    ]
    if ranks > 1:
        ways += [(parallel, {**halves, "context_parallel": 2}) for parallel in ("fsdp", "ddp")]
        divided = {"tensor_parallel": 2, "expert_parallel": ranks // 2}
        ways += [(way, divided) for way in ("fsdp", "ddp", "oss", "sharded-ddp")]
        ways += [("fsdp", {**divided, "context_parallel": ranks // 2, "checkpoint_activations": "all"})]
    for number, (parallel, more) in enumerate(ways):
        compare(trained(mixture(text, parallel, **more), folder / f"{number}"), found["whole"])
        compare(trained(mixture(text, "fsdp"), folder / f"{number}", resumes=True), found["whole"])
    for parallel in ("fsdp", "ddp", "sharded-ddp"):
        more = {**halves, "accumulate": 2, "sync_each_micro_batch": parallel == "ddp"}
        compare(trained(mixture(text, parallel, **more)), found["two micro-batches"])
    pipelines: list[dict[str, Any]] = [{}]
    if ranks > 1:
        two = {"stages": 2, "expert_parallel": ranks // 2}
        pipelines = [{**two, "data_parallel": kind} for kind in ("ddp", "fsdp")]
        schedules = ("zb_h1", "solve") if ranks == 2 else ("zb_h1",)  # that has two stages on a rank, of four blocks
        pipelines += [{"schedule": name} for name in schedules]
        pipelines += [{"tensor_parallel": 2, "checkpoint_activations": "selective"}]
    for number, more in enumerate(pipelines):
        options = mixture(text, "pipe", layers=4, chunks=2, **more)
        compare(trained(options, folder / f"pipe-{number}"), found["four blocks"])
        other = mixture(text, "fsdp", layers=4, accumulate=2)
        compare(trained(other, folder / f"pipe-{number}", resumes=True), found["four blocks"])


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.composition("scale-moe", "context parallel", "scale-fsdp")
@pytest.mark.composition("scale-moe", "context parallel", "DistributedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-moe", "ShardedDataParallel")
def test_every_way_of_training_experts_is_one_process(text: Path, tmp_path: Path, ranks: int) -> None:
    run_ranks(all_ways, ranks, text, on_one_process(text), ranks, tmp_path / "run", limit_seconds=3600)


def on_one_process(text: Path) -> dict[str, Trained]:
    return {
        "whole": trained(mixture(text, "none")),
        "two micro-batches": trained(mixture(text, "none", accumulate=2)),
        "four blocks": trained(mixture(text, "none", accumulate=2, layers=4)),
    }


def eight_ranks(text: Path, expected: Trained, folder: Path) -> None:
    three: dict[str, Any] = {"tensor_parallel": 2, "stages": 2, "expert_parallel": 2, "chunks": 2, "layers": 4}
    for kind in ("ddp", "fsdp"):
        options = mixture(text, "pipe", data_parallel=kind, checkpoint_activations="all", **three)
        compare(trained(options, folder / kind), expected)
    four = mixture(text, "fsdp", 4, tensor_parallel=2, accumulate=2, layers=4)
    compare(trained(four, folder / "fsdp", resumes=True), expected)


@pytest.mark.soak
@pytest.mark.composition("scale-pipe", "scale-moe", "scale-tp")
@pytest.mark.composition("scale-checkpoint", "scale-pipe", "scale-moe")
def test_experts_in_divided_stages_train_as_on_one_process(text: Path, tmp_path: Path) -> None:
    expected = trained(mixture(text, "none", accumulate=2, layers=4))
    run_ranks(eight_ranks, 8, text, expected, tmp_path, limit_seconds=3600)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_experts_in_half_precision_follow_fp32_from_afar(text: Path, precision: str) -> None:
    exact = trained(mixture(text, "none", aux_loss_coef=0.0))
    for parallel in ("fsdp", "sharded-ddp"):
        rounded = trained(mixture(text, parallel, precision=precision, aux_loss_coef=0.0))
        assert rounded.numbers != exact.numbers
        for place, rel in ((0, 1e-2), (1, 5e-2)):
            of_exact = [numbers[place] for numbers in exact.numbers]
            assert [numbers[place] for numbers in rounded.numbers] == pytest.approx(of_exact, rel=rel)


def gains_of_all(several: list[Options]) -> list[list[float | None]]:
    return [train_to(start(options), STEPS).gains for options in several]


MEASURED: dict[str, Any] = {"aux_loss_coef": 0.0, "adascale": True, "steps": 100}


@pytest.mark.soak
@pytest.mark.parametrize(
    "ranks, ways",
    [
        (
            2,
            [
                *((way, {}) for way in ("ddp", "fsdp", "sharded-ddp")),
                *((way, {"expert_parallel": 2}) for way in ("ddp", "fsdp")),
            ],
        ),
        (
            4,
            [
                ("pipe", {"expert_parallel": 2, "stages": 2, "chunks": 1, "data_parallel": "fsdp"}),
                ("pipe", {"stages": 2, "chunks": 1, "data_parallel": "ddp"}),
                ("ddp", {"tensor_parallel": 2}),
            ],
        ),
    ],
)
def test_adascale_measures_experts_wherever_they_are(text: Path, ranks: int, ways: list[tuple[str, Any]]) -> None:
    (expected,) = gains_of_all([mixture(text, "none", accumulate=2, **MEASURED)])
    assert len({round(gain, 4) for gain in expected}) == STEPS and min(expected) > 1
    spread = [mixture(text, parallel, **MEASURED, **more) for parallel, more in ways]
    for gains in run_ranks(gains_of_all, ranks, spread)[0]:
        assert gains == pytest.approx(expected, rel=1e-6)


def test_a_token_passes_a_part_of_the_parameters(text: Path) -> None:
    alone = mixture(text, "none")
    config = model_config(alone)
    model = GPT(config)
    experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    assert config.expert_parameters == experts
    assert count_parameters(alone) == sum(param.numel() for param in model.parameters())
    assert count_parameters(alone) - count_active_parameters(alone) == experts // 2
    more = changed(alone, experts=8)
    assert count_active_parameters(more) - count_active_parameters(alone) == 2 * 4 * 16  # rows of two routers


def test_the_busiest_expert_and_dropped_choices_are_parts_of_all() -> None:
    even, one = [4, 4, 4, 4, 0], [16, 0, 0, 0, 8]
    assert balance_of(torch.tensor([even])) == {"expert_imbalance": 1.0, "dropped_tokens": 0.0}
    assert balance_of(torch.tensor([even, one])) == {"expert_imbalance": 4.0, "dropped_tokens": 0.25}


def test_all_that_does_not_go_with_experts_is_told_at_once() -> None:
    model, optimizer = ModelOptions(experts=2, top_k=3), OptimizerOptions(adascale=True)
    parallel = ParallelOptions(tensor_parallel=2, sequence_parallel=True, expert_parallel=4)
    found = "\n".join(option_problems(Options(model=model, parallel=parallel, optimizer=optimizer)))
    for words in ("--top-k 3", "none of the 2", "--sequence-parallel", "--adascale measures experts"):
        assert words in found


def test_models_of_transformers_have_experts_of_their_own(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 300}')
    options = Options(model=ModelOptions(model=config, experts=8), parallel=ParallelOptions(expert_parallel=2))
    first, second = option_problems(options)
    assert first.startswith("--experts is for the GPT of --size")
    assert second == f"--expert-parallel 2: each rank has all experts of --model {config}; take 1"


def test_a_checkpoint_of_other_experts_is_refused(text: Path, tmp_path: Path) -> None:
    trained(mixture(text, "none"), tmp_path)
    with pytest.raises(InputError, match="a checkpoint of another model: top_k is 2 there, 1 here"):
        trained(mixture(text, "none", top_k=1), tmp_path, resumes=True)
