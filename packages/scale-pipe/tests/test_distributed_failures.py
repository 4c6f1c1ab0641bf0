"""A stage that fails, a rank that dies, ranks that differ: every rank says the same, and training goes on if it can."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, differences, micro_batches, mlp, mse, order_in, step_beside
from torch import Tensor, nn

from scale_core import ContractError, ScaleDistributedError, StepError
from scale_core.consistency import flight_recorder as last_words
from scale_core.testing import ranks as testing
from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, StageError


class _Raises(torch.autograd.Function):
    """Raises in its backward: for the input, for the weight, or for both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("wrong on purpose")


class Fragile(nn.Module):
    """A layer that raises when it is told to: "forward", "input" or "weight", on one micro-batch."""

    when = ""
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        if Fragile.when and torch.is_grad_enabled():
            Fragile.calls += 1
            if Fragile.calls == 2:
                if Fragile.when == "forward":
                    raise ArithmeticError("wrong on purpose")
                if Fragile.when == "input" and x.requires_grad:
                    x = _Raises.apply(x)  # type: ignore[no-untyped-call]
                else:
                    weight = _Raises.apply(weight)  # type: ignore[no-untyped-call]
        output: Tensor = nn.functional.linear(x, weight, self.layer.bias)
        return output


def fragile() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (Fragile(), nn.Tanh())))


@contextmanager
def failing(when: str, here: bool) -> Iterator[None]:
    Fragile.when, Fragile.calls = (when if here else ""), 0
    try:
        yield
    finally:
        Fragile.when = ""


