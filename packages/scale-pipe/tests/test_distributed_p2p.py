"""Over a transport that ignores tags and does one transfer after the other, nothing hangs or is mixed up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_in_order import in_order_transport
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.hooks.microbatch_grads import StepObserver, on_microbatch_steps
from scale_pipe import DistributedPipe, pop, skippable, stash

WIDTH = 6
mse = nn.functional.mse_loss


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


def compare(pipe: DistributedPipe, model: nn.Sequential, title: str, replica: int = 0, replicas: int = 1) -> list[str]:
    """Two steps and an evaluation beside the plain model on the whole batch."""
    torch.manual_seed(1)
    wrong = []
    for _ in range(2):
        x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
        mse(model(x), target).backward()
        mine, to = x.chunk(replicas)[replica], target.chunk(replicas)[replica]
        loss = pipe.step(mine, target=to, loss_fn=mse)
        output = pipe.evaluate(mine)
        with torch.no_grad():
            expected = model(mine)
        wrong += [f"{title}: loss"] * (not torch.allclose(loss, mse(expected, to), rtol=1e-10))
        wrong += [f"{title}: output"] * (output is not None and not torch.allclose(output, expected, rtol=1e-10))
    grads = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    for name, param in pipe.named_parameters():
        grad = grads[name]
        assert param.grad is not None and grad is not None
        wrong += [f"{title}: {name}"] * (not torch.allclose(param.grad, grad, rtol=1e-10, atol=1e-10))
    return wrong


def replicas() -> list[str]:
    """Two pipelines of two ranks; a stage of one is a replica of that of the other."""
    rank = dist.get_rank()
    replica, stage = rank // 2, rank % 2
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    beside = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    skips, tied = [(0, 2), (0, 5), (1, 3)], (0, 5)
    with in_order_transport(2 * replica, 2 * replica + 1):
        pipe = DistributedPipe(
            woven(6, skips, tied), "zb_h1", balance=[2, 4], chunks=2, process_group=pipes[replica], limit_seconds=60.0
        )
        for index, module in list(pipe.stages.items()):
            pipe.stages[index] = DistributedDataParallel(module, process_group=beside[stage])
        return compare(pipe, woven(6, skips, tied), "replicas", replica, 2)


@pytest.mark.ranks(4)
def test_no_schedule_hangs_or_mixes_tensors_in_order() -> None:
    wrong = []
    cases: list[tuple[list[tuple[int, int]], tuple[int, ...]]] = [
        ([(0, 1)], ()),
        ([(0, 2), (1, 2), (0, 7)], (0, 7)),
        ([(a, b) for b in range(8) for a in range(b)], (0, 3, 7)),
    ]
    with in_order_transport(0, 1, 2, 3):
        for name, balance in (("1f1b", [2] * 4), ("zb_v", [1] * 8), ("interleaved_1f1b", [1] * 8), ("gpipe", [2] * 4)):
            for skips, tied in cases:
                pipe = DistributedPipe(woven(8, skips, tied), name, balance=balance, chunks=4, limit_seconds=60.0)
                wrong += compare(pipe, woven(8, skips, tied), f"{name}, {skips}")
        # Gradients of shared parameters by micro-batch, for whoever measures them.
        handle = on_microbatch_steps(
            lambda step: StepObserver(lambda weights: None, lambda: None, lambda param, grad: None)
        )
        pipe = DistributedPipe(woven(8, [(0, 7)], (0, 3, 7)), balance=[2] * 4, chunks=4, limit_seconds=60.0)
        wrong += compare(pipe, woven(8, [(0, 7)], (0, 3, 7)), "measured")
        handle.remove()
    assert wrong + replicas() == []
