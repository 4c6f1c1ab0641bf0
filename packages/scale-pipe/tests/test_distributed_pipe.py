"""The promise over several ranks: loss and gradients of every schedule are those of the plain model, to the bit.

The reference adds up the gradients of the same micro-batches in the same order; each case returns what differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, differences, micro_batches, mlp, mse, order_in, step_beside
from pipe_u_net import u_net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, Schedule, StageError, StagePlacement, build_schedule, gpipe, interleaved_1f1b
from scale_pipe.distributed.p2p.channel import P2PChannel
from scale_pipe.schedules.action import backward, forward, input_gradient, weight_gradient

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


def weighed(losses: list[Tensor], parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean over all samples of micro-batches' means, added up in their order."""
    samples = sum(len(x) for x, _ in parts)
    total = torch.zeros(())
    for loss, (x, _) in zip(losses, parts, strict=True):
        total = total + loss * (len(x) / samples)
    return total


def compare(pipe: DistributedPipe, model: nn.Sequential, steps: list[tuple[Tensor, Tensor]], title: str) -> list[str]:
    """Steps of a pipeline beside the plain model's, accumulated, with evaluations between them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, wrong = Plain(model), []
    for x, target in steps:
        parts = micro_batches(x, target, pipe.chunks)
        expected = plain.step(parts, mse, order_in(pipe))
        last = pipe.schedule.placement.rank_of[-1]
        given = (x,) if rank == 0 else ()
        loss = pipe.step(*given, target=target if rank == last else None, loss_fn=mse)
        if not torch.equal(loss, expected):
            wrong.append(f"{title}: loss {loss} and {expected}")
        wrong += [f"{title}: {words}" for words in differences(pipe, plain.grads)]
        output = pipe.evaluate(*given)
        if (output is not None) != (rank == last):
            wrong.append(f"{title}: output on rank {rank} of {size}")
        judged = pipe.evaluate(*given, target=target if rank == last else None, loss_fn=mse if rank == last else None)
        with torch.no_grad():
            outputs = [model(x) for x, _ in parts]
        if not torch.equal(judged, weighed([mse(y, to) for y, (_, to) in zip(outputs, parts, strict=True)], parts)):
            wrong.append(f"{title}: another loss in the evaluation")
        if output is not None and not torch.equal(output, torch.cat(outputs)):
            wrong.append(f"{title}: another output")
    return wrong


def every_schedule() -> list[str]:
    size, wrong = dist.get_world_size(), []
    # Whole, uneven, and fewer samples than micro-batches; then accumulated.
    steps = [batch(8), batch(7, seed=2), batch(3, seed=3)]
    for name, stages_each in SCHEDULES.items():
        model = mlp()
        pipe = DistributedPipe(mlp(), name, balance=even(len(model), size * stages_each), chunks=4)
        wrong += compare(pipe, model, steps, name)
    return wrong


def u_nets() -> list[str]:
    size, wrong = dist.get_world_size(), []
    names = ("gpipe", "zb-h1", "1F1B", "zb_v", "interleaved_1f1b") if size == 2 else ("1F1B", "zb_v")
    for name in names:
        each = SCHEDULES[name]
        model = u_net()
        x, target = (torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
        pipe = DistributedPipe(u_net(), name, balance=even(len(model), size * each), chunks=4)
        wrong += compare(pipe, model, [(x, target)] * 2, f"u-net, {name}")
    return wrong


def own_schedules() -> list[str]:
    """Schedules that are nobody's: stages on ranks in any order, gradients apart on some stages alone."""
    placement = StagePlacement((1, 0, 1))
    orders = [
        [forward(1, m) for m in range(3)]
        + [input_gradient(1, 1), backward(1, 0), input_gradient(1, 2), weight_gradient(1, 2), weight_gradient(1, 1)],
        [forward(0, m) for m in (0, 1, 2)]
        + [
            forward(2, 1),
            forward(2, 0),
            backward(2, 1),
            input_gradient(2, 0),
            forward(2, 2),
            weight_gradient(2, 0),
            backward(2, 2),
            backward(0, 1),
            backward(0, 2),
            backward(0, 0),
        ],
    ]
    mine = build_schedule("mine", placement, 3, orders)
    model = mlp()
    pipe = DistributedPipe(mlp(), mine, balance=[5, 4, 3])
    return compare_off_first(pipe, model) + compare(
        DistributedPipe(mlp(), interleaved_1f1b(2, 5, 3), balance=even(12, 6)), mlp(), [batch(10)], "three stages each"
    )


