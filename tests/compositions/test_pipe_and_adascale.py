"""AdaScale around the optimizer of a pipeline: each micro-batch of each replica is one sample, as on one process.

Models are of fp64, so that what is compared to 1e-6 is the method and not the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from scale_adascale import AdaScale
from scale_core import ShardedGradScaler
from scale_core.hooks.microbatch_grads import microbatch_steps_wanted
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, StageError
from scale_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    context_parallel,
    split_sequence,
)

GAIN = 1e-6  # relative
CHUNKS, STEPS, LR, WIDTH = 4, 3, 0.02, 5
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_breadth_first", "zb_h1", "zb_v", "v_min", "dual_pipe_v")
TWO_STAGES = ("interleaved_1f1b", "looped_breadth_first", "zb_v", "v_half", "v_min", "dual_pipe_v")


@dataclass(frozen=True)
class Case:
    """A training of a few steps.

    Attributes:
        schedule: Of the pipeline.
        adam: Adam, otherwise SGD.
        tied: The first layer and the last have one weight.
        frozen: How many of the first layers are.
        wrap: What stands around the stages, where there are replicas: "ddp", "fsdp", "sdp", or "ddp and oss".
        steps_each: Steps of the pipeline for one of the optimizer.
        chunks: Micro-batches.
        how: What else happens.
    """

    schedule: str = "1f1b"
    adam: bool = False
    tied: bool = False
    frozen: int = 0
    wrap: str = ""
    steps_each: int = 1
    chunks: int = CHUNKS
    how: str = ""


def layers(case: Case) -> nn.Sequential:
    """Eight layers: the first four have other layers than the last four, and each of four stages has two."""
    torch.manual_seed(0)
    linear = [nn.Linear(WIDTH, WIDTH, bias=number % 2 == 0) for number in range(3)]
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), linear[0], nn.LayerNorm(WIDTH), linear[1], nn.Tanh(), linear[2],
        nn.Linear(WIDTH, WIDTH),
    ).double()  # fmt: skip
    if case.tied:
        model[7].weight = model[0].weight
    for layer in model[: case.frozen]:
        layer.requires_grad_(False)
    return model


def batch_of(step: int, replica: int, chunks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x, target = (torch.randn(2 * chunks, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target - 1.5


def inner_of(case: Case, model: nn.Module) -> Any:
    """The parameters in two groups, one of weights and one of biases, so that ranks have parts of both."""
    kind = torch.optim.Adam if case.adam else torch.optim.SGD
    params = dict(model.named_parameters())
    groups = [{"params": [p for n, p in params.items() if n.endswith(ending)]} for ending in ("weight", "bias")]
    return kind, groups


def plain(case: Case, replicas: int) -> list[list[float]]:
    """One process, which computes the gradient of each micro-batch by a backward pass of its own."""
    model = layers(case)
    kind, groups = inner_of(case, model)
    samples = replicas * case.chunks * case.steps_each
    optimizer = AdaScale(kind(groups, lr=LR), scale=2.0 * samples, num_gradients_to_accumulate=samples)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(case.steps_each):
            for replica in range(replicas):
                x, target = batch_of(step * case.steps_each + number, replica, case.chunks)
                for part, to in zip(x.chunk(case.chunks), target.chunk(case.chunks), strict=True):
                    (nn.functional.mse_loss(model(part), to) / samples).backward()
        found.append([optimizer.gain(), optimizer.gain(0), optimizer.gain(1)])
        optimizer.step()
    optimizer.unhook()
    return found


def built(case: Case, ranks: Any, replicas: Any) -> tuple[DistributedPipe, Any]:
    num_stages = 4 if case.schedule in TWO_STAGES else 2
    balance = [8 // num_stages] * num_stages
    checkpoint = "always" if case.how == "checkpointed" else "never"
    pipe = DistributedPipe(
        layers(case), case.schedule, balance=balance, chunks=case.chunks, process_group=ranks, checkpoint=checkpoint
    )
    for index, stage in list(pipe.stages.items()):
        if case.wrap.startswith("ddp"):
            pipe.stages[index] = DistributedDataParallel(stage, process_group=replicas)
        elif case.wrap == "fsdp":
            fully_shard(stage, replicas)
    kind, groups = inner_of(case, pipe)
    if case.wrap in ("", "ddp", "fsdp"):
        return pipe, kind(groups, lr=LR)
    optimizer = OSS(groups, kind, replicas, lr=LR)
    for index, stage in list(pipe.stages.items()) if case.wrap == "sdp" else ():
        pipe.stages[index] = ShardedDataParallel(stage, optimizer, replicas)
    return pipe, optimizer


def gains(case: Case, ranks: Any, replicas: Any) -> list[list[float]]:
    """What the ranks of a pipeline find, each with its stages."""
    pipe, inner = built(case, ranks, replicas)
    groups: dict[str, Any] = {"process_group": replicas, "model_parallel_group": ranks}
    if case.how == "told little":  # The ranks of the pipeline are known, and if these are all, so is the other group.
        groups = {"process_group": replicas} if dist.get_world_size(replicas) > 1 else {}
    scaler = ShardedGradScaler(init_scale=256.0) if case.how == "scaled" else None
    optimizer = AdaScale(
        inner,
        grad_scaler=scaler,
        scale=2.0 * dist.get_world_size(replicas) * case.chunks * case.steps_each,
        num_gradients_to_accumulate=case.chunks * case.steps_each,
        **groups,
    )
    replica, found = dist.get_rank(replicas), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(case.steps_each):
            x, target = batch_of(step * case.steps_each + number, replica, case.chunks)

            def loss_fn(output: Tensor, to: Tensor) -> Tensor:
                loss = nn.functional.mse_loss(output, to) / case.steps_each
                return loss if scaler is None else scaler.scale(loss)

            if case.how == "failed":
                fails_once(pipe, x, target)
            if case.how == "stepped":
                pipe.step(x, target=target, loss_fn=loss_fn, optimizer=optimizer)
            else:
                pipe.step(x, target=target, loss_fn=loss_fn)
            if case.how == "evaluated":
                pipe.evaluate(x, target=target, loss_fn=loss_fn)
        if case.how == "clipped":
            pipe.clip_grad_norm_(1e3)
        found.append([optimizer.gain(), optimizer.gain(0), optimizer.gain(1)])
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            found[-1] = [optimizer.gain(), optimizer.gain(0), optimizer.gain(1)]
        elif case.how != "stepped":
            optimizer.step()
    optimizer.unhook()
    assert not microbatch_steps_wanted()
    return found


def fails_once(pipe: DistributedPipe, x: Tensor, target: Tensor) -> None:
    """The third micro-batch's loss fails, when gradients of others have been measured."""
    calls = []

    def loss_fn(output: Tensor, to: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 3:
            raise ArithmeticError("the third")
        return nn.functional.mse_loss(output, to)

    with pytest.raises(StageError, match="ArithmeticError"):
        pipe.step(x, target=target, loss_fn=loss_fn)


def words(group: Any = None) -> nn.Sequential:
    """A model of words whose first and last weight are one, with layers that may be divided among ranks."""
    torch.manual_seed(1)  # All ranks draw the same weights, of which each keeps its part.
    model = nn.Sequential(
        VocabParallelEmbedding(7, 6, process_group=group),
        nn.LayerNorm(6),
        ColumnParallelLinear(6, 9, gather_output=False, process_group=group),
        nn.Tanh(),
        RowParallelLinear(9, 6, input_is_parallel=True, process_group=group),
        ColumnParallelLinear(6, 7, bias=False, gather_output=True, process_group=group),
    ).double()
    model[5].weight = model[0].weight
    return model


def words_of(step: int) -> tuple[Tensor, Tensor]:
    pairs = torch.randint(7, (2 * CHUNKS, 2), generator=torch.Generator().manual_seed(step))
    return pairs[:, 0], pairs[:, 1]


def gains_of_divided_layers(ranks: Any, partners: Any) -> list[float]:
    """Each stage is computed by two ranks together, which have the same data."""
    pipe = DistributedPipe(words(partners), "zb_v", balance=[2, 1, 1, 2], chunks=CHUNKS, process_group=ranks)
    inner = torch.optim.Adam(pipe.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"of which some have other stages of the pipeline over.*process_group="):
        AdaScale(inner, num_gradients_to_accumulate=CHUNKS)
    optimizer = AdaScale(
        inner,
        num_gradients_to_accumulate=CHUNKS,
        process_group=by_itself(),
        model_parallel_group=dist.group.WORLD,
    )
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = words_of(step)
        pipe.step(x, target=target, loss_fn=nn.functional.cross_entropy)
        found.append(optimizer.gain())
        optimizer.step()
    optimizer.unhook()
    return found


def plain_gains_of_words() -> list[float]:
    model, found = words(), []
    optimizer = AdaScale(torch.optim.Adam(model.parameters(), lr=LR), num_gradients_to_accumulate=CHUNKS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, target in zip(*(each.chunk(CHUNKS) for each in words_of(step)), strict=True):
            (nn.functional.cross_entropy(model(x), target) / CHUNKS).backward()
        found.append(optimizer.gain())
        optimizer.step()
    optimizer.unhook()
    return found


def measured_on_one_rank_alone(ranks: Any) -> str:
    """The first stage and the last have one weight; the ranks of both are told."""
    pipe = DistributedPipe(layers(Case(tied=True)), balance=[4, 4], chunks=CHUNKS, process_group=ranks)
    x, target = batch_of(0, 0, CHUNKS)
    if dist.get_rank(ranks) == 0:
        optimizer = AdaScale(
            torch.optim.SGD(pipe.parameters(), lr=LR),
            num_gradients_to_accumulate=CHUNKS,
            process_group=by_itself(),
            model_parallel_group=ranks,
        )
    with pytest.raises(RuntimeError) as error:
        pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    assert all(param.grad is None for param in pipe.parameters())
    if dist.get_rank(ranks) == 0:
        optimizer.unhook()
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    return str(error.value)


def on_other_terms(ranks: Any) -> list[str]:
    """No parameter is shared: the ranks would wait for each other in the sum that is theirs alone."""
    found, rank = [], dist.get_rank(ranks)
    pipe = DistributedPipe(layers(Case()), "zb_h1", balance=[4, 4], chunks=CHUNKS, process_group=ranks)
    x, target = batch_of(0, 0, CHUNKS)
    params = list(pipe.parameters())
    halves = [{"params": params[:1]}, {"params": params[1:]}]
    for alone, groups, number in (
        (True, [{"params": params}], CHUNKS),
        (False, [{"params": params}], CHUNKS * (1 + rank)),
        (False, halves if rank else [{"params": params}], CHUNKS),
    ):
        optimizer = torch.optim.SGD(groups, lr=LR)
        if rank == 0 or not alone:
            optimizer = AdaScale(optimizer, num_gradients_to_accumulate=number, process_group=by_itself())
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
            assert all(param.grad is None for param in pipe.parameters())
        found.append(str(error.value))
        if isinstance(optimizer, AdaScale):
            optimizer.unhook()
    return found


class AttentionOfParts(nn.Module):
    """Self-attention over sequences of which each of these ranks has a part."""

    def __init__(self, ranks: Any) -> None:
        super().__init__()
        self.qkv, self.ranks = nn.Linear(4, 12), ranks

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        with context_parallel(self.ranks):
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)


def parts_of_sequences(ranks: Any, partners: Any) -> str:
    """The first stage alone enters the block, in its forward; returns what the step raises."""
    torch.manual_seed(0)
    model = nn.Sequential(AttentionOfParts(partners), nn.Linear(4, 4))
    pipe = DistributedPipe(model, balance=[1, 1], chunks=2, process_group=ranks)
    for index, stage in list(pipe.stages.items()):
        pipe.stages[index] = DistributedDataParallel(stage, process_group=partners)
    optimizer = AdaScale(
        torch.optim.SGD(pipe.parameters(), lr=LR),
        num_gradients_to_accumulate=2,
        process_group=partners,
        model_parallel_group=ranks,
    )
    x = split_sequence(torch.randn(4, 8, 4), partners)
    try:
        pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
    except (RuntimeError, StageError) as error:
        optimizer.zero_grad()
        optimizer.unhook()
        return str(error)
    return f"gain {optimizer.gain()}"


def by_itself() -> Any:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def of_unequal_micro_batches(ranks: Any) -> float:
    """How far the gain of seven samples in micro-batches of 2, 2, 2 and 1 is from that of their expectations."""
    sizes = [2, 2, 2, 1]
    x, target = (each[:7] for each in batch_of(0, 0, CHUNKS))
    pipe = DistributedPipe(layers(Case()), "zb_v", balance=[2] * 4, chunks=CHUNKS, process_group=ranks)
    optimizer = AdaScale(
        torch.optim.SGD(pipe.parameters(), lr=LR), num_gradients_to_accumulate=CHUNKS, process_group=by_itself()
    )
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    rows, model = [], layers(Case())
    for part, to in zip(x.split(sizes), target.split(sizes), strict=True):
        grads = torch.autograd.grad(nn.functional.mse_loss(model(part), to) * len(part) / 7, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    local, total = sum(float(row @ row) for row in rows), float(sum(rows) @ sum(rows))
    square = (total - local) / (1 - sum((size / 7) ** 2 for size in sizes))
    expected = ((total - square) * 4 + square) / total
    error = optimizer.gain() / expected - 1
    assert 1.01 < expected < 3.99
    optimizer.step()
    optimizer.unhook()
    return abs(error)


def another_number_of_micro_batches(ranks: Any) -> list[str]:
    """Of a pipeline with more micro-batches than were said, and of one that steps twice."""
    pipe = DistributedPipe(layers(Case()), "zb_v", balance=[2] * 4, chunks=CHUNKS, process_group=ranks)
    optimizer = AdaScale(
        torch.optim.SGD(pipe.parameters(), lr=LR),
        num_gradients_to_accumulate=CHUNKS - 1,
        process_group=by_itself(),
        model_parallel_group=ranks,
    )
    x, target = batch_of(0, 0, CHUNKS)
    found = []
    with pytest.raises(RuntimeError) as error:
        pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    assert all(param.grad is None for param in pipe.parameters())
    found.append(str(error.value))
    optimizer.set_num_gradients_to_accumulate(CHUNKS)
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    before = [param.grad.clone() for param in pipe.parameters() if param.grad is not None]
    gain = optimizer.gain()
    with pytest.raises(StageError) as error:
        pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    found.append(str(error.value))
    assert all(map(torch.equal, before, [param.grad for param in pipe.parameters() if param.grad is not None]))
    assert optimizer.gain() == gain > 1
    optimizer.unhook()
    return found


def gains_beside_a_stage_without_parameters() -> list[float]:
    """Of three ranks, the second of which has nothing to measure and no optimizer."""
    pipe = DistributedPipe(thin(), "1f1b", balance=[1, 2, 1], chunks=CHUNKS)
    params = list(pipe.parameters())
    if not params:
        for step in range(STEPS):
            x, target = batch_of(step, 0, CHUNKS)
            pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
        return []
    return gains_of_thin(pipe, AdaScale(torch.optim.Adam(params, lr=LR), num_gradients_to_accumulate=CHUNKS))


def thin() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).double()


def gains_of_thin(pipe: DistributedPipe | nn.Sequential, optimizer: AdaScale) -> list[float]:
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch_of(step, 0, CHUNKS)
        if isinstance(pipe, DistributedPipe):
            pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
        else:
            for part, to in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
                (nn.functional.mse_loss(pipe(part), to) / CHUNKS).backward()
        found.append(optimizer.gain())
        optimizer.step()
    optimizer.unhook()
    return found


def of_several(cases: Sequence[Case], num_replicas: int) -> tuple[dict[Case, list[list[float]]], list[Any]]:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "pipe"))
    ranks, replicas = mesh.get_group("pipe"), mesh.get_group("replica")
    if num_replicas > 1:
        more = gains_of_divided_layers(ranks, replicas)
    else:
        assert of_unequal_micro_batches(ranks) < GAIN
        more = [measured_on_one_rank_alone(ranks), *on_other_terms(ranks), *another_number_of_micro_batches(ranks)]
    return {case: gains(case, ranks, replicas) for case in cases}, more


