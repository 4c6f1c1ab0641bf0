import dataclasses
import functools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_check.simulate.simulation import Simulation, track_memory
from scale_checkpoint.offload import storage
from scale_core import ParallelDims, compat
from scale_core.comm.group import Group, group_of
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.testing import run_ranks
from scale_fsdp import class_policy
from scale_pipe.schedules.classic import interleaved_1f1b, one_forward_one_backward
from scale_tools.plan.estimate import count_parameters, estimate, estimate_replica, least_bytes
from scale_tools.plan.model import Built, planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.report import as_json, print_plan
from scale_tools.plan.rows import PlanRow, judge, suggest
from scale_tools.plan.simulated_rank import Estimate, _host_peak, simulated_rank
from scale_tools.plan.stages import (
    PlannedStageTimes,
    SimulatedStage,
    build_stage,
    pipeline_seconds,
    ranks_to_simulate,
    ranks_to_time,
    schedule_seconds,
    simulate_stage,
    step_of_stage,
)
from scale_tools.plan.strategies import Strategy, strategies, with_offload
from scale_train.cli import main, parse
from scale_train.configuration.resolve import check_options, options_without_effect
from scale_train.errors import InputError
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.options import OptimizerOptions, Options, ParallelOptions
from scale_train.training.parallel.engine import make_engine
from scale_train.training.parallel.parallelize_gpt import parallel_dims

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"
)

TINY = PlanOptions(layers=2, width=32, heads=4, size="tiny", ranks=(4,), batch=8, sequence=16, precision="fp32", jobs=1)
OF_ANY = ["plan", "--batch", "8", "--sequence", "16", "--ranks", "4", "--precision", "fp32", "--jobs", "1"]
COMMAND = [*OF_ANY, "--size", "tiny", "--layers", "2", "--width", "32", "--heads", "4"]
KEPT = ["--activations", "keep"]
NUM_PARAMS = sum(param.numel() for param in GPT(ModelConfig(2, 32, 4)).parameters())


@functools.cache
def found_for(parallel: Any, model_ranks: int = 1, options: PlanOptions = TINY, **changes: Any) -> Estimate:
    chunks = 4 if parallel == "pipe" else 1
    strategy = Strategy(parallel, options.ranks[0], model_ranks, chunks, **changes)
    return estimate(planned_model(options), strategy, options)


def run_json(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0, command: Sequence[str] = COMMAND
) -> dict:
    assert main([*command, "--json", *arguments]) == code
    content: dict = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.simulation