def failures() -> list[str]:
    """Each stage fails in each of its computations; the next step is as if nothing had been."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    x, target = batch(8)
    parts = micro_batches(x, target)
    schedules = (("1f1b", 1), ("zb_h1", 1), ("gpipe", 1)) if size == 3 else (("zb_v", 2), ("1f1b", 1))
    for schedule, each in schedules:
        layers = 16 // (size * each)
        balance = [layers] * (size * each)
        balance[-1] += 16 - sum(balance)
        pipe, plain = DistributedPipe(fragile(), schedule, balance=balance, chunks=4), Plain(fragile())
        pipe.step(x, target=target, loss_fn=mse)
        plain.step(parts, mse, order_in(pipe))
        for when in ("forward", "input", "weight"):
            for at in range(size):
                here = rank == at
                with failing(when, here):
                    try:
                        pipe.step(x, target=target, loss_fn=mse)
                        wrong.append(f"{schedule}, {when} at rank {at}: nothing was raised")
                    except StageError as error:
                        texts: list[Any] = [None] * size
                        dist.all_gather_object(texts, (str(error), error.rank, error.stage, error.micro_batch))
                        told = f"on rank {at} raised ArithmeticError in the"
                        ok = set(texts) == {texts[0]} and error.rank == at and told in str(error)
                        ok = ok and isinstance(error, StepError) and "wrong on purpose" in str(error)
                        ok = ok and 0 <= error.micro_batch < 4 and "Traceback" in str(error)
                        ok = ok and (type(error.__cause__) is ArithmeticError if here else error.__cause__ is None)
                        wrong += [f"{schedule}, {when} at rank {at}: {texts}"] * (not ok)
                wrong += [f"after {when}: {words}" for words in differences(pipe, plain.grads)]
        expected = plain.step(parts, mse, order_in(pipe))
        loss = pipe.step(x, target=target, loss_fn=mse)
        wrong += [f"{schedule}: {words}" for words in differences(pipe, plain.grads)]
        wrong += [f"{loss} and {expected}"] * (not torch.equal(loss, expected))
    return wrong


def raised_by(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except StageError as error:
        return str(error)


class Lambda(nn.Module):
    """Returns what no process can take from another."""

    def forward(self, x: Tensor) -> Any:
        return x, lambda: None


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().to_sparse()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Steps:
    """An optimizer that fails."""

    def step(self) -> None:
        raise OSError("no step")


def wrong_use() -> dict[str, str]:
    """What people do wrong with a step, by what they are told; a step works after each."""
    rank = dist.get_rank()
    x, target = batch(8)
    pipe = DistributedPipe(mlp(2), "1f1b", balance=[3, 3], chunks=4)
    optimizer: Any = Steps() if rank == 0 else torch.optim.SGD(pipe.parameters(), lr=0.0)
    wide = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(8, 8))
    told = {
        "no batch": raised_by(lambda: pipe.step(target=target, loss_fn=mse)),
        "no tensor": raised_by(lambda: pipe.step(3 if rank == 0 else None, target=target, loss_fn=mse)),
        "other target": raised_by(lambda: pipe.step(x, target=target[:5], loss_fn=mse)),
        "other sizes": raised_by(lambda: pipe.step((x, x[:3]), target=target, loss_fn=mse)),
        "no loss": raised_by(lambda: pipe.step(x)),
        "detached loss": raised_by(lambda: pipe.step(x, loss_fn=lambda output: output.detach().mean())),
        "stage inputs": raised_by(lambda: pipe.step(x, target=target, loss_fn=mse, stage_inputs={1: {"extra": x[:2]}})),
        "no stage": raised_by(lambda: pipe.step(x, target=target, loss_fn=mse, stage_inputs={7: {"extra": x}})),
        "no dict": raised_by(lambda: pipe.step(x, target=target, loss_fn=mse, stage_inputs=[x])),  # type: ignore[arg-type]
        "no target": raised_by(lambda: pipe.step(x, loss_fn=mse)),
        "complex loss": raised_by(lambda: pipe.step(x, loss_fn=lambda output: output.mean() * 1j)),
        "optimizer": raised_by(lambda: pipe.step(x, target=target, loss_fn=mse, optimizer=optimizer)),
        "no optimizer": raised_by(lambda: pipe.step(x, target=target, loss_fn=mse, optimizer="sgd")),  # type: ignore[arg-type]
        "optimizer elsewhere": raised_by(
            lambda: pipe.step(x, target=target, loss_fn=mse, optimizer={1: optimizer} if rank == 0 else None)
        ),
        "evaluation": raised_by(lambda: pipe.evaluate()),
        "loss in an evaluation": raised_by(lambda: DistributedPipe(nn.Sequential(mlp(1), Mean())).evaluate(x)),
        "shapes": raised_by(lambda: DistributedPipe(wide, "1f1b", balance=[2, 1]).step(x, target=target, loss_fn=mse)),
        "function": raised_by(
            lambda: DistributedPipe(nn.Sequential(Lambda(), nn.Tanh()), "1f1b").step(x, target=target, loss_fn=mse)
        ),
        "sparse": raised_by(
            lambda: DistributedPipe(nn.Sequential(Sparse(), nn.Tanh()), "1f1b").step(x, target=target, loss_fn=mse)
        ),
    }
    small = DistributedPipe(mlp(2), "solve", balance=[1, 2, 2, 1], chunks=4, memory_cap=0.1)
    small.step(x, target=target, loss_fn=mse)
    try:
        small.step(x, target=target, loss_fn=mse)
    except ValueError as error:  # The second step is measured; those after it run as it did.
        told["refused"] = str(error)
    small.step(x, target=target, loss_fn=mse)
    pipe.zero_grad()
    return {**told, "afterwards": "; ".join(step_beside(pipe, Plain(mlp(2)), x, target))}


TOLD = {
    "no batch": "stage 0 on rank 0 raised TypeError in what it was called with: expected Tensor, but got nothing",
    "no tensor": "expected Tensor, but got int",
    "other target": "the mini-batch has 8 samples, and target has 5",
    "other sizes": "has 8 samples, and inputs.args[0][1] [3, 8] has 3",
    "no loss": "has to be a tensor with one element, and is a tensor [2, 8]. Pass loss_fn=",
    "detached loss": "the loss does not depend on anything that requires a gradient",
    "stage inputs": "stage 1 was given inputs of 2 samples, but the mini-batch has 8: give every stage inputs of the",
    "no stage": "stage_inputs has inputs for stage 7, but there are 2 stages, 0 to 1",
    "no dict": "expected stage_inputs to be a dict of keyword arguments by stage, but got list: write stage_inputs={1:",
    "no target": "No target was given on the rank of the last stage: write target=target, as loss_fn takes it",
    "complex loss": "the loss of a micro-batch has to be real, and is torch.complex64",
    "no optimizer": "expected an optimizer, or a dict of them by stage, but got str",
    "optimizer elsewhere": "an optimizer was given for stage 1, but this rank holds the stages [0]",
    "loss in an evaluation": "stage 1 on rank 1 raised ValueError in the forward: the output is a tensor without",
    "refused": "no schedule was found; ZB-V stays: rank 0: one micro-batch on each of its 2 stages must fit",
    "optimizer": "raised OSError in the optimizer's step: no step",
    "step that is done": "Stages 1 had been stepped by then, which can't be undone",
    "evaluation": "expected Tensor, but got nothing",
    "shapes": "mat1 and mat2 shapes cannot be multiplied (1x6 and 8x8)\n  it was given float32[1, 6] by stage 0",
    "function": "raised TypeError in the forward of micro-batch 0: what a stage returns is sent",
    "sparse": "expected a strided tensor to send, but got one of layout torch.sparse_coo",
    "afterwards": "",
}


def three_ranks() -> tuple[list[str], dict[str, str]]:
    return failures(), {}


def two_ranks() -> tuple[list[str], dict[str, str]]:
    return failures(), wrong_use()


def test_a_stage_that_fails_anywhere_fails_the_step_on_all_ranks_alike() -> None:
    assert [wrong for wrong, _ in run_ranks(three_ranks, 3)] == [[]] * 3


@pytest.mark.fault(101)
def test_what_is_used_wrongly_is_told_to_all_ranks_and_training_goes_on() -> None:
    outcomes = run_ranks(two_ranks, 2)
    for wrong, told in outcomes:
        assert wrong == []
        for name, words in TOLD.items():
            assert words in told["optimizer" if name == "step that is done" else name], name
    assert outcomes[0][1] == outcomes[1][1]


def differing() -> list[str]:
    """Ranks that have built something else are told what, before anything runs."""
    rank, told = dist.get_rank(), []
    for build in (
        lambda: DistributedPipe(mlp(), ("1f1b", "gpipe")[rank], balance=[6, 6]),
        lambda: DistributedPipe(mlp(), "1f1b", balance=[[6, 6], [5, 7]][rank]),
        lambda: DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=[4, 8][rank]),
        lambda: DistributedPipe(mlp(width=[8, 9][rank]), "1f1b", balance=[6, 6]),
    ):
        try:
            build()
            told.append("nothing was raised")
        except ContractError as error:
            told.append(str(error))
    return told


def test_ranks_that_have_built_other_pipelines_are_told_what_differs() -> None:
    for told in run_ranks(differing, 2):
        assert "rank 0: schedule 1F1B, 8 micro-batches" in told[0] and "rank 1: schedule GPipe" in told[0]
        assert "rank 0: stage 0: Partition of 0, 1, 2, 3, 4, 5; rank 1: stage 0: Partition of 0, 1, 2, 3, 4" in told[1]
        assert "rank 0: schedule 1F1B, 4 micro-batches" in told[2] and "rank 1: schedule 1F1B, 8" in told[2]
        assert "rank 0: stage 0: 1.weight [8, 8]" in told[3] and "rank 1: stage 0: 1.weight [9, 9]" in told[3]


def killed(victim: int, folder: str) -> None:
    """A rank dies in the middle of a step; the others write what they are told."""
    last_words._GRACE_SECONDS = 0.5  # The other rank leaves none.
    rank = dist.get_rank()
    x, target = batch(8)
    pipe = DistributedPipe(fragile(), "1f1b", balance=[4, 4, 4, 4], chunks=4, limit_seconds=30)
    pipe.step(x, target=target, loss_fn=mse)
    told = []
    if rank == victim:
        for stage in pipe.stages.values():
            stage.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for _ in range(2):
        try:
            pipe.step(x, target=target, loss_fn=mse)
        except ScaleDistributedError as error:
            told.append(f"{type(error).__name__} {error}")
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write("\n====\n".join(told))
    os._exit(0)  # Nobody is left to meet at the end.


@pytest.mark.fault(5)
def test_a_rank_that_dies_is_named_by_each_of_the_others_with_the_stage_that_they_waited_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "_GRACE_SECONDS", 20.0)  # What the others saw is what this is about.
    with pytest.raises(testing.RankError, match=r"rank \d of 4"):
        run_ranks(killed, 4, 1, str(tmp_path))
    for rank, stage in ((0, 1), (2, 1), (3, 2)):
        first, second = (tmp_path / str(rank)).read_text().split("\n====\n")
        assert first.startswith(f"ScaleDistributedError step 2: rank {rank} waited for the ")
        assert f"of stage {stage} for stage {rank}" in first and f"(stage {stage} is on rank {stage})" in first
        assert "rank 1: no flight record: it has exited" in first and "(in a step)" in first
        assert "have lost each other in an earlier step" in second
