"""Experts in `scale-train lm`: however ranks divide them, the training is that of one process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scale_checkpoint import is_checkpointed
from scale_core.comm.group import Group, group_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_train.cli import main
from scale_train.configuration.checks import option_problems
from scale_train.data import read_text, windows_at
from scale_train.errors import InputError
from scale_train.memory import count_active_parameters, count_parameters
from scale_train.model import GPT
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.resolve import check_options, model_config
from scale_train.training.checkpoint import CHECKPOINTS, load, save
from scale_train.training.experts import balance_of
from scale_train.training.reporters import Reporter, StepRecord
from scale_train.training.state import build_state
from scale_train.training.trainer import evaluate, forward_backward, train_step

STEPS = 4


class Found(NamedTuple):
    """Of each step: loss, norm, imbalance, part of the choices that was dropped; and the loss of held-out text."""

    numbers: list[float]
    held_out: float


class Recorder(Reporter):
    def __init__(self) -> None:
        self.numbers: list[float] = []

    def step(self, record: StepRecord) -> None:
        assert record.gradient_norm is not None and record.expert_imbalance is not None
        assert record.dropped_tokens is not None
        self.numbers += [record.loss, record.gradient_norm, record.expert_imbalance, record.dropped_tokens]


def options_for(
    text: Path, parallel: str, expert_parallel: int = 1, *, aux_loss_coef: float = 0.05, layers: int = 2, **more
) -> Options:
    model: Any = {"layers": layers, "width": 16, "heads": 2, "experts": 4, "shared_experts": 1, "capacity_factor": 0.9}
    if not aux_loss_coef:  # What looks at a batch looks at a micro-batch.
        model["capacity_factor"] = 0.0
    return Options(
        DataOptions(text=(text,), sequence=8, batch=8),
        ModelOptions(aux_loss_coef=aux_loss_coef, **model),
        ParallelOptions(parallel=parallel, device="cpu", expert_parallel=expert_parallel, **more),
        OptimizerOptions(steps=STEPS, clip=0.5, warmup=2),
        RunOptions(log_every=1, seed=1),
    )


def trained(options: Options, group: Group, folder: Path | None = None, *, resumes: bool = False) -> Found:
    """Trains, and saves at half; or goes on from there."""
    training = build_state(options, read_text(options.data.text), group)
    training.reporter = recorder = Recorder()
    if folder is not None and resumes:
        load(training, folder / f"step-0000000{STEPS // 2}")
    while training.step < STEPS:
        train_step(training)
        if folder is not None and not resumes and training.step == STEPS // 2:
            save(training, folder)
    return Found(recorder.numbers, evaluate(training))


def compare(found: Found, expected: Found) -> None:
    assert found.numbers == pytest.approx(expected.numbers[-len(found.numbers) :], rel=1e-4)
    assert found.held_out == pytest.approx(expected.held_out, rel=1e-5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(97, 123, (2_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


def two_ranks(text: Path, alone: Found, folder: Path) -> None:
    """Divided experts, whose checkpoint goes on with whole ones, and with such that are divided in themselves."""
    save_dir = folder / CHECKPOINTS
    compare(trained(options_for(text, "fsdp", 2, checkpoint_activations="all"), group_of(), save_dir), alone)
    for options in (options_for(text, "oss"), options_for(text, "fsdp", tensor_parallel=2)):
        compare(trained(options, group_of(), save_dir, resumes=True), alone)


@pytest.mark.composition("scale-moe", "OSS")
@pytest.mark.composition("scale-checkpoint", "scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-moe", "scale-tp")
def test_experts_on_two_ranks_train_and_resume_as_on_one_process(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(options_for(text, "none"), Group())
    assert alone.numbers[2] > 1 and 0 < alone.numbers[3] < 1
    run_ranks(two_ranks, 2, text, alone, tmp_path / "run")
    compare(trained(options_for(text, "none"), Group(), tmp_path / "run" / CHECKPOINTS, resumes=True), alone)
    assert main(["ppl", str(tmp_path / "run"), "--text", str(text)]) == 0
    assert "bits per byte" in capsys.readouterr().out


def four_ranks(text: Path, alone: Found, by_two: Found, folder: Path) -> None:
    """Experts beside divided layers, and in stages of two pipelines; each goes on from the checkpoint of another."""
    divided = options_for(text, "fsdp", 2, tensor_parallel=2)
    compare(trained(divided, group_of(), folder / "divided"), alone)
    ways = [
        options_for(text, "pipe", 2, stages=2, chunks=2, data_parallel="fsdp", checkpoint_activations="all"),
        options_for(text, "pipe", 2, stages=2, chunks=2),
    ]
    for way, other in zip(ways, reversed(ways), strict=True):
        place = folder / way.parallel.data_parallel
        compare(trained(way, group_of(), place), by_two)
        compare(trained(other, group_of(), place, resumes=True), by_two)


@pytest.mark.composition("scale-moe", "scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "scale-moe", "DistributedDataParallel")
def test_experts_beside_divided_layers_and_in_stages_train_as_on_one_process(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(options_for(text, "none"), Group())
    by_two = trained(options_for(text, "none", accumulate=2), Group())
    assert abs(by_two.numbers[1] / alone.numbers[1] - 1) > 1e-3  # Losses for balance look at a micro-batch.
    run_ranks(four_ranks, 4, text, alone, by_two, tmp_path / CHECKPOINTS)
    for place in ("fsdp", "ddp"):
        again = options_for(text, "none", accumulate=2)
        compare(trained(again, Group(), tmp_path / CHECKPOINTS / place, resumes=True), by_two)
        point = next((tmp_path / CHECKPOINTS / place).glob("step-*"))
        assert main(["ppl", str(point), "--text", str(text), "--json"]) == 0
    first, second = (json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines())
    assert first == pytest.approx(second, rel=1e-5)


def planned_together(text: Path, alone: Found) -> list[bool]:
    """The smallest budget, for which blocks are recomputed: ranks that planned differently would hang."""

    def asked(budget: str) -> Options:
        return options_for(text, "sharded-ddp", 2, checkpoint_activations=budget)

    with pytest.raises(InputError, match="no plan fits") as refused:
        build_state(asked("budget:1KB"), read_text((text,)), group_of())
    least = int(re.findall(r"write --checkpoint-activations budget:(\d+)B", str(refused.value))[0])
    compare(trained(asked(f"budget:{least}B"), group_of()), alone)
    model = build_state(asked(f"budget:{least}B"), read_text((text,)), group_of()).engine.raw_model
    return [is_checkpointed(block) for block in model.blocks]


@pytest.mark.soak
@pytest.mark.composition("scale-checkpoint", "scale-moe", "ShardedDataParallel")
def test_a_memory_budget_is_measured_by_all_ranks_of_experts_together(text: Path) -> None:
    alone = trained(options_for(text, "none"), Group())
    first, second = run_ranks(planned_together, 2, text, alone)
    assert first == second and any(first)


def planned_unevenly(text: Path) -> int:
    options = options_for(text, "sharded-ddp", 2, layers=2, checkpoint_activations="budget:1GB")
    options = replace(options, model=replace(options.model, experts=5))
    layers = build_state(options, read_text((text,)), group_of()).engine.expert_layers()
    return sum(local_tensor(param).numel() for layer in layers.values() for param in layer.experts.parameters())


def test_a_memory_budget_is_planned_for_experts_that_do_not_divide_evenly(text: Path) -> None:
    first, second = run_ranks(planned_unevenly, 2, text)
    assert first * 2 == second * 3


@pytest.mark.parametrize("how", [{}, {"schedule": "interleaved_1f1b", "stages": 2}], ids=["one stage", "two stages"])
def test_a_smaller_micro_batch_of_a_pipeline_counts_less_in_the_load_balancing_loss(text: Path, how: Any) -> None:
    training = build_state(options_for(text, "pipe", chunks=3, **how), read_text(text_of := (text,)), Group())
    plain = GPT(model_config(training.options))
    plain.load_state_dict({name: value.clone() for name, value in training.engine.raw_model.pipe.state_dict().items()})
    starts = replace(training.sampler).starts(8)
    forward_backward(training)
    for part in starts.split(3):  # Three, three and two of eight sequences.
        for block in plain.blocks:
            block.moe.aux_loss_scale = len(part) / 8
        (plain(*windows_at(read_text(text_of).train, part, 8)) * len(part) / 8).backward()
    for name, param in training.engine.raw_model.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=1e-7, msg=name)
    tokens = 8 * 8 * 2  # of two blocks, each to two experts
    assert training.balance._counts is not None and int(training.balance._counts[:, :-1].sum()) == 2 * tokens


def all_ways(text: Path, found: dict[str, Found], ranks: int, folder: Path) -> None:
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
        compare(trained(options_for(text, parallel, **more), group_of(), folder / f"{number}"), found["whole"])
        compare(trained(options_for(text, "fsdp"), group_of(), folder / f"{number}", resumes=True), found["whole"])
    for parallel in ("fsdp", "ddp", "sharded-ddp"):
        more = {**halves, "accumulate": 2, "sync_each_micro_batch": parallel == "ddp"}
        compare(trained(options_for(text, parallel, **more), group_of()), found["two micro-batches"])
    pipelines: list[dict[str, Any]] = [{}]
    if ranks > 1:
        two = {"stages": 2, "expert_parallel": ranks // 2}
        pipelines = [{**two, "data_parallel": kind} for kind in ("ddp", "fsdp")]
        schedules = ("zb_h1", "solve") if ranks == 2 else ("zb_h1",)  # that has two stages on a rank, of four blocks
        pipelines += [{"schedule": name} for name in schedules]
        pipelines += [{"tensor_parallel": 2, "checkpoint_activations": "selective"}]
    for number, more in enumerate(pipelines):
        options = options_for(text, "pipe", layers=4, chunks=2, **more)
        compare(trained(options, group_of(), folder / f"pipe-{number}"), found["four blocks"])
        other = options_for(text, "fsdp", layers=4, accumulate=2)
        compare(trained(other, group_of(), folder / f"pipe-{number}", resumes=True), found["four blocks"])


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.composition("scale-moe", "context parallel", "scale-fsdp")
@pytest.mark.composition("scale-moe", "context parallel", "DistributedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-moe", "ShardedDataParallel")
def test_every_way_of_training_experts_is_that_of_one_process(text: Path, tmp_path: Path, ranks: int) -> None:
    run_ranks(all_ways, ranks, text, on_one_process(text), ranks, tmp_path / "run", limit_seconds=3600)


def on_one_process(text: Path) -> dict[str, Found]:
    return {
        "whole": trained(options_for(text, "none"), Group()),
        "two micro-batches": trained(options_for(text, "none", accumulate=2), Group()),
        "four blocks": trained(options_for(text, "none", accumulate=2, layers=4), Group()),
    }


def eight_ranks(text: Path, expected: Found, folder: Path) -> None:
    three: dict[str, Any] = {"tensor_parallel": 2, "stages": 2, "expert_parallel": 2, "chunks": 2, "layers": 4}
    for kind in ("ddp", "fsdp"):
        options = options_for(text, "pipe", data_parallel=kind, checkpoint_activations="all", **three)
        compare(trained(options, group_of(), folder / kind), expected)
    four = options_for(text, "fsdp", 4, tensor_parallel=2, accumulate=2, layers=4)
    compare(trained(four, group_of(), folder / "fsdp", resumes=True), expected)


@pytest.mark.soak
@pytest.mark.composition("scale-pipe", "scale-moe", "scale-tp")
@pytest.mark.composition("scale-checkpoint", "scale-pipe", "scale-moe")
def test_experts_in_stages_whose_layers_are_divided_train_as_on_one_process(text: Path, tmp_path: Path) -> None:
    expected = trained(options_for(text, "none", accumulate=2, layers=4), Group())
    run_ranks(eight_ranks, 8, text, expected, tmp_path, limit_seconds=3600)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_experts_in_half_precision_follow_fp32_from_afar(text: Path, precision: str) -> None:
    exact = trained(options_for(text, "none", aux_loss_coef=0.0), Group())
    for parallel in ("fsdp", "sharded-ddp"):
        rounded = trained(options_for(text, parallel, precision=precision, aux_loss_coef=0.0), Group())
        assert rounded.numbers != exact.numbers
        assert rounded.numbers[0::4] == pytest.approx(exact.numbers[0::4], rel=1e-2)
        assert rounded.numbers[1::4] == pytest.approx(exact.numbers[1::4], rel=5e-2)


class Gains(Reporter):
    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, record: StepRecord) -> None:
        assert record.gain is not None
        self.values.append(record.gain)


def gains_of(options: Options) -> list[float]:
    training = build_state(options, read_text(options.data.text), group_of())
    training.reporter = gains = Gains()
    for _ in range(STEPS):
        train_step(training)
    return gains.values


def gains_of_all(several: list[Options]) -> list[list[float]]:
    return [gains_of(options) for options in several]


@pytest.mark.soak
def test_adascale_measures_experts_that_ranks_have_or_divide(text: Path) -> None:
    adascale = OptimizerOptions(steps=100, clip=0.5, warmup=2, adascale=True)
    alone = replace(options_for(text, "none", accumulate=2, aux_loss_coef=0.0), optimizer=adascale)
    expected = gains_of(alone)
    assert len({round(gain, 4) for gain in expected}) == STEPS and min(expected) > 1
    ways = ("ddp", "fsdp", "sharded-ddp")
    spread = [replace(options_for(text, parallel, aux_loss_coef=0.0), optimizer=adascale) for parallel in ways]
    spread += [
        replace(options_for(text, parallel, 2, aux_loss_coef=0.0), optimizer=adascale) for parallel in ("ddp", "fsdp")
    ]
    for gains in run_ranks(gains_of_all, 2, spread)[0]:
        assert gains == pytest.approx(expected, rel=1e-6)


@pytest.mark.soak
def test_adascale_measures_experts_in_stages_and_beside_divided_layers(text: Path) -> None:
    adascale = OptimizerOptions(steps=100, clip=0.5, warmup=2, adascale=True)
    expected = gains_of(replace(options_for(text, "none", accumulate=2, aux_loss_coef=0.0), optimizer=adascale))
    several = [
        options_for(text, "pipe", 2, aux_loss_coef=0.0, stages=2, chunks=1, data_parallel="fsdp"),
        options_for(text, "pipe", aux_loss_coef=0.0, stages=2, chunks=1, data_parallel="ddp"),
        options_for(text, "ddp", aux_loss_coef=0.0, tensor_parallel=2),
    ]
    for gains in run_ranks(gains_of_all, 4, [replace(options, optimizer=adascale) for options in several])[0]:
        assert gains == pytest.approx(expected, rel=1e-6)


def test_a_token_passes_a_part_of_the_parameters(text: Path) -> None:
    options = options_for(text, "none")
    config = model_config(options)
    model = GPT(config)
    experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    assert config.expert_parameters == experts
    assert count_parameters(options) == sum(param.numel() for param in model.parameters())
    assert count_parameters(options) - count_active_parameters(options) == experts // 2
    more = replace(options, model=replace(options.model, experts=8))
    assert count_active_parameters(more) - count_active_parameters(options) == 2 * 4 * 16  # rows of two routers


def test_the_busiest_expert_and_dropped_choices_are_parts_of_all() -> None:
    even, one = [4, 4, 4, 4, 0], [16, 0, 0, 0, 8]
    assert balance_of(torch.tensor([even])) == {"expert_imbalance": 1.0, "dropped_tokens": 0.0}
    assert balance_of(torch.tensor([even, one])) == {"expert_imbalance": 4.0, "dropped_tokens": 0.25}


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"experts": -1}, {}, "--experts -1: 0 or more is needed"),
        ({"experts": 10**9}, {}, "--experts 1000000000: more than can be meant; at most 100000"),
        ({"experts": 8, "top_k": 9}, {}, "--top-k 9: a token goes to at most all 8 of --experts 8"),
        ({"experts": 8, "top_k": 0}, {}, "--top-k 0: at least 1 is needed"),
        ({"experts": 8, "capacity_factor": float("nan")}, {}, "--capacity-factor nan: 0 or more is needed"),
        ({"experts": 8, "aux_loss_coef": -1.0}, {}, "--aux-loss-coef -1.0: 0 or more is needed"),
        ({"top_k": 3}, {"expert_parallel": 2}, "--top-k and --expert-parallel: for a model with experts; say how many"),
        ({"experts": 2}, {"expert_parallel": 4}, "--expert-parallel 4: a rank would have none of the 2 of --experts 2"),
        ({"experts": 8}, {"expert_parallel": 3}, "--expert-parallel 3 does not divide 4 ranks; take 1 or 2 or 4"),
        (
            {"experts": 8},
            {"parallel": "pipe", "stages": 2, "expert_parallel": 4},
            "--expert-parallel 4: ranks with the same stage divide its experts, and there are 2 pipelines; take 1 or 2",
        ),
        (
            {"experts": 8},
            {"parallel": "pipe", "stages": 2, "expert_parallel": 2, "data_parallel": "ddp"},
            "--expert-parallel 2: --adascale measures gradients that are averaged in the backward pass",
        ),
        (
            {"experts": 8},
            {"tensor_parallel": 2, "sequence_parallel": True},
            "--sequence-parallel: ranks that divide layers route the same tokens to --experts 8",
        ),
    ],
)
def test_experts_that_can_not_be_meant_are_refused(model: Any, parallel: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        adascale = OptimizerOptions(adascale="--adascale" in message)
        check_options(Options(model=ModelOptions(**model), parallel=ParallelOptions(**parallel), optimizer=adascale), 4)


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
    options = options_for(text, "none")
    trained(options, Group(), tmp_path)
    other = replace(options, model=replace(options.model, top_k=1))
    with pytest.raises(InputError, match="a checkpoint of another model: top_k is 2 there, 1 here"):
        trained(other, Group(), tmp_path, resumes=True)
