"""AdaScale around the optimizer of a pipeline: each micro-batch of each replica is one sample, as on one process.

Models are of fp64, so that what is compared to 1e-6 is the method and not the rounding.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from trainings import assert_same_gains, drawn, gains_of, gains_of_one_process
from with_options import with_options

from scale_adascale import AdaScale, AdaScaleOptions
from scale_core import ShardedGradScaler
from scale_core.hooks.gradients import gradient_hooks
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

    def __str__(self) -> str:
        changed = [f"{each.name}={getattr(self, each.name)}" for each in fields(self)[1:] if self.differs(each)]
        return ", ".join([self.schedule, *changed])

    def differs(self, field: Field[Any]) -> bool:
        return bool(getattr(self, field.name) != field.default)


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


def batch_of(step: int, replica: int, chunks: int = CHUNKS) -> tuple[Tensor, Tensor]:
    x, target = drawn(100 * step + replica, *[(2 * chunks, WIDTH)] * 2)
    return x, target - 1.5


def inner_of(case: Case, model: nn.Module) -> Any:
    """The parameters in two groups, one of weights and one of biases, so that ranks have parts of both."""
    kind = torch.optim.Adam if case.adam else torch.optim.SGD
    params = dict(model.named_parameters())
    groups = [{"params": [p for n, p in params.items() if n.endswith(ending)]} for ending in ("weight", "bias")]
    return kind, groups


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def expected_gains(case: Case, replicas: int) -> list[list[float]]:
    """On one process each micro-batch of each replica is a sample."""
    model = layers(case)
    kind, groups = inner_of(case, model)
    num_samples = replicas * case.chunks * case.steps_each

    def loss_of(model: nn.Module, number: int) -> Tensor:
        step, rest = divmod(number, replicas * case.chunks)
        batch = batch_of(step, rest // case.chunks, case.chunks)
        x, target = (whole.chunk(case.chunks)[rest % case.chunks] for whole in batch)
        return mse(model(x), target)

    return gains_of_one_process(model, kind(groups, lr=LR), loss_of, num_samples, STEPS, scale=2.0 * num_samples)


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


def fails_once(pipe: DistributedPipe, x: Tensor, target: Tensor) -> None:
    """The third micro-batch's loss fails, when gradients of others have been measured."""
    calls = []

    def loss_fn(output: Tensor, to: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 3:
            raise ArithmeticError("the third")
        return mse(output, to)

    with pytest.raises(StageError, match="ArithmeticError"):
        pipe.step(x, target=target, loss_fn=loss_fn)


CASES: list[Case] = [
    *(Case(schedule, adam, tied=not adam) for schedule in SCHEDULES for adam in (False, True)),
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
REPLICATED: list[Case] = [
    *(
        Case(schedule, adam, tied, wrap=wrap)
        for wrap in ("ddp", "fsdp", "sdp", "ddp and oss")
        for schedule, adam, tied in (("1f1b", True, True), ("zb_h1", False, False), ("zb_v", True, False))
        if wrap != "sdp" or schedule not in TWO_STAGES  # Each OSS has one wrapper, and so one stage.
    ),
    Case("zb_v", tied=True, wrap="ddp", how="failed"),
    Case("1f1b", frozen=4, wrap="fsdp", steps_each=2),
    Case("interleaved_1f1b", tied=True, wrap="ddp", steps_each=2),
    Case("zb_v", wrap="fsdp", how="scaled"),
    Case("zb_v", wrap="ddp", how="told little"),
]


@pytest.mark.composition("scale-adascale", "scale-pipe")
@pytest.mark.composition("scale-adascale", "scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-adascale", "scale-pipe", "ShardedDataParallel")
@pytest.mark.composition("scale-adascale", "scale-pipe", "DistributedDataParallel")
@pytest.mark.parametrize(
    "num_ranks, case", [*((2, case) for case in CASES), *((4, case) for case in REPLICATED)], ids=str
)
@pytest.mark.ranks("num_ranks", in_turn=True)
def test_the_gain_of_a_pipeline_is_that_of_one_process(num_ranks: int, case: Case) -> None:
    """Each rank of a pipeline, which has stages of its own, finds the gains of one process."""
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("replica", "pipe"))
    ranks, replicas = mesh.get_group("pipe"), mesh.get_group("replica")
    pipe, inner = built(case, ranks, replicas)
    groups: dict[str, Any] = {"process_group": replicas, "model_parallel_group": ranks}
    if case.how == "told little":  # The ranks of the pipeline are known, and if these are all, so is the other group.
        groups = {"process_group": replicas} if dist.get_world_size(replicas) > 1 else {}
    scaler = ShardedGradScaler(init_scale=256.0) if case.how == "scaled" else None
    optimizer = AdaScale(
        inner,
        **with_options(
            AdaScaleOptions,
            grad_scaler=scaler,
            scale=float(num_ranks * case.chunks * case.steps_each),
            num_gradients_to_accumulate=case.chunks * case.steps_each,
            **groups,
        ),
    )

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = mse(output, target) / case.steps_each
        return loss if scaler is None else scaler.scale(loss)

    gains = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(case.steps_each):
            x, target = batch_of(step * case.steps_each + number, dist.get_rank(replicas), case.chunks)
            if case.how == "failed":
                fails_once(pipe, x, target)
            stepped = {"optimizer": optimizer} if case.how == "stepped" else {}
            pipe.step(x, target=target, loss_fn=loss_fn, **stepped)
            if case.how == "evaluated":
                pipe.evaluate(x, target=target, loss_fn=loss_fn)
        if case.how == "clipped":
            pipe.clip_grad_norm_(1e3)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif case.how != "stepped":
            optimizer.step()
        gains.append(gains_of(optimizer))
    optimizer.unhook()
    assert not gradient_hooks.microbatch_steps
    assert_same_gains(expected_gains(case, num_ranks // 2), gains, GAIN)


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


def words_of(step: int) -> Tensor:
    """Words and their targets, [2 * CHUNKS, 2]."""
    return torch.randint(7, (2 * CHUNKS, 2), generator=torch.Generator().manual_seed(step))


def words_loss(model: nn.Module, number: int) -> Tensor:
    """Of one micro-batch of all steps."""
    pairs = words_of(number // CHUNKS).chunk(CHUNKS)[number % CHUNKS]
    return nn.functional.cross_entropy(model(pairs[:, 0]), pairs[:, 1])


@pytest.mark.ranks(4, in_turn=True)
def test_the_gain_of_divided_stages_is_that_of_one_process() -> None:
    """Each stage is computed by two ranks together, which have the same data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("partner", "pipe"))
    model = words(mesh.get_group("partner"))
    pipe = DistributedPipe(model, "zb_v", balance=[2, 1, 1, 2], chunks=CHUNKS, process_group=mesh.get_group("pipe"))
    inner = torch.optim.Adam(pipe.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"of which some have other stages of the pipeline over.*process_group="):
        AdaScale(inner, num_gradients_to_accumulate=CHUNKS)
    groups = {"process_group": by_itself(), "model_parallel_group": dist.group.WORLD}
    optimizer = AdaScale(inner, num_gradients_to_accumulate=CHUNKS, **groups)
    gains = []
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = words_of(step)
        pipe.step(pairs[:, 0], target=pairs[:, 1], loss_fn=nn.functional.cross_entropy)
        optimizer.step()
        gains.append(gains_of(optimizer))
    optimizer.unhook()
    plain = words(by_itself())
    expected = gains_of_one_process(plain, torch.optim.Adam(plain.parameters(), lr=LR), words_loss, CHUNKS, STEPS)
    assert_same_gains(expected, gains, GAIN)


def by_itself() -> Any:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@pytest.mark.ranks(2, in_turn=True)
def test_a_tied_weight_that_one_rank_measures_is_refused_on_all() -> None:
    """The first stage and the last have one weight; the ranks of both raise."""
    pipe = DistributedPipe(layers(Case(tied=True)), balance=[4, 4], chunks=CHUNKS)
    x, target = batch_of(0, 0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=LR)
    if dist.get_rank() == 0:
        groups = {"process_group": by_itself(), "model_parallel_group": dist.group.WORLD}
        optimizer = AdaScale(optimizer, num_gradients_to_accumulate=CHUNKS, **groups)
    with pytest.raises(RuntimeError, match=r"on the ranks \[0\] of the pipeline and not on \[1\], which hold 0.weight"):
        pipe.step(x, target=target, loss_fn=mse)
    assert all(param.grad is None for param in pipe.parameters())
    if isinstance(optimizer, AdaScale):
        optimizer.unhook()
    pipe.step(x, target=target, loss_fn=mse)


@pytest.mark.parametrize(
    "how, words",
    [
        ("alone", "nothing"),
        ("passes", "1 parameter group after 0 of 8"),
        ("groups", "2 parameter groups after"),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_ranks_that_measure_on_other_terms_are_refused(how: str, words: str) -> None:
    """No parameter is shared: the ranks would wait for each other in the sum that is theirs alone."""
    rank = dist.get_rank()
    pipe = DistributedPipe(layers(Case()), "zb_h1", balance=[4, 4], chunks=CHUNKS)
    x, target = batch_of(0, 0)
    params = list(pipe.parameters())
    in_two_groups = how == "groups" and rank
    groups = [{"params": params[:1]}, {"params": params[1:]}] if in_two_groups else [{"params": params}]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=LR)
    if rank == 0 or how != "alone":
        number = CHUNKS * (1 + rank) if how == "passes" else CHUNKS
        optimizer = AdaScale(optimizer, num_gradients_to_accumulate=number, process_group=by_itself())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"rank 0 has 1 parameter group after 0 of 4 passes, and rank 1 {words}"):
            pipe.step(x, target=target, loss_fn=mse)
        assert all(param.grad is None for param in pipe.parameters())
    if isinstance(optimizer, AdaScale):
        optimizer.unhook()


@pytest.mark.ranks(2, in_turn=True)
def test_unequal_micro_batches_count_by_their_size() -> None:
    """The gain of seven samples in micro-batches of 2, 2, 2 and 1 is that of their expectations."""
    sizes = [2, 2, 2, 1]
    x, target = (whole[:7] for whole in batch_of(0, 0))
    pipe = DistributedPipe(layers(Case()), "zb_v", balance=[2] * 4, chunks=CHUNKS)
    inner = torch.optim.SGD(pipe.parameters(), lr=LR)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=CHUNKS, process_group=by_itself())
    pipe.step(x, target=target, loss_fn=mse)
    rows, model = [], layers(Case())
    for part, to in zip(x.split(sizes), target.split(sizes), strict=True):
        grads = torch.autograd.grad(mse(model(part), to) * len(part) / 7, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    local, total = sum(float(row @ row) for row in rows), float(sum(rows) @ sum(rows))
    square = (total - local) / (1 - sum((size / 7) ** 2 for size in sizes))
    expected = ((total - square) * 4 + square) / total
    assert 1.01 < expected < 3.99
    assert optimizer.gain() == pytest.approx(expected, rel=GAIN)
    optimizer.step()
    optimizer.unhook()


@pytest.mark.ranks(2, in_turn=True)
def test_another_number_of_micro_batches_is_refused() -> None:
    """More micro-batches than AdaScale expects, and two steps of the pipeline for one of the optimizer."""
    pipe = DistributedPipe(layers(Case()), "zb_v", balance=[2] * 4, chunks=CHUNKS)
    groups = {"process_group": by_itself(), "model_parallel_group": dist.group.WORLD}
    inner = torch.optim.SGD(pipe.parameters(), lr=LR)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=CHUNKS - 1, **groups)
    x, target = batch_of(0, 0)
    with pytest.raises(RuntimeError, match="expected 3 backward passes between two steps, but 4 came") as caught:
        pipe.step(x, target=target, loss_fn=mse)
    assert "num_gradients_to_accumulate=4" in str(caught.value)
    assert all(param.grad is None for param in pipe.parameters())
    optimizer.set_num_gradients_to_accumulate(CHUNKS)
    pipe.step(x, target=target, loss_fn=mse)
    before = [param.grad.clone() for param in pipe.parameters() if param.grad is not None]
    gain = optimizer.gain()
    words = "expected 4 backward passes between two steps, but another step of the pipeline began"
    with pytest.raises(StageError, match=words):
        pipe.step(x, target=target, loss_fn=mse)
    assert all(map(torch.equal, before, [param.grad for param in pipe.parameters() if param.grad is not None]))
    assert optimizer.gain() == gain > 1
    optimizer.unhook()


def thin() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).double()


def thin_loss(model: nn.Module, number: int) -> Tensor:
    x, target = (whole.chunk(CHUNKS)[number % CHUNKS] for whole in batch_of(number // CHUNKS, 0))
    return mse(model(x), target)


@pytest.mark.ranks(3)
def test_a_stage_without_parameters_is_not_waited_for() -> None:
    """Of three ranks, the second of which has nothing to measure and no optimizer."""
    pipe, gains = DistributedPipe(thin(), "1f1b", balance=[1, 2, 1], chunks=CHUNKS), []
    params = list(pipe.parameters())
    optimizer = AdaScale(torch.optim.Adam(params, lr=LR), num_gradients_to_accumulate=CHUNKS) if params else None
    for step in range(STEPS):
        x, target = batch_of(step, 0)
        pipe.step(x, target=target, loss_fn=mse)
        if optimizer is not None:
            optimizer.step()
            gains.append(gains_of(optimizer))
            optimizer.zero_grad()
    assert (optimizer is None) == (dist.get_rank() == 1)
    if optimizer is not None:
        optimizer.unhook()
        plain = thin()
        expected = gains_of_one_process(plain, torch.optim.Adam(plain.parameters(), lr=LR), thin_loss, CHUNKS, STEPS)
        assert_same_gains(expected, gains, GAIN)


class AttentionOfParts(nn.Module):
    """Self-attention over sequences of which each of these ranks has a part."""

    def __init__(self, ranks: Any) -> None:
        super().__init__()
        self.qkv, self.ranks = nn.Linear(4, 12), ranks

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        with context_parallel(self.ranks):
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)


@pytest.mark.composition("scale-adascale", "scale-pipe", "context parallel", refused=True)
@pytest.mark.ranks(4)
def test_stages_that_compute_parts_of_sequences_are_refused() -> None:
    """The first stage alone enters the block, in its forward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "pipe"))
    ranks, partners = mesh.get_group("pipe"), mesh.get_group("context")
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
    with pytest.raises((RuntimeError, StageError), match="AdaScale measures gradients of whole samples") as caught:
        pipe.step(x, target=x, loss_fn=mse)
    assert "parts of the same sequences" in str(caught.value)
    optimizer.zero_grad()
    optimizer.unhook()