def test_state_and_traffic_are_what_formulas_say() -> None:
    assert count_parameters(planned_model(TINY)) == NUM_PARAMS
    full = 4 * NUM_PARAMS
    for parallel, params, state, sent in (
        ("ddp", full, 2 * full, {"all_reduce": 6 * full // 4}),
        ("oss", full, 2 * full // 4, {"all_reduce": 6 * full // 4, "all_gather": 3 * full // 4}),
        ("sharded-ddp", full, 2 * full // 4, {"reduce_scatter": 3 * full // 4, "all_gather": 3 * full // 4}),
    ):
        found = found_for(parallel)
        assert found.problem == ""
        # OSS pads its parts, and buffers of ranges pad theirs.
        assert found.peak_by_kind["parameters"] == pytest.approx(params, rel=0.02)
        assert found.peak_by_kind["optimizer state"] == pytest.approx(state, rel=0.05)
        assert found.bytes_sent == {op: pytest.approx(size, rel=0.02) for op, size in sent.items()}
    sharded = found_for("fsdp")
    assert sharded.peak_by_kind["parameters"] == pytest.approx(full / 4, rel=0.02)
    # The units are gathered in the forward, and those that were released once more in the backward.
    assert 3 * full / 4 <= sharded.bytes_sent["all_gather"] <= 2.05 * 3 * full / 4
    assert sharded.bytes_sent["reduce_scatter"] == pytest.approx(3 * full / 4, rel=0.02)


@pytest.mark.simulation
@without_gpu
def test_the_time_of_a_step_is_that_of_simulated_streams() -> None:
    wide = dataclasses.replace(TINY, precision="bf16")
    slow = dataclasses.replace(wide, link=1e-4)
    for parallel in ("ddp", "sharded-ddp", "fsdp", "tensor-parallel", "context-parallel"):
        model_ranks = 2 if parallel == "tensor-parallel" else 1
        context_ranks = 2 if parallel == "context-parallel" else 1
        found, waiting = (found_for(parallel, model_ranks, each, context_ranks=context_ranks) for each in (wide, slow))
        assert found.problem == "" and found.seconds is not None and waiting.seconds is not None
        row = judge(planned_model(wide), found, wide)
        assert row.seconds == found.seconds and row.fits
        # Segments of the allocator are 2 MiB at least.
        assert found.reserved_bytes is not None and found.peak_bytes <= found.reserved_bytes == waiting.reserved_bytes
        # Whatever overlaps, what is sent takes its time at least, less a step that hides all of it.
        sent = sum(waiting.bytes_sent.values()) * (1 / slow.link - 1 / wide.link) / 1e9
        assert sent - found.seconds <= waiting.seconds - found.seconds <= sent * 1.01


@pytest.mark.simulation
@without_gpu
def test_one_run_gives_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def simulated(**arguments: Any) -> Any:
        devices.append(arguments["device"])
        return simulate(**arguments)

    monkeypatch.setattr("scale_tools.plan.simulated_rank.simulate", simulated)
    for strategy, num_runs in (
        (Strategy("fsdp", 4), 1),
        (Strategy("fsdp-offload", 4), 1),
        (Strategy("pipe", 4, 2, 4), 2),
    ):
        found = estimate(planned_model(TINY), strategy, TINY)
        assert found.seconds is not None and found.reserved_bytes is not None
        assert 0 < found.peak_bytes <= found.reserved_bytes
        assert devices == ["sim"] * num_runs
        devices.clear()


class _GRUModel(nn.Module):
    """A model whose recurrent cell has no kernel on the simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(256, 8), nn.ModuleList([nn.GRU(8, 8), nn.GRU(8, 8)])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)[0]
        return x.sum()


@pytest.mark.simulation
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_model_that_streams_cannot_run_has_no_time_and_says_why(
    parallel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = dataclasses.replace(
        planned_model(TINY),
        build=lambda: Built(_GRUModel(), lambda model, *batch: model(*batch)),
        blocks=lambda _: class_policy(nn.GRU),
    )
    found = estimate(planned, Strategy(parallel, 4), TINY)
    assert found.problem == "" and found.peak_bytes > 0
    assert (found.seconds, found.reserved_bytes) == (None, None)
    assert found == dataclasses.replace(
        estimate_replica(planned, found.strategy, TINY, "cpu"), no_time_reason=found.no_time_reason
    )
    timed = judge(planned, dataclasses.replace(found, seconds=1.0), TINY)
    row = judge(planned, found, TINY)
    suggested = suggest([row, timed])
    assert row.fits and suggested is not None and suggested.fastest is suggested.cheapest is timed
    print_plan(planned, 10, TINY, [row], suggest([row]))
    printed = capsys.readouterr().out
    assert "Cheapest and fastest of what fits" in printed
    reason = "aten::_thnn_fused_gru_cell of GRU does not run on the simulated GPU"
    assert f"{parallel}: no time and no reserved memory, because {reason}\n" in printed
    assert as_json(planned, 10, TINY, [row], None)["strategies"][0]["no_time_reason"] == reason


def test_what_the_allocator_reserves_must_fit() -> None:
    found = Estimate(Strategy("fsdp", 4), {"parameters": 70 * 10**9}, seconds=1.0, reserved_bytes=80 * 10**9)
    assert judge(planned_model(TINY), found, TINY).fits
    row = judge(planned_model(TINY), dataclasses.replace(found, reserved_bytes=81 * 10**9), TINY)
    assert (row.fits, row.reason) == (False, "the allocator reserves 75.4 GiB of 74.5")


@pytest.mark.simulation
@without_gpu
def test_a_full_device_gets_cached_memory_back(capsys: pytest.CaptureFixture[str]) -> None:
    options = dataclasses.replace(TINY, layers=4, width=512, heads=8, sequence=128, precision="bf16", margin=0.0)
    planned = planned_model(options)
    found = estimate(planned, Strategy("fsdp", 4), options)
    assert found.reserved_bytes is not None and not found.num_alloc_retries
    smaller = dataclasses.replace(options, device_memory=f"{(found.peak_bytes + found.reserved_bytes) // 2}B")
    again = estimate(planned, Strategy("fsdp", 4), smaller)
    assert again.num_alloc_retries and again.peak_bytes == found.peak_bytes
    assert again.reserved_bytes is not None and again.reserved_bytes < found.reserved_bytes
    for fits in (True, False):
        memory = again.reserved_bytes if fits else again.reserved_bytes - 1
        row = judge(planned, again, dataclasses.replace(options, device_memory=f"{memory}B"))
        print_plan(planned, 10**6, options, [row], None)
        assert row.fits == fits == (f"cached memory {again.num_alloc_retries} times" in capsys.readouterr().out)


@pytest.mark.simulation
@without_gpu
def test_what_the_allocator_reserves_for_a_pipeline_must_fit() -> None:
    found = found_for("pipe", 2)
    assert found.reserved_bytes is not None and found.peak_bytes < found.reserved_bytes
    for memory, fits in ((found.reserved_bytes, True), (found.reserved_bytes - 1, False)):
        row = judge(planned_model(TINY), found, dataclasses.replace(TINY, device_memory=f"{memory}B", margin=0.0))
        assert row.fits == fits and row.reason.startswith("the allocator reserves") != fits


@pytest.mark.simulation
@without_gpu
@pytest.mark.parametrize("shards", [False, True])
def test_a_pipelines_time_is_its_schedule_with_simulated_stages(shards: bool) -> None:
    wide = dataclasses.replace(TINY, precision="bf16")
    slow = dataclasses.replace(wide, link=1e-4)
    found, waiting = (found_for("pipe", 2, options, shards_stages=shards) for options in (wide, slow))
    assert found.problem == "" and found.seconds is not None and waiting.seconds is not None
    assert judge(planned_model(wide), found, wide).seconds == found.seconds
    # A rank sends an activation, or a gradient, for each of four micro-batches, and the first one is not hidden.
    sent = waiting.bytes_sent["send"] / (slow.link * 1e9)
    others = (sum(waiting.bytes_sent.values()) - waiting.bytes_sent["send"]) / (slow.link * 1e9)
    # The average follows the last backward. Gathers are inside of computations: a rank that waits has none to hide.
    least, most = (others / 2, others * 5 / 4) if shards else (others * 0.99, others)
    assert least + sent * 5 / 4 <= waiting.seconds <= (2 * sent + most) * 1.01 + found.seconds


@pytest.mark.simulation
@without_gpu
def test_what_comes_once_in_a_step_is_counted_once() -> None:
    """A pipeline of sharded stages with four and eight micro-batches, on a link that is slow."""
    seconds = []
    for batch in (8, 16):
        options = dataclasses.replace(TINY, batch=batch, link=1e-4, precision="bf16")
        strategy = Strategy("pipe", 4, 2, batch // 2, shards_stages=True)
        seconds.append(simulate_stage(planned_model(options), strategy, options, 0, batch // 2).times)
    assert seconds[0] == pytest.approx(seconds[1])
    reduced = found_for("pipe", 2, shards_stages=True).bytes_sent["reduce_scatter"] / (1e-4 * 1e9)
    assert seconds[0].after >= reduced * 0.5


@pytest.mark.simulation
@without_gpu
def test_a_stage_with_frozen_parameters_is_timed() -> None:
    planned, strategy = planned_model(TINY), Strategy("pipe", 4, 2, 4)

    def build(*dims: Any) -> Any:
        built = planned.build(*dims)
        next(built.model.parameters()).requires_grad_(False)
        return built

    frozen = dataclasses.replace(planned, build=build, build_over=None)
    assert simulate_stage(frozen, strategy, TINY, 0, 4).times.backward > 0


ON_TWO = PlanOptions("tiny", 3, 64, 4, ranks=(2,), batch=8, sequence=32, precision="fp32", jobs=1)
MEASURED: tuple[tuple[Any, Any], ...] = (
    ("fsdp", "none"),
    ("fsdp", "selective"),
    ("fsdp", "all"),
    ("ddp", "none"),
    ("ddp", "all"),
    ("oss", "none"),
    ("sharded-ddp", "none"),
)


def _measured_steps() -> list[dict[str, int]]:
    """The peak by kind of this rank's second step with each of these, of the engine that `scale-train lm` trains."""
    return [_measured_step(*way, group_of()) for way in MEASURED]


def _measured_step(parallel: Any, checkpoint: Any, group: Group) -> dict[str, int]:
    host = torch.device("cpu")
    with track_memory(Simulation(group.rank, group.size, check=True, device=host)) as simulation:
        options = ParallelOptions(ranks=2, parallel=parallel, checkpoint_activations=checkpoint)
        return _second_step(ModelConfig(3, 64, 4), options, parallel_dims(options, group.size), simulation, (4, 32))


def _second_step(
    config: ModelConfig, options: ParallelOptions, dims: ParallelDims, simulation: Simulation, shape: tuple[int, int]
) -> dict[str, int]:
    batch, sequence = shape
    with torch.device("meta") if options.parallel == "fsdp" else nullcontext():
        model = GPT(config, dims)
    engine = make_engine(model, options, OptimizerOptions(), dims, torch.device("cpu"))
    for _ in range(2):
        simulation.restart()
        tokens = torch.zeros(batch, sequence + 1, dtype=torch.int64)
        engine.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        engine.optimizer.step()
        engine.params()
        engine.optimizer.zero_grad()
    return simulation.peak_by_kind


@pytest.mark.simulation
def test_a_plan_is_what_two_real_ranks_hold() -> None:
    """Of real tensors, gradients and gloo; the plan is that of rank 0 on the host, whose attention these ranks have."""
    first, _ = run_ranks(_measured_steps, 2)
    for way, measured in zip(MEASURED, first, strict=True):
        parallel, checkpoint = way
        strategy = Strategy(parallel, 2, checkpoint=checkpoint)
        found = estimate_replica(planned_model(ON_TWO), strategy, ON_TWO, "cpu")
        planned = dict(found.peak_by_kind)
        # gloo reduces by messages, so that what they are sent from goes by no name of its own.
        planned["temporaries"] += planned.pop("reduction", 0)
        if parallel in ("fsdp", "ddp"):
            assert planned == measured, way
            continue
        # A parameter of OSS is a storage over a part of its buffer, and is met as one beside it (scale-oss/DESIGN.md).
        measured["parameters"] //= 2
        padding = 1 << 10
        for kind in ("parameters", "gradients", "optimizer state"):
            assert planned.get(kind, 0) == pytest.approx(measured.get(kind, 0), abs=padding), (way, kind)
        if parallel == "oss":
            assert found.peak_bytes == pytest.approx(sum(measured.values()), abs=padding)
        else:  # Messages of gloo begin and end elsewhere than a reduce-scatter.
            assert sum(measured.values()) <= found.peak_bytes <= 1.03 * sum(measured.values())


@pytest.mark.simulation
@without_gpu
def test_a_gpu_differs_from_the_host_by_attention_and_overlapped_reductions() -> None:
    def peaks(parallel: Any, options: PlanOptions) -> list[dict[str, int]]:
        planned, strategy = planned_model(options), Strategy(parallel, 2)
        return [estimate_replica(planned, strategy, options, device).peak_by_kind for device in ("cpu", "sim")]

    for parallel in ("ddp", "fsdp"):
        host, gpu = peaks(parallel, ON_TWO)
        # In each of three blocks of two attention results [4, 32, 64] one is missing; states of dropout have 16 bytes.
        assert host.pop("activations") - gpu.pop("activations") == 3 * (4 * 32 * 64 * 4 - 16)
        assert host == gpu
    host, gpu = peaks("fsdp", dataclasses.replace(ON_TWO, batch=4, precision="bf16"))
    block = 12 * 64**2 + 13 * 64  # A block's gradients, in fp32, are reduced while the next ones are computed.
    assert gpu["reduction"] - host["reduction"] == pytest.approx(4 * block, rel=0.01)


@pytest.mark.simulation
def test_divided_experts_send_rows_of_tokens_in_place_of_weights() -> None:
    """Four ranks of 32 tokens, two choices each: rows of 32 features there and back, forward and backward."""
    options = PlanOptions(**{**vars(TINY), "layers": 1, "experts": 4, "expert_parallel": 4})
    found = found_for("fsdp", options=options, expert_ranks=4)
    assert found.problem == ""
    rows, experts = 4 * (2 * 32 * 32 * 4) * 3 // 4, 4 * 2 * 32 * 128 * 4
    assert found.bytes_sent["all_to_all"] == rows
    whole = found_for("fsdp", options=options)
    assert whole.bytes_sent["all_gather"] - found.bytes_sent["all_gather"] == pytest.approx(
        2 * experts * 3 / 4, rel=0.1
    )


PIPELINES = ParallelOptions(ranks=4, parallel="pipe", stages=2, chunks=4, data_parallel="fsdp")


def _measured_pipeline() -> dict[str, int]:
    """The peak of this rank's second step with two pipelines that shard their stages, as `scale-train lm` trains them.

    A receive is a buffer, and a message a copy of what is sent, which the plan does not know.
    """
    group, host = group_of(), torch.device("cpu")
    with track_memory(Simulation(group.rank, group.size, check=True, device=host)) as simulation:
        dims = parallel_dims(PIPELINES, group.size)
        with torch.device("meta"):
            model = GPT(ModelConfig(3, 64, 4))
        engine = make_engine(model, PIPELINES, OptimizerOptions(), dims, host)
        del model
        for _ in range(2):
            simulation.restart()
            tokens = torch.zeros(4, 33, dtype=torch.int64)
            assert engine.pipeline is not None
            engine.pipeline.step(tokens[:, :-1], tokens[:, 1:], ShardedGradScaler(enabled=False))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return simulation.peak_by_kind


@pytest.mark.simulation
def test_a_pipeline_of_sharded_stages_is_what_real_ranks_hold() -> None:
    options, strategy = dataclasses.replace(ON_TWO, ranks=(4,)), Strategy("pipe", 4, 2, 4, shards_stages=True)
    with simulated_rank(strategy, options, "cpu") as simulated:
        built = build_stage(planned_model(options), strategy, simulated.dims, 1, options)
        step = step_of_stage(built, strategy, options, 1, average=lambda: None, after=lambda kind: None)
        planned = simulated.estimate(strategy, [functools.partial(step, 4)] * 2)
    measured = run_ranks(_measured_pipeline, 4)[2]  # The last stage, which has two of three blocks, of one pipeline.
    for kind in ("parameters", "gradients", "optimizer state", "gathered"):
        assert measured.get(kind, 0) == planned.peak_by_kind.get(kind, 0), kind
    assert planned.peak_bytes <= sum(measured.values()) <= 1.03 * planned.peak_bytes


@pytest.mark.simulation
@pytest.mark.parametrize("divided", [1, 2, 4])
def test_experts_are_planned_with_the_bytes_of_their_engine(divided: int) -> None:
    options = PlanOptions(**{**vars(TINY), "experts": 4, "expert_parallel": divided})
    found = estimate_replica(planned_model(options), Strategy("fsdp", 4, expert_ranks=divided), options, "cpu")
    with simulate(world_size=4) as simulation:
        asked = ParallelOptions(parallel="fsdp", expert_parallel=divided)
        with simulation.aside():
            dims = parallel_dims(asked, group_of().size)
        peak = _second_step(ModelConfig(2, 32, 4, experts=4), asked, dims, simulation, (2, 16))
        assert (found.peak_by_kind, found.bytes_sent) == (peak, simulation.bytes_sent)


@pytest.mark.simulation
@without_gpu
def test_experts_of_pipelines_are_divided_within_a_stage() -> None:
    options = PlanOptions(**{**vars(TINY), "experts": 4, "expert_parallel": 2})
    whole, divided = (
        found_for("pipe", 2, options, shards_stages=shards, expert_ranks=ranks)
        for shards, ranks in ((False, 1), (True, 2))
    )
    assert whole.problem == divided.problem == ""
    assert divided.peak_by_kind["optimizer state"] == pytest.approx(whole.peak_by_kind["optimizer state"] / 2, rel=0.1)
    assert "all_to_all" not in whole.bytes_sent
    assert divided.bytes_sent["all_to_all"] == 4 * 4 * (2 * 16 * 32 * 4) // 2, "four passes of four micro-batches"


def test_experts_are_planned_with_every_way_of_training() -> None:
    options = PlanOptions(ranks=(8,), batch=8, experts=8, expert_parallel=2)
    found = strategies(options, 4)
    ways = ("fsdp", "fsdp-offload", "tensor-parallel", "context-parallel", "pipe")
    assert {each.parallel for each in found} == {*ways, "ddp", "oss", "sharded-ddp"}
    assert {each.parallel for each in strategies(dataclasses.replace(options, ranks=(1,), expert_parallel=1), 4)} == {
        "none",
        "fsdp-offload",
    }
    assert {each.parallel for each in found if each.expert_ranks == 2} == set(ways)
    divided, offloaded = (
        next(each for each in found if each.expert_ranks == 2 and each.parallel == way) for way in ways[:2]
    )
    assert divided.title == "fsdp, experts over 2"
    assert sum("offload_policy" in line for line in offloaded.python("fp32", with_experts=True)) == 2
    for each in found:
        compile("\n".join(python := each.python("fp32", with_experts=True)), each.title, "exec")
        assert any("MoE(" in line for line in python) == (each.expert_ranks > 1 or "tensor-parallel" in each.title)
        command = each.command(options, planned_model(options).size)
        assert command is not None
        asked = parse(shlex.split(command)[1:])
        assert isinstance(asked, Options)
        check_options(asked, 8)
        assert (asked.model.experts, asked.model.top_k) == (8, 2)
        assert asked.parallel == each.parallel_options(options.precision)
    python = divided.python("fp32", with_experts=True)
    assert "dims = scale_core.ParallelDims(ep=2)" in python


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "-1"], "--experts -1: 0 or more is needed"),
        (["--expert-parallel", "2"], "--expert-parallel: for a model with experts; say how many, as --experts 8"),
        (["--top-k", "1"], "--top-k: for a model with experts; say how many"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5: a token goes to at most all 4 of --experts 4"),
        (["--experts", "4", "--top-k", "0"], "--top-k 0: at least 1 is needed"),
        (["--experts", "4", "--expert-parallel", "3"], "--expert-parallel 3 does not divide 4 ranks; take 1 or 2"),
        (["--experts", "2", "--expert-parallel", "4"], "--expert-parallel 4: a rank would have none of the 2"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.simulation
@without_gpu
def test_pipelines_and_divided_layers_hold_and_send_their_part() -> None:
    pipe, divided = found_for("pipe", 2), found_for("tensor-parallel", 2)
    assert pipe.problem == divided.problem == ""
    # Two pipelines with 4 micro-batches of one sequence each: activations [1, 16, 32] in fp32, or their gradients.
    assert pipe.bytes_sent["send"] == 4 * 16 * 32 * 4
    assert pipe.bytes_sent["all_reduce"] > 0
    block = 12 * 32**2 + (96 + 32 + 128 + 32) + 4 * 32
    assert pipe.peak_by_kind["parameters"] == 4 * (block + 256 * 32)  # The first stage has the embedding.
    activations = 4 * 16 * 32 * 4  # of the 4 sequences of a group, fp32
    assert divided.bytes_sent["all_reduce"] == 2 * 4 * activations  # 4 of them in each of 2 blocks


@pytest.mark.simulation
@without_gpu
def test_sharded_or_divided_stages_hold_less_and_send_more() -> None:
    whole, sharded = found_for("pipe", 2), found_for("pipe", 2, shards_stages=True)
    assert sharded.problem == ""
    stage = whole.peak_by_kind["parameters"]
    assert whole.peak_by_kind["reduction"] == stage, "the buckets of DistributedDataParallel"
    assert sharded.peak_by_kind["parameters"] == pytest.approx(stage / 2, rel=0.02)
    assert sharded.peak_by_kind["optimizer state"] == pytest.approx(stage, rel=0.02)
    # Gradients are reduced once per step, parameters gathered for the passes of each of the four micro-batches.
    assert sharded.bytes_sent["reduce_scatter"] == pytest.approx(stage / 2, rel=0.02)
    assert 4 * stage / 2 <= sharded.bytes_sent["all_gather"] <= 2.05 * 4 * stage / 2
    assert sharded.bytes_sent["send"] == whole.bytes_sent["send"]
    assert "all_reduce" not in sharded.bytes_sent
    divided = found_for("pipe", 2, tensor_ranks=2)
    assert divided.problem == ""
    activations = 8 * 16 * 32 * 4  # of the one pipeline's batch
    assert divided.bytes_sent["all_reduce"] == 4 * activations  # four in the block of the stage
    assert divided.bytes_sent["send"] == activations
    table = 4 * 256 * 32
    assert stage / 2 < divided.peak_by_kind["parameters"] < (stage - table) / 2 * 1.05 + table
    assert least_bytes(sharded.strategy, 1000) == least_bytes(divided.strategy, 1000) == 4000


def test_a_pipelines_ends_and_its_fullest_rank_are_simulated() -> None:
    # 1, 2 and 2 blocks, of 3, 2 and 1 live micro-batches.
    uneven = planned_model(PlanOptions(**{**vars(TINY), "layers": 5}))
    assert ranks_to_simulate(uneven, Strategy("pipe", 3, 3, 4)) == [0, 1, 2]
    even = planned_model(PlanOptions(**{**vars(TINY), "layers": 6}))
    assert ranks_to_simulate(even, Strategy("pipe", 3, 3, 4)) == [0, 2]


def test_stages_with_as_many_blocks_are_timed_once() -> None:
    uneven = planned_model(PlanOptions(**{**vars(TINY), "layers": 10}))  # 1, 2, 2, 1, 2, 2 blocks.
    assert ranks_to_time(uneven, Strategy("pipe", 6, 6, 4)) == [0, 1, 1, 3, 1, 5]


def test_a_pipeline_has_its_largest_peak_and_longest_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stage(planned: object, strategy: Strategy, options: object, rank: int, *arguments: Any) -> SimulatedStage:
        found = Estimate(strategy, {"parameters": 9 - rank}, {}, {"send": rank}, 1.0, 20 + rank)
        return SimulatedStage(found, PlannedStageTimes(1.0, 2.0, 0.0, after=rank))

    monkeypatch.setattr("scale_tools.plan.stages.simulate_stage", stage)
    found = found_for.__wrapped__("pipe", 2)
    assert (found.peak_bytes, found.reserved_bytes, found.bytes_sent, found.seconds) == (9, 21, {"send": 1}, 15.0)


@pytest.mark.simulation
def test_processes_that_see_no_gpu_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = run_json(capsys, "--only", "fsdp-offload", *KEPT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_json(capsys, "--only", "fsdp-offload", *KEPT) == seen and seen["strategies"][0]["peak_bytes"] > 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.simulation
def test_what_is_kept_on_the_host_is_not_on_the_device() -> None:
    found = found_for("fsdp-offload")
    assert found.problem == ""
    assert set(found.peak_by_kind).isdisjoint({"parameters", "optimizer state"})
    assert found.host_peak_by_kind["optimizer state"] == pytest.approx(2 * NUM_PARAMS, rel=0.05)


@pytest.mark.simulation
def test_pinned_memory_of_a_host_is_counted_as_torch_rounds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with simulate(device="sim") as simulation:
        shards = [torch.empty(3 << 20, dtype=torch.uint8, device="cpu") for _ in range(2)]
        state = torch.empty(5 << 20, dtype=torch.uint8, device="cpu")
        for shard in shards:
            simulation.label(shard, "parameters")
        simulation.label(state, "optimizer state")
        host = _host_peak(simulation.on("cpu"))
    rounding = "rounding of pinned memory"
    assert host == {"parameters": 6 << 20, "optimizer state": 5 << 20, rounding: 2 << 20}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_round_threshold_mb:1")
    is_set = compat.torch_version() >= (2, 13)
    assert (rounding not in _host_peak(simulation.on("cpu"))) == is_set
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    large = Estimate(Strategy("fsdp-offload", 4), {"gathered": 1}, {rounding: 33 << 29})
    print_plan(planned_model(TINY), NUM_PARAMS, TINY, [judge(planned_model(TINY), large, TINY)], None)
    assert "66.0 GiB of a host. From torch 2.13 on, PYTORCH_ALLOC_CONF=" in capsys.readouterr().out
    found = found_for("fsdp-offload")
    assert 0 < found.host_peak_by_kind[rounding] < found.host_bytes / 2


def test_what_state_alone_makes_too_large_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--device-memory", "10KB", "--only", "ddp", code=1)
    (kept, selective, checkpointed) = found["strategies"]
    assert selective["peak_bytes"] == kept["peak_bytes"]
    assert kept["peak_is_lower_bound"] and kept["peak_bytes"] == 16 * NUM_PARAMS and kept["step_seconds"] is None
    assert not kept["fits"] and not checkpointed["fits"] and found["suggested"] is None
    assert least_bytes(Strategy("oss", 4), 1000) == 8000 + 2000
    assert least_bytes(Strategy("pipe", 4, 2), 1000) == 8000


def planned_commands(options: PlanOptions) -> Iterator[tuple[Strategy, str, Options]]:
    """Every way that these options compare, offloaded too, with its command and what the program reads in that."""
    for strategy in strategies(options, num_layers=options.layers):
        for each in filter(None, (strategy, with_offload(strategy))):
            command = each.command(options, options.size)
            assert command is not None
            program, *words = shlex.split(command)
            parsed = parse(words)
            assert program == "scale-train" and isinstance(parsed, Options)
            yield each, command, parsed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_command_is_taken_and_each_python_compiles(precision: Any) -> None:
    for ranks in ((1, 2, 4, 8, 16), (6, 24)):
        options = PlanOptions("tiny", 4, 64, 8, ranks=ranks, batch=48, sequence=48, precision=precision, loss_chunk=8)
        seen = set()
        for strategy, command, parsed in planned_commands(options):
            check_options(parsed, strategy.ranks)
            assert options_without_effect(parsed) == [], command
            assert parsed.parallel == strategy.parallel_options(precision), "what is planned is what is typed"
            compile("\n".join(strategy.python(precision)), command, "exec")
            python = "\n".join(strategy.python(precision))
            assert ("ShardedGradScaler" in python) == (precision == "fp16")
            assert precision != "fp16" or ".backward()" not in python or "scaler.scale(model(" in python
            seen.add(command)
        assert len(seen) == sum(1 for _ in planned_commands(options)), "two ways have one command"


def row(ranks: int, seconds: float, fits: bool = True) -> PlanRow:
    return PlanRow(Estimate(Strategy("fsdp", ranks)), fits, "", seconds, ranks * seconds, None, [])


def test_cheapest_is_the_fewest_device_seconds_for_a_token() -> None:
    one, four, eight = row(1, 10.0), row(4, 2.0), row(8, 1.5)
    found = suggest([eight, row(2, 0.1, fits=False), one, four])
    assert found is not None
    assert [(name, each.found.strategy.ranks) for name, each in found.named(several=True)] == [
        ("cheapest", 4),
        ("fastest", 8),
        ("fewest devices", 1),
    ]
    same = suggest([row(8, 2.0), four, row(4, 3.0)])
    assert same is not None
    assert same.named(several=True) == [("cheapest, fastest and fewest devices", four)]
    assert same.named(several=False) == [("cheapest and fastest", four)]
    assert suggest([row(1, 1.0, fits=False)]) is None


@pytest.mark.simulation
def test_several_numbers_of_ranks_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    asked = ["--ranks", "2", "4", "--only", "sharded-ddp", "--activations", "keep", "--link", "0.001"]
    found = run_json(capsys, "--picture", str(picture), *asked)
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml") and "sharded-ddp, 2 ranks (cheapest" in drawn
    assert found["num_parameters"] == NUM_PARAMS and [each["ranks"] for each in found["strategies"]] == [2, 4]
    for each in found["strategies"]:
        cost = each["ranks"] * each["step_seconds"] / (8 * 16) * 1e6
        assert each["device_seconds_per_million_tokens"] == pytest.approx(cost)
    best = found["suggested"]
    costs = [each["device_seconds_per_million_tokens"] for each in found["strategies"]]
    assert best["cheapest"]["device_seconds_per_million_tokens"] == min(costs) and best["cheapest"]["ranks"] == 2
    assert best["fastest"]["step_seconds"] == min(each["step_seconds"] for each in found["strategies"])
    assert best["fewest_devices"]["ranks"] == 2 and "--ranks 2 --parallel sharded-ddp" in best["cheapest"]["command"]


@pytest.mark.simulation
def test_activations_go_to_the_host_where_they_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # The activations of a model as small as this one would all be fetched ahead.
    monkeypatch.setattr(storage, "_PREFETCH_BYTES", 0)
    storage.copy_streams.cache_clear()
    request.addfinalizer(storage.copy_streams.cache_clear)
    wide = ["--width", "128", "--sequence", "128", "--only", "fsdp", "--activations", "keep", "offload"]
    roomy = run_json(capsys, *wide)
    (kept,) = roomy["strategies"]
    budget = int(kept["peak_bytes"] * 0.9)  # The allocator keeps a segment more than the tensors of so small a model.
    tight = run_json(capsys, *wide, "--device-memory", f"{budget}B", "--margin", "0")
    kept, offloaded = tight["strategies"]
    assert not kept["fits"] and offloaded["fits"] and offloaded["title"] == "fsdp, activations offloaded"
    assert offloaded["command"] == kept["command"] + " --offload-activations"
    on_host = offloaded["host_peak_by_kind"]["activations"]
    # What is left on the device is small.
    assert on_host > 0
    assert offloaded["peak_by_kind"].get("activations", 0) < kept["peak_by_kind"]["activations"] / 10


@pytest.mark.simulation
def test_divided_sequences_keep_less_and_send_keys_and_values() -> None:
    whole, divided = found_for("fsdp"), found_for("context-parallel", context_ranks=2)
    assert divided.problem == ""
    assert divided.peak_by_kind["parameters"] == whole.peak_by_kind["parameters"]
    # Keys and values of half a sequence, [4, 8, 32] each, once round two ranks in each block, and once more in the
    # backward, where their gradients go two steps.
    half = 4 * 8 * 32 * 4
    assert divided.bytes_sent["all_to_all"] == 2 * (2 * half + 2 * half + 2 * 2 * half)


@pytest.mark.simulation
def test_selective_checkpointing_keeps_less_than_all() -> None:
    peaks = [found_for("fsdp", checkpoint=each) for each in ("none", "selective", "all")]
    kept, selective, recomputed = (each.peak_by_kind.get("activations", 0) for each in peaks)
    assert kept > selective > recomputed


@pytest.mark.simulation
def test_fp16_is_planned_with_its_scaler() -> None:
    half = found_for("fsdp", options=PlanOptions(**{**vars(TINY), "precision": "fp16"}))
    assert half.problem == "" and half.peak_bytes < found_for("fsdp").peak_bytes
    assert half.bytes_sent["all_reduce"] == 2 * 3 * 20 // 4, "five numbers of the scaler, which all ranks agree on"


@pytest.mark.simulation
def test_the_table_names_what_fits_and_the_margin_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--only", "fsdp", *KEPT]) == 0
    printed = capsys.readouterr().out
    assert "Cheapest and fastest of what fits: fsdp\n" in printed
    assert "--parallel fsdp" in printed and "MiB of one rank at its peak" in printed and "33.7" not in printed
    peak = found_for("fsdp").peak_bytes
    run_json(capsys, "--only", "fsdp", *KEPT, "--device-memory", f"{peak}B", "--margin", "0.2", code=1)


def test_a_problem_of_several_rows_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    problems = {1: "no plan", 2: "no plan", 4: "no heads"}
    rows = [
        judge(planned_model(TINY), Estimate(Strategy("tensor-parallel", 4, ranks), problem=problem), TINY)
        for ranks, problem in problems.items()
    ]
    print_plan(planned_model(TINY), 10, TINY, rows, None)
    printed = capsys.readouterr().out
    assert f"{rows[0].found.strategy.title} and 1 more: no plan\n" in printed and printed.count("no plan") == 1
    assert f"\n{rows[2].found.strategy.title}: no heads\n" in printed


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten().clamp(max=7))


def no_module() -> int:
    return 3


@pytest.mark.simulation
def test_a_model_of_ones_own_and_one_of_transformers_are_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    found = run_json(capsys, "--factory", f"{__name__}:Blocks", "--only", "fsdp", *KEPT, command=OF_ANY)
    assert found["num_parameters"] == 50 * 8 + 3 * 72
    assert all(each["fits"] and each["command"] is None for each in found["strategies"])
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path)
    found = run_json(capsys, "--config", str(tmp_path), "--only", "tensor-parallel", *KEPT, command=OF_ANY)
    assert [each["reason"] for each in found["strategies"]] == [""] * len(found["strategies"])


@pytest.mark.parametrize("only", ["fsdp", "fsdp-offload", "tensor-parallel"])
def test_a_config_of_transformers_gets_a_command_that_trains_it(tmp_path: Path, only: str) -> None:
    folder = tmp_path / "a llama"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 512}')
    options = PlanOptions(config=folder, only=(only,), ranks=(4,), batch=8, sequence=64)
    for strategy in strategies(options, num_layers=None):
        command = strategy.command(options, None)
        assert command is not None
        parsed = parse(shlex.split(command)[1:])
        assert isinstance(parsed, Options)
        assert (parsed.model.model, parsed.parallel) == (folder, strategy.parallel_options("bf16"))
        python = "\n".join(strategy.python("bf16", policy="scale_fsdp.no_split_policy(model)"))
        assert ("no_split_policy(model)" in python) == ("fully_shard_modules" in python) and "Block" not in python


def test_stages_that_are_interleaved_wait_for_shorter_stages() -> None:
    whole, half = PlannedStageTimes(2.0, 4.0, 0.0, after=1.0), PlannedStageTimes(1.0, 2.0, 0.0, after=0.5)
    assert schedule_seconds(one_forward_one_backward(2, 4), [whole] * 2) == 5 * 6 + 1
    assert schedule_seconds(interleaved_1f1b(2, 4, 2), [half] * 4) == 4 * 6 + 3 + 1


def test_an_interleaved_pipeline_is_planned_by_its_stages() -> None:
    options = PlanOptions("tiny", layers=8, width=2048, heads=16, batch=8, sequence=2048, tflops=1.0)
    strategy, planned = Strategy("pipe", 2, 2, chunks=4), planned_model(options)
    seconds = [
        pipeline_seconds(planned, dataclasses.replace(strategy, stages_per_rank=number), options) for number in (1, 2)
    ]
    first, interleaved = seconds
    assert first is not None and interleaved is not None
    assert first / interleaved == pytest.approx(5 / 4.5, rel=0.02)  # The bubble is one micro-batch, and half of one.


@pytest.mark.parametrize(
    "words, line",
    [
        ("--only zero", "--only zero: no such way of training; there are ddp, oss,"),
        ("--ranks 0", "--ranks 0: at least 1 is needed"),
        ("--ranks 5 --only fsdp", "--only fsdp: not possible for this model on 5 ranks with --batch 8"),
        ("--device-memory 80", "--device-memory 80: a size is needed, as 5GB or 2GiB"),
        ("--tflops 0", "--tflops 0: a number above 0 is needed"),
        ("--margin 1", "--margin 1: a part from 0 to below 1 is needed"),
        ("--ranks 2 4 2", "--ranks 2 4 2: name each once"),
        ("--jobs 0", "--jobs 0: at least 1 is needed"),
        ("--link inf", "--link inf: a number above 0 is needed"),
        ("--activations offload", "--activations offload: expected a second way"),
        ("--config .", "no config of transformers: it has no model_type"),
        ("--config nowhere", "--config nowhere: No such file or directory"),
        ("--factory test_plan:Blocks", "--size is for models by name, and --factory gives another one"),
        ("--only ddp --ranks 1", "--only ddp: not possible for this model on 1 ranks"),
        ("--factory nowhere", "--factory nowhere: expected package.module:function, which can be imported"),
        ("--factory test_plan:no_module", "expected a torch.nn.Module, got int"),
        ("--size huge", "--size huge: no such size"),
        ("--layers 1000000", "--layers 1000000: more than can be meant; at most 10000"),
        ("--width 0", "--width 0: at least 1 is needed"),
        ("--heads 1000000", "--heads 1000000: more than can be meant; at most 100000"),
        ("--batch 100000000", "--batch 100000000: more than can be meant"),
        ("--sequence 100000000", "--sequence 100000000: more than can be meant"),
        ("--ranks 10000000", "--ranks 10000000: more than can be meant"),
        ("--ranks-per-host 0", "--ranks-per-host 0: at least 1 is needed"),
        ("--loss-chunk -1", "--loss-chunk -1: 0 or more is needed"),
        ("--vocabulary 1000000000", "--vocabulary 1000000000: more than can be meant"),
        ("--experts 1000000", "--experts 1000000: more than can be meant"),
        ("--picture plan.gifx", "--picture plan.gifx: a name that ends in .svg or .png is needed"),
        ("--picture nowhere/plan.svg", "--picture nowhere/plan.svg: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_code_two(
    words: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    assert sys.modules["test_plan"].no_module() == 3
    is_named = not words.startswith(("--config", "--factory")) or "Blocks" in words
    assert main([*(COMMAND if is_named else OF_ANY), *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and line in err, err


def test_techniques_are_compared_where_the_batch_divides() -> None:
    found = strategies(PlanOptions(ranks=(16,), ranks_per_host=8, batch=8), num_layers=12)
    assert {each.checkpoint for each in found} == {"none", "selective", "all"}
    assert {(each.parallel, each.model_ranks, each.chunks) for each in found} == {
        ("context-parallel", 1, 1),
        ("context-parallel", 2, 1),
        ("tensor-parallel", 2, 1),
        ("tensor-parallel", 8, 1),
        ("pipe", 8, 4),
        ("pipe", 4, 4),
    }
    assert {each.title for each in found if each.checkpoint == "none"} == {
        "context-parallel 2 x fsdp",
        "context-parallel 8 x fsdp",
        "tensor-parallel 2 x context-parallel 2 x fsdp",
        "tensor-parallel 2 x fsdp",
        "tensor-parallel 8 x fsdp",
        "pipe of 8 x 2",
        "pipe of 8 x fsdp of 2",
        "tensor-parallel 2 x pipe of 4 x 2",
        "tensor-parallel 2 x pipe of 4 x fsdp of 2",
    }
    eight = [each.title for each in strategies(PlanOptions(ranks=(8,), batch=8, only=("pipe",)), num_layers=12)]
    assert "tensor-parallel 2 x pipe of 2 x fsdp of 2" in eight and len(eight) == len(set(eight))
    with pytest.raises(InputError, match="nothing to compare"):
        strategies(PlanOptions(ranks=(9,), batch=2), num_layers=None)
