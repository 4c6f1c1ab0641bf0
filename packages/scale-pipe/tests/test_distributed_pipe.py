"""The promise over several ranks: loss and gradients of every schedule are those of the plain model, to the bit.

The reference adds up the gradients of the same micro-batches in the same order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, assert_equal, batch, check_grads, micro_batches, mlp, mse
from pipe_u_net import u_net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core import group_of
from scale_pipe import DistributedPipe, PipelineOptions, Schedule, StageError
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.schedules.action import backward, forward, input_gradient, weight_gradient
from scale_pipe.schedules.classic import gpipe, interleaved_1f1b
from scale_pipe.schedules.lowering import build_schedule
from scale_pipe.schedules.placement import StagePlacement

SCHEDULES = {
    "gpipe": 1,
    "1F1B": 1,
    "zb-h1": 1,
    "interleaved_1f1b": 2,
    "looped_breadth_first": 2,
    "zb_v": 2,
    "v_half": 2,
    "v_min": 2,
    "dual_pipe_v": 2,
}
"""With how many stages on each rank."""


def even(num_layers: int, num_stages: int) -> list[int]:
    return [num_layers // num_stages + (index < num_layers % num_stages) for index in range(num_stages)]


def mlp_pipe(schedule: str, chunks: int = 4, **options: Any) -> DistributedPipe:
    """The layers of `mlp`, divided evenly among the stages of a schedule."""
    stages_each = {name.lower(): number for name, number in SCHEDULES.items()}[schedule.lower()]
    return DistributedPipe(mlp(), schedule, balance=even(12, group_of().size * stages_each), chunks=chunks, **options)


def assert_is_plain(pipe: DistributedPipe, model: nn.Sequential, steps: list[tuple[Tensor, Tensor]]) -> None:
    """Steps have loss and gradients of the plain model, accumulated; evaluations between them, its loss and output."""
    plain, rank_of = Plain(model, pipe), pipe.schedule.placement.rank_of
    holds_first, holds_last = (pipe.group.rank == rank for rank in (rank_of[0], rank_of[-1]))
    for x, target in steps:
        parts = micro_batches(x, target, pipe.chunks)
        inputs = (x,) if holds_first else ()
        expected = plain.step(parts)
        loss = pipe.step(*inputs, target=target if holds_last else None, loss_fn=mse)
        assert_equal(loss, expected, "loss")
        check_grads(pipe, plain.grads)
        with torch.no_grad():
            outputs = [model(part) for part, _ in parts]
        losses = [
            mse(output, part_target) * (len(part) / len(x))
            for output, (part, part_target) in zip(outputs, parts, strict=True)
        ]
        last_inputs = {"target": target, "loss_fn": mse} if holds_last else {"target": None, "loss_fn": None}
        assert_equal(pipe.evaluate(*inputs, **last_inputs), sum(losses, torch.zeros(())), "loss of an evaluation")
        assert_equal(pipe.evaluate(*inputs), torch.cat(outputs) if holds_last else None, "output of an evaluation")


# Of full size, uneven, and fewer samples than micro-batches; gradients add up.
STEPS = [batch(8), batch(7, seed=2), batch(3, seed=3)]


@pytest.mark.ranks(2, 4)
def test_every_schedule_is_the_plain_model() -> None:
    for schedule in SCHEDULES:
        assert_is_plain(mlp_pipe(schedule), mlp(), STEPS)


@pytest.mark.fault(87)
@pytest.mark.ranks(1, in_turn=True)
@pytest.mark.parametrize("schedule", ["gpipe", "zb_v", "1F1B"])
def test_a_pipeline_of_one_rank_is_the_plain_model(schedule: str) -> None:
    assert_is_plain(mlp_pipe(schedule, chunks=3), mlp(), [batch(6)])


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize(
    "num_ranks, schedules",
    [(2, ["gpipe", "zb-h1", "1F1B", "zb_v", "interleaved_1f1b"]), (4, ["1F1B", "zb_v"])],
)
def test_skips_between_stages_are_those_of_the_plain_model(num_ranks: int, schedules: list[str]) -> None:
    x, target = (torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    for schedule in schedules:
        model = u_net()
        balance = even(len(model), num_ranks * SCHEDULES[schedule])
        pipe = DistributedPipe(u_net(), schedule, balance=balance, chunks=4)
        assert_is_plain(pipe, model, [(x, target)] * 2)


@pytest.mark.ranks(2)
def test_a_schedule_of_ones_own_is_the_plain_model() -> None:
    """Stages on ranks in any order, the first on rank 1, gradients apart on some stages alone."""
    first_rank = [forward(1, m) for m in range(3)]
    first_rank += [input_gradient(1, 1), backward(1, 0), input_gradient(1, 2)]
    first_rank += [weight_gradient(1, 2), weight_gradient(1, 1)]
    second_rank = [forward(0, m) for m in range(3)]
    second_rank += [forward(2, 1), forward(2, 0), backward(2, 1), input_gradient(2, 0), forward(2, 2)]
    second_rank += [weight_gradient(2, 0), backward(2, 2), backward(0, 1), backward(0, 2), backward(0, 0)]
    schedule = build_schedule("own", StagePlacement((1, 0, 1)), 3, [first_rank, second_rank])
    assert_is_plain(DistributedPipe(mlp(), schedule, balance=[5, 4, 3]), mlp(), [batch(6)])


@pytest.mark.ranks(2)
def test_three_stages_on_each_rank_are_the_plain_model() -> None:
    pipe = DistributedPipe(mlp(), interleaved_1f1b(2, 5, 3), balance=even(12, 6))
    assert_is_plain(pipe, mlp(), [batch(10)])


@pytest.mark.ranks(2)
def test_another_pipeline_of_one_rank_does_not_shift_numbers() -> None:
    """The rank that has built it numbers the common pipeline as the others do."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        DistributedPipe(mlp(1), balance=[3], process_group=alone[0])
    assert_is_plain(
        DistributedPipe(mlp(), balance=[5, 7], chunks=4, options=PipelineOptions(limit_seconds=20.0)), mlp(), [batch()]
    )


