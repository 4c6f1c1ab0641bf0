"""reducing.py: a backward pass that fails on some ranks is given up by all of them at once, and leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from scale_core.contract import ScaleDistributedError
from scale_core.group import group_of
from scale_core.testing import run_ranks
from scale_oss import OSS, ShardedDataParallel, StepError


@dataclass
class Fault:
    """What is to go wrong in the backward of a layer: nothing, as long as `where` is empty."""

    where: str = ""
    ranks: list[int] = field(default_factory=list)

    def strikes(self, place: str) -> bool:
        return place == self.where and group_of().rank in self.ranks


class Gate(nn.Module):
    """Passes everything on, and fails in its backward when asked to."""

    def __init__(self, place: str, fault: Fault) -> None:
        super().__init__()
        self.place, self.fault = place, fault

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(self._check)
        return y

    def _check(self, grad: Tensor) -> None:
        if self.fault.strikes(self.place):
            raise ValueError(f"lost at the {self.place}")


class Case:
    """A model of three buckets, with a gate behind each layer but the last, beside the fault that they share."""

    def __init__(self) -> None:
        self.fault = Fault()
        torch.manual_seed(0)
        front, middle = Gate("front", self.fault), Gate("middle", self.fault)
        layers = nn.Sequential(nn.Linear(6, 8), front, nn.Linear(8, 8), middle, nn.Linear(8, 2))
        self.optimizer = OSS(layers.parameters(), torch.optim.Adam, lr=0.1, bucket_numel=75)
        self.model = ShardedDataParallel(layers, self.optimizer)
        assert len(self.optimizer.buckets) == 3

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + group_of().rank)
        loss: Tensor = self.model(torch.randn(4, 6, generator=generator)).square().mean()
        return loss

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fails(self, backward: Callable[[], None], ranks: list[int]) -> str:
        """Runs a backward pass that fails on these ranks; returns what was raised."""
        began = time.monotonic()
        expected = ValueError if group_of().rank in ranks else StepError
        with pytest.raises(expected) as caught:
            backward()
        assert time.monotonic() - began < 4  # Nobody waits for a limit, nor for a connection to be cut.
        self.fault.where = ""
        assert all(param.grad is None for param in self.model.parameters())
        return str(caught.value)

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def failing_steps() -> list[str]:
    """Steps that fail between steps that don't; the others are those of a training without them."""
    case, reference, messages = Case(), Case(), []
    size = group_of().size
    plan = [("middle", [0]), ("front", [size - 1]), ("middle", list(range(size))), ("front", [0]), ("front", [0])]
    for step, (where, ranks) in enumerate(plan):
        case.fault.where, case.fault.ranks = where, ranks
        messages.append(case.fails(case.loss(100 + step).backward, ranks))
        case.step(step)
        reference.step(step)
    assert all(torch.equal(a, b) for a, b in zip(case.weights(), reference.weights(), strict=True))
    return messages


def failing_micro_batches() -> None:
    """Gradients that were reduced before the pass that fails stay; those that were not are gone, on all ranks."""
    case, reference = Case(), Case()
    for each in (case, reference):
        each.loss(0).backward()
    with case.model.no_sync():
        case.loss(1).backward()
    case.fault.where, case.fault.ranks = "front", [1]
    case.fails(case.loss(2).backward, [1])
    for each in (case, reference):
        each.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(case.weights(), reference.weights(), strict=True))


def failing_hooks_of_ours() -> str:
    """What this package refuses in the middle of a pass on one rank is refused on all; so is a manual reduction."""
    case = Case()
    case.step(0)
    before = case.weights()
    create_graph = group_of().rank == 0
    with pytest.raises(RuntimeError) as caught:
        case.loss(1).backward(create_graph=create_graph)
    assert isinstance(caught.value, StepError) != create_graph
    for param in case.model.parameters():
        param.grad = None
    case.optimizer.step()  # There is nothing to step with.
    assert all(torch.equal(a, b) for a, b in zip(case.weights(), before, strict=True))
    case.step(2)
    return str(caught.value)


def lost_ranks() -> str:
    """A rank that leaves is named to the others, once they have waited for it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = OSS(layers.parameters(), torch.optim.SGD, lr=0.1, limit_seconds=1)
    model = ShardedDataParallel(layers, optimizer)
    if group_of().rank == 1:
        time.sleep(3)
        return ""
    with pytest.raises(ScaleDistributedError):
        model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ScaleDistributedError, match="is broken since an earlier error") as caught:
        model(torch.ones(1, 6)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_backward_that_fails_on_some_ranks_is_given_up_by_all_and_leaves_no_trace(ranks: int) -> None:
    plan = [("middle", [0]), ("front", [ranks - 1]), ("middle", list(range(ranks))), ("front", [0]), ("front", [0])]
    for rank, messages in enumerate(run_ranks(failing_steps, ranks)):
        for (where, failed), message in zip(plan, messages, strict=True):
            if rank in failed:
                assert message == f"lost at the {where}"
            else:
                assert f"was given up on all ranks, because rank {failed[0]} failed in it" in message
                assert "its backward pass failed" in message
                assert "call optimizer.zero_grad(), and training can go on with the next batch" in message


def test_gradients_that_were_reduced_before_a_failing_pass_stay() -> None:
    run_ranks(failing_micro_batches, 2)


def test_what_is_refused_on_one_rank_is_refused_on_all() -> None:
    mine, others = run_ranks(failing_hooks_of_ours, 2)
    assert "has a gradient of its own" in mine and "rank 0 failed in it" in others


def test_a_rank_that_has_left_is_found_out_and_the_next_pass_is_refused_by_name() -> None:
    assert "bucket 0" in run_ranks(lost_ranks, 2)[0]
