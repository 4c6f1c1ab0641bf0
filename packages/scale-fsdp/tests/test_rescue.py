"""rescue.py: one rank fails anywhere in a step; all ranks give it up, and train on as if it had not been."""

from __future__ import annotations

import copy
import gc
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fsdp_cases import differing_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core.contract import ScaleDistributedError
from scale_core.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import StepError, fully_shard
from scale_fsdp.unit import units_in

WIDTH = 5


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("broken in backward")


class Block(nn.Module):
    """Fails on purpose, once, where `fails` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        recomputing = torch._C._current_graph_task_id() != -1
        if self.fails == ("recomputation" if recomputing else "forward"):
            self.fails = ""
            raise ValueError(f"broken in {'recomputation' if recomputing else 'forward'}")
        x = x + self.second(torch.tanh(self.first(x)))
        if self.fails == "backward" and not recomputing:
            self.fails = ""
            x = _Breaks.apply(x)
        return x


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.checkpointed = checkpointed
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = self.head(x)
        if self.fails:
            self.fails = ""
            raise MemoryError("broken in the root")
        return x


@dataclass(frozen=True)
class Failure:
    """Where a step fails.

    Attributes:
        where: "forward", "backward" or "recomputation" of a block, or "root".
        block: Of which block.
        rank: On which rank.
        step: In which step; the first is 0.
    """

    where: str
    block: int = 1
    rank: int = 1
    step: int = 3
    reshard: bool | int = True
    accumulate: int = 1
    no_sync: bool = False
    at_micro_batch: int = 0


def data(step: int, rank: int, micro: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def fail_and_go_on(failure: Failure) -> list[str]:
    """Trains with a failing step, and beside it a model that never meets it; returns what differs."""
    rank, wrong = group_of().rank, []
    torch.manual_seed(0)
    plain = Net(failure.where == "recomputation")
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=failure.reshard)
        fully_shard(model, reshard_after_forward=failure.reshard)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for step in range(failure.step + 3):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            fails = step == failure.step
            if fails and number:
                continue
            raised = train(model, step, failure, fails=fails and rank == failure.rank)
            if fails:
                wrong += check(raised, failure)
                if any(param.grad is not None for param in model.parameters()) and failure.accumulate == 1:
                    wrong.append("a gradient of the step that was given up")
                model.zero_grad()
            elif raised is not None:
                wrong.append(f"step {step}: {raised!r}")
            else:
                optimizer.step()
                optimizer.zero_grad()
    return [f"{failure}: {line}" for line in wrong + differing_weights(*models)]


def train(model: nn.Module, step: int, failure: Failure, *, fails: bool) -> Exception | None:
    for micro in range(failure.accumulate):
        if fails and micro == failure.at_micro_batch:
            (model if failure.where == "root" else model.blocks[failure.block]).fails = failure.where
        try:
            if failure.no_sync and micro < failure.accumulate - 1:
                with model.no_sync():
                    model(data(step, group_of().rank, micro)).square().mean().backward()
            else:
                model(data(step, group_of().rank, micro)).square().mean().backward()
        except Exception as error:
            return error
    return None


def check(raised: Exception | None, failure: Failure) -> list[str]:
    """The failing rank raises its own error, with a note; the others say whose it was."""
    mine = group_of().rank == failure.rank
    text = str(raised) + "".join(getattr(raised, "__notes__", []))
    expected = MemoryError if failure.where == "root" else ValueError
    if not isinstance(raised, expected if mine else StepError):
        return [f"raised {raised!r}"]
    if mine and failure.where == "backward":
        return []  # Autograd has the error by then; only the others can be told.
    wanted = [rf"was given up on all ranks, because rank {failure.rank} failed"]
    wanted.append(
        "its backward pass failed after the" if failure.where == "backward" else f"broken in .*{failure.where}"
    )
    return [f"{text!r} lacks {pattern!r}" for pattern in wanted if not re.search(pattern, text)]


def run_failures(failures: list[Failure]) -> list[str]:
    for failure in failures:
        wrong = fail_and_go_on(failure)
        if wrong:
            return wrong
    return []


Passes = list[tuple[int, int]]
"""The passes whose gradients are in a sum, by step and micro-batch."""


def accumulated_gradients_stay(failures: list[Failure]) -> list[str]:
    """After a pass that failed, gradients are those of a process that never ran it.

    Two steps run whole and leave their gradients in `grad`, the third is given up in one of its micro-batches, and one
    pass more brings all that was kept into `grad`. The plain model runs the passes that went well, rank by rank.
    """
    wrong = []
    for failure in failures:
        torch.manual_seed(0)
        plain = Net(failure.where == "recomputation")
        model = copy.deepcopy(plain)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=failure.reshard)
        fully_shard(model, reshard_after_forward=failure.reshard)
        mine = group_of().rank == failure.rank
        for step in range(2):
            train(model, step, failure, fails=False)
        before = [param.grad.clone() for param in model.parameters()]
        raised = train(model, 2, failure, fails=mine)
        wrong += check(raised, failure)
        if failure.no_sync and any(
            param.grad is None or not torch.equal(param.grad, grad)
            for param, grad in zip(model.parameters(), before, strict=True)
        ):
            wrong.append("a gradient that had been reduced before has changed")
        model(data(3, group_of().rank)).square().mean().backward()
        wrong += different_sums(model, plain, failure)
        if wrong:
            return [f"{failure}: {line}" for line in wrong]
    return []


def different_sums(model: nn.Module, plain: nn.Module, failure: Failure) -> list[str]:
    """Compares `grad` with the plain gradients of the passes that went well, each sum reduced as it was."""
    size, last = group_of().size, failure.accumulate - 1
    reductions: list[list[Passes]] = []  # by reduction and rank
    for step in range(2):
        micros = [[(step, micro)] for micro in range(failure.accumulate)]
        together = [[(step, micro) for micro in range(failure.accumulate)]]
        reductions += [[passes] * size for passes in (together if failure.no_sync else micros)]
    if not failure.no_sync:
        reductions += [[[(2, micro)]] * size for micro in range(failure.at_micro_batch)]
    kept = [failure.at_micro_batch if rank == failure.rank else last for rank in range(size)]
    waited = [[(2, micro) for micro in range(number)] if failure.no_sync else [] for number in kept]
    reductions.append([[*passes, (3, 0)] for passes in waited])
    expected: list[Tensor] = []
    for by_rank in reductions:
        mean = sum(plain_sum(plain, rank, passes) for rank, passes in enumerate(by_rank)) / size
        expected = [mean] if not expected else [expected[0] + mean]
    wholes = split(expected[0], plain)
    pieces = [
        whole.reshape(-1)[span.start : span.stop].view(span.shape)
        for unit in units_in(model)
        for buffer in unit.buffers
        for whole, span in zip([wholes[name] for name in buffer.names], buffer.spans, strict=True)
    ]
    grads = [param.grad for unit in units_in(model) for buffer in unit.buffers for param in buffer.exposed]
    return [
        "the gradients are not those of the passes that went well"
        for grad, piece in zip(grads, pieces, strict=True)
        if grad is None or not torch.equal(grad, piece)
    ][:1]


def plain_sum(plain: nn.Module, rank: int, passes: Passes) -> Tensor:
    plain.zero_grad()
    for step, micro in passes:
        plain(data(step, rank, micro)).square().mean().backward()
    return torch.cat([param.grad.reshape(-1) for param in plain.parameters() if param.grad is not None])


def split(flat: Tensor, plain: nn.Module) -> dict[str, Tensor]:
    named = dict(plain.named_parameters())
    parts = flat.split([param.numel() for param in named.values()])
    return {name: part.view(param.shape) for (name, param), part in zip(named.items(), parts, strict=True)}


def evaluation_is_given_up() -> None:
    torch.manual_seed(0)
    model = Net(False).eval()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        for _ in range(2):
            expected = model(data(0, 0))
        model.blocks[2].fails = "forward" if group_of().rank == 0 else ""
        with pytest.raises(ValueError if group_of().rank == 0 else StepError):
            model(data(0, 0))
        assert torch.equal(model(data(0, 0)), expected)


def first_step_fails() -> str:
    """Nothing is known of the order yet: the others learn of it when their wait ends."""
    model = Net(False)
    for block in model.blocks:
        fully_shard(block, limit_seconds=3.0)
    fully_shard(model, limit_seconds=3.0)
    model.blocks[1].fails = "forward" if group_of().rank == 1 else ""
    with pytest.raises(ValueError if group_of().rank == 1 else ScaleDistributedError) as caught:
        model(data(0, group_of().rank)).sum().backward()
    gc.collect()
    return str(caught.value)


def alone() -> None:
    """A world of one: the error is the user's, and the model is as before."""
    model = fully_shard(Net(False))
    for where in ("forward", "backward"):
        for _ in range(2):
            model(data(0, 0)).sum().backward()
        model.zero_grad()
        model.blocks[0].fails = where
        with pytest.raises(ValueError, match=f"broken in {where}"):
            model(data(0, 0)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
    model(data(0, 0)).sum().backward()


PLACES = [Failure("forward", block) for block in range(3)] + [Failure("backward", block) for block in range(3)]


def test_a_step_that_fails_on_one_rank_is_given_up_by_all_and_leaves_no_trace() -> None:
    cases = [*PLACES, Failure("root"), Failure("forward", rank=0, step=1), Failure("recomputation", 0)]
    cases += [Failure("recomputation", 2, rank=0)]
    assert run_ranks(run_failures, 2, cases, timeout=120.0) == [[], []]


def test_it_is_so_whatever_stays_gathered_and_however_gradients_accumulate() -> None:
    cases = [
        Failure("forward", 1, reshard=False),
        Failure("backward", 1, reshard=False, rank=0),
        Failure("forward", 2, accumulate=3, no_sync=True, at_micro_batch=0),
        Failure("backward", 0, accumulate=3, no_sync=True, at_micro_batch=1),
        Failure("backward", 2, accumulate=2, no_sync=True, at_micro_batch=1, reshard=False),
    ]
    assert run_ranks(run_failures, 2, cases, timeout=120.0) == [[], []]
    cases = [Failure("forward", 1, rank=2, reshard=2), Failure("backward", 1, rank=3, reshard=2)]
    assert run_ranks(run_failures, 4, cases, timeout=120.0) == [[]] * 4


EVERYWHERE = [*PLACES, Failure("root"), *(Failure("recomputation", block) for block in range(3))]


def test_accumulated_gradients_are_kept_wherever_the_last_pass_fails() -> None:
    cases = [
        replace(place, accumulate=2, no_sync=no_sync, at_micro_batch=1, rank=number % 2)
        for number, place in enumerate(EVERYWHERE)
        for no_sync in (False, True)
    ]
    assert run_ranks(accumulated_gradients_stay, 2, cases, timeout=120.0) == [[], []]


def test_each_rank_keeps_what_it_had_before_the_pass_that_raised_on_it() -> None:
    """Under no_sync the others meet the one that failed in the last micro-batch only."""
    cases = [
        replace(place, accumulate=3, no_sync=True, at_micro_batch=micro, reshard=bool(micro))
        for micro in (0, 1)
        for place in (PLACES[1], PLACES[4], EVERYWHERE[6], EVERYWHERE[8])
    ]
    assert run_ranks(accumulated_gradients_stay, 3, cases, timeout=120.0) == [[]] * 3


def test_an_evaluation_is_given_up_too() -> None:
    run_ranks(evaluation_is_given_up, 3)


def test_in_the_first_step_the_others_find_its_last_words() -> None:
    messages = run_ranks(first_step_fails, 2)
    assert messages[1] == "broken in forward"
    assert "rank 1: " in messages[0] and "raised ValueError: broken in forward" in messages[0]


def test_in_a_world_of_one_the_error_is_the_users_own() -> None:
    alone()