def check(cases: Sequence[Case], num_replicas: int) -> list[list[Any]]:
    """Compares the gains of pipelines of two ranks with those of one process; returns what else ranks have found."""
    references: dict[Case, list[list[float]]] = {}
    wrong: dict[tuple[int, Case], float] = {}
    results = run_ranks(of_several, 2 * num_replicas, cases, num_replicas)
    for rank, (found, _) in enumerate(results):
        for case, numbers in found.items():
            same = replace(case, schedule="1f1b", wrap="", how="")
            expected = references.get(same) or references.setdefault(same, plain(same, num_replicas))
            assert all(1.001 < row[0] < 2 * num_replicas * case.chunks * case.steps_each for row in expected[1:])
            pairs = [pair for mine, its in zip(numbers, expected, strict=True) for pair in zip(mine, its, strict=True)]
            worst = max(abs(mine / its - 1) for mine, its in pairs)
            if not worst < GAIN:
                wrong[rank, case] = worst
    assert wrong == {}
    return [more for _, more in results]


@pytest.mark.composition("scale-adascale", "scale-pipe")
def test_the_gain_is_that_of_one_process_with_every_schedule_and_whatever_happens_in_a_step() -> None:
    cases = [Case(schedule, adam, tied=not adam) for schedule in SCHEDULES for adam in (False, True)]
    cases += [
        Case("zb_v", adam=True, tied=True, steps_each=2),
        Case("1f1b", adam=True, tied=True),
        Case("zb_h1", frozen=4),
        Case("zb_v", adam=True, frozen=2, steps_each=2),
        Case("1f1b", chunks=1),
        Case("interleaved_1f1b", tied=True, chunks=1),
        *(Case(schedule, tied=True, how=how) for schedule in ("1f1b", "zb_v") for how in ("failed", "stepped")),
        *(Case("zb_h1", how=how) for how in ("scaled", "evaluated", "clipped", "checkpointed", "told little")),
        Case("zb_h1", how="failed", steps_each=2),
    ]
    for one_alone, untied, numbers, groups, too_many, twice in check(cases, 1):
        assert "rank 0 has 1 parameter group after 0 of 4 passes, and rank 1 nothing" in untied
        assert "rank 0 has 1 parameter group after 0 of 4 passes, and rank 1 1 parameter group after 0 of 8" in numbers
        assert "rank 0 has 1 parameter group after 0 of 4 passes, and rank 1 2 parameter groups after" in groups
        assert "on the ranks [0] of the pipeline and not on [1], which hold 0.weight" in one_alone
        assert "expected 3 backward passes between two steps, but 4 came" in too_many
        assert "num_gradients_to_accumulate=4" in too_many
        assert "expected 4 backward passes between two steps, but another step of the pipeline began" in twice