def beside_a_pipeline_of_one_rank() -> list[str]:
    """A rank that has built one pipeline more, in another group, numbers the common one as the others do."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        DistributedPipe(mlp(1), balance=[3], process_group=alone[0])
    pipe = DistributedPipe(mlp(), balance=[5, 7], chunks=4, limit_seconds=20.0)
    return compare(pipe, mlp(), [batch()], "beside another")


def on_a_mesh() -> list[str]:
    """The ranks of one axis of a mesh; the schedule's name written in another way."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "pipe"))
    pipe = DistributedPipe(mlp(), "Zb-V", balance=[3] * 4, chunks=4, process_group=mesh["pipe"])
    return compare(pipe, mlp(), [batch(8)], "on a mesh")


def in_order() -> list[str]:
    """As on transports without tags: what arrives is taken in the order of the list."""
    set_device = P2PChannel.set_device

    def set_device_in_order(channel: P2PChannel, device: torch.device) -> None:
        set_device(channel, device)
        channel.matches_by_order = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PChannel, "set_device", set_device_in_order)
        return [
            words
            for name, each in SCHEDULES.items()
            for words in compare(
                DistributedPipe(mlp(), name, balance=even(12, 2 * each), chunks=4),
                mlp(),
                [batch(8)] * 2,
                f"{name}, in order",
            )
        ]


def compare_off_first(pipe: DistributedPipe, model: nn.Sequential) -> list[str]:
    """The first stage stands on rank 1."""
    x, target = batch(6)
    plain = Plain(model)
    parts = micro_batches(x, target, 3)
    expected = plain.step(parts, mse, order_in(pipe))
    loss = pipe.step(*((x,) if dist.get_rank() == 1 else ()), target=target, loss_fn=mse)
    return differences(pipe, plain.grads) + [f"loss {loss} and {expected}"] * (not torch.equal(loss, expected))


def two_ranks() -> list[str]:
    return every_schedule() + u_nets() + own_schedules() + in_order() + on_a_mesh() + beside_a_pipeline_of_one_rank()


def four_ranks() -> list[str]:
    return every_schedule() + u_nets()


def one_rank() -> list[str]:
    wrong = []
    for name in ("gpipe", "zb_v", "1f1b"):
        model = mlp()
        pipe = DistributedPipe(mlp(), name, balance=even(12, SCHEDULES.get(name, 1)), chunks=3)
        wrong += compare(pipe, model, [batch(6)], name)
    return wrong


def test_every_schedule_of_two_ranks_is_the_plain_model() -> None:
    assert run_ranks(two_ranks, 2) == [[], []]


def test_every_schedule_of_four_ranks_is_the_plain_model() -> None:
    assert run_ranks(four_ranks, 4) == [[]] * 4


def test_a_pipeline_of_one_rank_is_the_plain_model() -> None:
    assert run_ranks(one_rank, 1) == [[]]


def test_a_pipeline_needs_no_process_group_in_a_world_of_one() -> None:
    x, target = batch()
    plain, pipe = Plain(mlp()), DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4)
    assert step_beside(pipe, plain, x, target) == []
    assert torch.equal(pipe.evaluate(x), torch.cat([mlp()(part) for part in x.chunk(4)]))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"schedule": "1f1bb"}, "there is no schedule '1f1bb'; there are gpipe"),
        ({"schedule": "zb_v", "stages_per_rank": 3}, "'zb_v' has 2 stages on each rank, but stages_per_rank is 3"),
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
        DistributedPipe([nn.Linear(2, 2)] * 3, "1f1b", stages_per_rank=1)
    with pytest.raises(TypeError, match="stage 0 is int"):
        DistributedPipe([1], "1f1b")  # type: ignore[list-item]


@pytest.mark.parametrize("before", [nn.Sigmoid(), nn.LayerNorm(8)])
def test_a_stage_may_change_its_input_in_place_where_the_plain_model_may(before: nn.Module) -> None:
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
    plain = Plain(layers)
    plain.step([(x, target)], mse, lambda name: [0])
    assert differences(pipe, plain.grads) == []


def test_a_pipeline_is_not_called() -> None:
    with pytest.raises(RuntimeError, match=r"pipe.step\(batch"):
        DistributedPipe(mlp(), balance=[12])(torch.randn(2, 8))


def test_one_of_several_ranks_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 ranks.*call scale_core\.launch\.init_distributed\(\)"):
        DistributedPipe(mlp(), "1f1b", balance=[12])


def see_memory_of_stages() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    layers[1].weight.data = layers[0].weight.data  # On one stage they stay what they are.
    DistributedPipe(layers, balance=[2, 2])
    layers[3].bias.data = layers[0].bias.data
    with pytest.raises(ValueError, match=r"'0.bias' and '3.bias' share one memory.*model\[3\].bias = model\[0\].bias"):
        DistributedPipe(layers, balance=[2, 2])


def test_parameters_over_one_memory_on_two_ranks_are_refused() -> None:
    run_ranks(see_memory_of_stages, 2)
