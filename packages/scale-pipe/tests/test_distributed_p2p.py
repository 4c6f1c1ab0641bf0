"""Over a transport that ignores tags and does one transfer after the other, nothing hangs or is mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import assert_near, check_grads, mse
from distributed_in_order import in_order_transport
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.hooks.microbatch_grads import StepObserver, on_microbatch_steps
from scale_pipe import DistributedPipe, pop, skippable, stash

WIDTH = 6


def layer(stashes: Sequence[str], pops: Sequence[str]) -> nn.Module:
    """Adds what it pops, and stashes what it has; each in another way."""

    @skippable(stash=list(stashes), pop=list(pops))
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, input: Tensor) -> Iterator[Any]:
            for number, name in enumerate(pops):
                value = yield pop(name)
                input = input + (number + 2) * value
            output = torch.tanh(self.linear(input))
            for number, name in enumerate(stashes):
                yield stash(name, output * (number + 3))
            return output  # type: ignore[return-value]

    return Layer()


def woven(num_layers: int, skips: Sequence[tuple[int, int]], tied: Sequence[int] = ()) -> nn.Sequential:
    """[N, WIDTH] to the same."""
    torch.manual_seed(0)
    names = {pair: f"from {pair[0]} to {pair[1]}" for pair in skips}
    layers = [
        layer([n for (a, _), n in names.items() if a == i], [n for (_, b), n in names.items() if b == i])
        for i in range(num_layers)
    ]
    for other in tied[1:]:
        layers[other].linear.weight = layers[tied[0]].linear.weight  # type: ignore[union-attr]
    return nn.Sequential(*layers)


def assert_trains_as(model: nn.Sequential, pipe: DistributedPipe, replica: int = 0, replicas: int = 1) -> None:
    """Two steps and an evaluation have the numbers of the plain model on the full batch."""
    torch.manual_seed(1)
    for _ in range(2):
        x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
        mse(model(x), target).backward()
        own_x, own_target = x.chunk(replicas)[replica], target.chunk(replicas)[replica]
        loss, output = pipe.step(own_x, target=own_target, loss_fn=mse), pipe.evaluate(own_x)
        with torch.no_grad():
            expected = model(own_x)
        assert_near(loss, mse(expected, own_target), "loss")
        assert_near(output, None if output is None else expected, "output")
    grads = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    check_grads(pipe, grads, assert_near)  # type: ignore[arg-type]


SKIPS_AND_TIED: list[tuple[list[tuple[int, int]], tuple[int, ...]]] = [
    ([(0, 1)], ()),
    ([(0, 2), (1, 2), (0, 7)], (0, 7)),
    ([(a, b) for b in range(8) for a in range(b)], (0, 3, 7)),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "schedule, balance",
    [("1f1b", [2] * 4), ("zb_v", [1] * 8), ("interleaved_1f1b", [1] * 8), ("gpipe", [2] * 4)],
)
def test_no_schedule_hangs_or_mixes_tensors_in_order(schedule: str, balance: list[int]) -> None:
    with in_order_transport(0, 1, 2, 3):
        for skips, tied in SKIPS_AND_TIED:
            pipe = DistributedPipe(woven(8, skips, tied), schedule, balance=balance, chunks=4, limit_seconds=60.0)
            assert_trains_as(woven(8, skips, tied), pipe)


@pytest.mark.ranks(4)
def test_gradients_measured_by_micro_batch_pass_in_order() -> None:
    handle = on_microbatch_steps(lambda step: StepObserver(lambda weights: None, lambda: None, lambda *_: None))
    with in_order_transport(0, 1, 2, 3):
        pipe = DistributedPipe(woven(8, [(0, 7)], (0, 3, 7)), balance=[2] * 4, chunks=4, limit_seconds=60.0)
        assert_trains_as(woven(8, [(0, 7)], (0, 3, 7)), pipe)
    handle.remove()


@pytest.mark.ranks(4)
def test_two_replicas_of_a_pipeline_pass_tensors_in_order() -> None:
    replica, stage = divmod(dist.get_rank(), 2)
    pipes, stages = ([dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    skips, tied = [(0, 2), (0, 5), (1, 3)], (0, 5)
    with in_order_transport(2 * replica, 2 * replica + 1):
        pipe = DistributedPipe(
            woven(6, skips, tied), "zb_h1", balance=[2, 4], chunks=2, process_group=pipes[replica], limit_seconds=60.0
        )
        for index, module in list(pipe.stages.items()):
            pipe.stages[index] = DistributedDataParallel(module, process_group=stages[stage])
        assert_trains_as(woven(6, skips, tied), pipe, replica, 2)