@pytest.mark.composition("scale-adascale", "scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-adascale", "scale-pipe", "ShardedDataParallel")
@pytest.mark.composition("scale-adascale", "scale-pipe", "DistributedDataParallel")
def test_so_it_is_where_stages_have_replicas_or_are_divided() -> None:
    cases = [
        Case(schedule, adam, tied, wrap=wrap)
        for wrap in ("ddp", "fsdp", "sdp", "ddp and oss")
        for schedule, adam, tied in (("1f1b", True, True), ("zb_h1", False, False), ("zb_v", True, False))
        if wrap != "sdp" or schedule not in TWO_STAGES  # Each OSS has one wrapper, and so one stage.
    ]
    cases += [
        Case("zb_v", tied=True, wrap="ddp", how="failed"),
        Case("1f1b", frozen=4, wrap="fsdp", steps_each=2),
        Case("interleaved_1f1b", tied=True, wrap="ddp", steps_each=2),
        Case("zb_v", wrap="fsdp", how="scaled"),
        Case("zb_v", wrap="ddp", how="told little"),
    ]
    expected = plain_gains_of_words()
    assert all(gain > 1.001 for gain in expected)
    for found in check(cases, 2):
        assert found == pytest.approx(expected, rel=GAIN)


def test_a_stage_without_parameters_is_not_waited_for() -> None:
    model = thin()
    optimizer = AdaScale(torch.optim.Adam(model.parameters(), lr=LR), num_gradients_to_accumulate=CHUNKS)
    expected = gains_of_thin(model, optimizer)
    assert all(gain > 1.001 for gain in expected)
    first, none, last = run_ranks(gains_beside_a_stage_without_parameters, 3)
    assert none == [] and first == last == pytest.approx(expected, rel=GAIN)


def refused_parts() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "pipe"))
    return parts_of_sequences(mesh.get_group("pipe"), mesh.get_group("context"))


@pytest.mark.composition("scale-adascale", "scale-pipe", "context parallel", refused=True)
def test_stages_that_compute_parts_of_sequences_are_refused_on_all_ranks() -> None:
    for message in run_ranks(refused_parts, 4):
        assert "AdaScale measures gradients of whole samples" in message and "parts of the same sequences" in message