@pytest.mark.ranks(2)
def test_a_pipeline_runs_on_one_axis_of_a_mesh() -> None:
    """The schedule's name is written in another way."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "pipe"))
    pipe = DistributedPipe(mlp(), "Zb-V", balance=[3] * 4, chunks=4, process_group=mesh["pipe"])
    assert_is_plain(pipe, mlp(), [batch(8)])


@pytest.mark.ranks(2)
def test_every_schedule_takes_messages_in_order_without_tags() -> None:
    set_device = P2PChannel.set_device

    def set_device_in_order(channel: P2PChannel, device: torch.device) -> None:
        set_device(channel, device)
        channel.matches_by_order = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PChannel, "set_device", set_device_in_order)
        for schedule in SCHEDULES:
            assert_is_plain(mlp_pipe(schedule), mlp(), [batch(8)] * 2)


def test_a_pipeline_needs_no_process_group_in_a_world_of_one() -> None:
    x, target = batch()
    pipe = DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4)
    Plain(mlp(), pipe).step_with(pipe, x, target)
    assert torch.equal(pipe.evaluate(x), torch.cat([mlp()(part) for part in x.chunk(4)]))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"schedule": "1f1bb"}, "there is no schedule '1f1bb'; there are gpipe"),
        (
            {"schedule": "zb_v", "options": PipelineOptions(stages_per_rank=3)},
            "'zb_v' has 2 stages on each rank, but stages_per_rank is 3",
        ),
        ({"chunks": 0}, "chunks must be at least 1, but is 0"),
        ({"schedule": "gpipe", "balance": [4, 4]}, r"balance \[4, 4\] places 8 layers, but .* 12.*balance_by_time"),
        ({"balance": [6, 6]}, "'1f1b' has 1 stage on each rank, but stages_per_rank is 2"),
        ({"schedule": gpipe(1, 2), "balance": [6, 6]}, r"the schedule has 1 stages, but balance \[6, 6\] makes 2"),
        ({"balance": None}, "a balance is needed"),
        ({"checkpoint": "sometimes"}, "checkpoint is not one of 'always', 'except_last', or 'never', but 'sometimes'"),
        ({"schedule": Schedule("two", StagePlacement.loop(2), 1, ((), ()))}, "'two' has 2 ranks, but the group has 1"),
    ],
)
def test_numbers_that_do_not_fit_are_named(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DistributedPipe(mlp(), **{"balance": [12], **arguments})


def test_a_model_that_can_not_be_cut_is_refused() -> None:
    with pytest.raises(TypeError, match="module must be nn\\.Sequential"):
        DistributedPipe(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the schedule has 1 stages, but 3 were given"):
        DistributedPipe([nn.Linear(2, 2)] * 3, "1f1b", options=PipelineOptions(stages_per_rank=1))
    with pytest.raises(TypeError, match="stage 0 is int"):
        DistributedPipe([1], "1f1b")  # type: ignore[list-item]


@pytest.mark.parametrize("before", [nn.Sigmoid(), nn.LayerNorm(8)])
def test_a_stage_changes_its_input_in_place_as_the_plain_model(before: nn.Module) -> None:
    """Between stages of one rank the memory is shared, so what was kept for a backward may be overwritten."""
    layers = nn.Sequential(nn.Linear(8, 8), before, nn.ReLU(inplace=True), nn.Linear(8, 8))
    x, target = batch(4)
    pipe = DistributedPipe(layers, "zb_v", balance=[2, 2], chunks=1)
    if isinstance(before, nn.Sigmoid):
        told = "has been modified by an inplace operation"
        with pytest.raises(RuntimeError, match=told):
            mse(layers(x), target).backward()
        with pytest.raises(StageError, match=told):
            pipe.step(x, target=target, loss_fn=mse)
        return
    pipe.step(x, target=target, loss_fn=mse)
    plain = Plain(layers, lambda name: [0])
    plain.step([(x, target)])
    check_grads(pipe, plain.grads)


def test_a_pipeline_is_not_called() -> None:
    with pytest.raises(RuntimeError, match=r"pipe.step\(batch"):
        DistributedPipe(mlp(), balance=[12])(torch.randn(2, 8))


def test_a_rank_of_several_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 ranks.*call scale_core\.launch\.init_distributed\(\)"):
        DistributedPipe(mlp(), "1f1b", balance=[12])


@pytest.mark.ranks(2)
def test_parameters_over_one_memory_on_two_ranks_are_refused() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    layers[1].weight.data = layers[0].weight.data  # On one stage they stay what they are.
    DistributedPipe(layers, balance=[2, 2])
    layers[3].bias.data = layers[0].bias.data
    with pytest.raises(ValueError, match=r"'0.bias' and '3.bias' share one memory.*model\[3\].bias = model\[0\].bias"):
        DistributedPipe(layers, balance=[2, 2])
