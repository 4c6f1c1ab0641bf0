"""Over a transport that ignores tags and does one transfer after the other, nothing hangs or is mixed up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import assert_near, check_grads, mse
from distributed_in_order import in_order_transport
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.errors import ScaleError
from scale_core.hooks.microbatch_grads import StepObserver, on_microbatch_steps
from scale_pipe import DistributedPipe, PipelineOptions, pop, skippable, stash
from scale_pipe.distributed.message import Slot
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.distributed.program import CrossStageTensors, Receive, build_programs
from scale_pipe.distributed.runtime import PassRuntime
from scale_pipe.schedules.action import Action
from scale_pipe.schedules.registry import get_schedule

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


@pytest.mark.ranks(4, in_turn=True)
@pytest.mark.parametrize(
    "schedule, balance",
    [("1f1b", [2] * 4), ("zb_v", [1] * 8), ("interleaved_1f1b", [1] * 8), ("gpipe", [2] * 4)],
)
def test_no_schedule_hangs_or_mixes_tensors_in_order(schedule: str, balance: list[int]) -> None:
    with in_order_transport(0, 1, 2, 3):
        for skips, tied in SKIPS_AND_TIED:
            pipe = DistributedPipe(
                woven(8, skips, tied), schedule, balance=balance, chunks=4, options=PipelineOptions(limit_seconds=60.0)
            )
            assert_trains_as(woven(8, skips, tied), pipe)


@pytest.mark.ranks(4)
def test_gradients_measured_by_micro_batch_pass_in_order() -> None:
    handle = on_microbatch_steps(lambda step: StepObserver(lambda weights: None, lambda: None, lambda *_: None))
    with in_order_transport(0, 1, 2, 3):
        pipe = DistributedPipe(
            woven(8, [(0, 7)], (0, 3, 7)), balance=[2] * 4, chunks=4, options=PipelineOptions(limit_seconds=60.0)
        )
        assert_trains_as(woven(8, [(0, 7)], (0, 3, 7)), pipe)
    handle.remove()


@pytest.mark.ranks(4)
def test_two_replicas_of_a_pipeline_pass_tensors_in_order() -> None:
    replica, stage = divmod(dist.get_rank(), 2)
    pipes, stages = ([dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    skips, tied = [(0, 2), (0, 5), (1, 3)], (0, 5)
    with in_order_transport(2 * replica, 2 * replica + 1):
        pipe = DistributedPipe(
            woven(6, skips, tied),
            "zb_h1",
            balance=[2, 4],
            chunks=2,
            process_group=pipes[replica],
            options=PipelineOptions(limit_seconds=60.0),
        )
        for index, module in list(pipe.stages.items()):
            pipe.stages[index] = DistributedDataParallel(module, process_group=stages[stage])
        assert_trains_as(woven(6, skips, tied), pipe, replica, 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_v"])
@pytest.mark.ranks(2, in_turn=True)
def test_tensors_that_are_received_ahead_may_change(name: str) -> None:
    """Batches of other sizes, of fewer micro-batches, and one on which a stage fails, each after one like the first."""
    ahead = []
    start_ahead = P2PChannel.start_ahead
    with in_order_transport(0, 1), pytest.MonkeyPatch.context() as patch:

        def counted(self: P2PChannel, slot: Slot, peer: int) -> None:
            ahead.append(slot)
            start_ahead(self, slot, peer)

        patch.setattr(P2PChannel, "start_ahead", counted)
        stages = [2, 2] if name in ("1f1b", "gpipe") else [1] * 4
        pipe = DistributedPipe(
            woven(4, [(0, 2)]), name, balance=stages, chunks=4, options=PipelineOptions(limit_seconds=60.0)
        )
        plain = woven(4, [(0, 2)])
        for size in (8, 8, 12, 3, 8, -8, 8, 8):
            torch.manual_seed(1)
            x, target = torch.randn(2, abs(size), WIDTH, dtype=torch.float64)
            if size < 0:
                with pytest.raises(ScaleError):
                    pipe.step(x[:, :-1], target=target, loss_fn=mse)  # The first layer fails on it.
                continue
            expected = mse(plain(x), target)
            expected.backward()
            loss = pipe.step(x, target=target, loss_fn=mse)
            assert torch.allclose(loss, expected, rtol=1e-10), size
        grads = {key: param.grad for key, param in plain.named_parameters()}
        for key, param in pipe.named_parameters():
            assert torch.allclose(param.grad, grads[key], rtol=1e-10, atol=1e-10), key  # type: ignore[arg-type]
    assert ahead


@pytest.mark.ranks(2)
def test_receives_that_follow_a_computation_start_before_it() -> None:
    """The second rank receives its second activation while it computes with the first, and so on."""
    computing, ahead = False, 0
    compute, start_ahead = PassRuntime._compute, P2PChannel.start_ahead

    def observed_compute(self: PassRuntime, *args: Any) -> None:
        nonlocal computing
        computing = True
        compute(self, *args)
        computing = False

    def observed_start(self: P2PChannel, slot: Slot, peer: int) -> None:
        nonlocal ahead
        ahead += computing
        start_ahead(self, slot, peer)

    with in_order_transport(0, 1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassRuntime, "_compute", observed_compute)
        patch.setattr(P2PChannel, "start_ahead", observed_start)
        pipe = DistributedPipe(
            woven(4, []), "gpipe", balance=[2, 2], chunks=4, options=PipelineOptions(limit_seconds=60.0)
        )
        x = torch.ones(8, WIDTH, dtype=torch.float64)
        for _ in range(2):
            ahead = 0
            pipe.step(x, target=x, loss_fn=mse)
    programs = build_programs(get_schedule("gpipe", 2, 4, 1), CrossStageTensors())
    follow = [
        sum(isinstance(task, Receive) and isinstance(before, Action) for before, task in itertools.pairwise(tasks))
        for tasks in programs
    ]
    assert follow[1] >= 3
    assert ahead == follow[dist.get_rank()]
