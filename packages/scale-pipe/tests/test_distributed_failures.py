"""A stage that fails, a rank that dies, ranks that differ: every rank says the same, and training goes on if it can."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, check_grads, mlp, mse
from torch import Tensor, nn

from scale_core import ContractError, ScaleDistributedError, StepError, join
from scale_core.consistency import flight_recorder as last_words
from scale_core.testing import ranks as testing
from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, PipelineOptions, StageError


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


@pytest.mark.fault(11)
@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize(
    "num_ranks, schedule, balance",
    [(2, "zb_v", [4] * 4), (2, "1f1b", [8, 8]), *((3, name, [5, 5, 6]) for name in ("1f1b", "zb_h1", "gpipe"))],
)
def test_a_stage_that_fails_fails_the_step_on_all_ranks(num_ranks: int, schedule: str, balance: list[int]) -> None:
    """In each of its computations; the next step is as if nothing had been."""
    rank, (x, target) = dist.get_rank(), batch(8)
    pipe = DistributedPipe(fragile(), schedule, balance=balance, chunks=4)
    plain = Plain(fragile(), pipe)
    plain.step_with(pipe, x, target)
    for when in ("forward", "input", "weight"):
        for failing_rank in range(num_ranks):
            error_text = f"on rank {failing_rank} raised ArithmeticError in the"
            with failing(when, rank == failing_rank), pytest.raises(StageError, match=error_text) as caught:
                pipe.step(x, target=target, loss_fn=mse)
            error = caught.value
            texts: list[Any] = [None] * num_ranks
            dist.all_gather_object(texts, (str(error), error.rank, error.stage, error.micro_batch))
            assert set(texts) == {texts[0]}
            assert isinstance(error, StepError) and "wrong on purpose" in str(error) and "Traceback" in str(error)
            assert error.rank == failing_rank and 0 <= error.micro_batch < 4
            assert type(error.__cause__) is (ArithmeticError if rank == failing_rank else type(None))
            check_grads(pipe, plain.grads)
    plain.step_with(pipe, x, target)


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


@pytest.mark.fault(101)
@pytest.mark.ranks(2)
def test_wrong_use_is_the_same_error_on_all_ranks() -> None:
    """And a step works afterwards."""
    rank, (x, target) = dist.get_rank(), batch(8)
    pipe = DistributedPipe(mlp(2), "1f1b", balance=[3, 3], chunks=4)
    optimizer: Any = Steps() if rank == 0 else torch.optim.SGD(pipe.parameters(), lr=0.0)
    wide = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(8, 8))

    def step(*args: Any, **options: Any) -> Callable[[], object]:
        return lambda: pipe.step(*(args or (x,)), **{"target": target, "loss_fn": mse, **options})

    def step_of(*layers: nn.Module, **options: Any) -> Callable[[], object]:
        return lambda: DistributedPipe(nn.Sequential(*layers), "1f1b", **options).step(x, target=target, loss_fn=mse)

    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: pipe.step(target=target, loss_fn=mse),
            "stage 0 on rank 0 raised TypeError in what it was called with: expected Tensor, but got nothing",
        ),
        (step(3 if rank == 0 else None), "expected Tensor, but got int"),
        (step(target=target[:5]), "the mini-batch has 8 samples, and target has 5"),
        (step((x, x[:3])), "has 8 samples, and inputs.args[0][1] [3, 8] has 3"),
        (
            lambda: pipe.step(x),
            "has to be a tensor with one element, and is a tensor [2, 8]. Pass loss_fn=",
        ),
        (
            lambda: pipe.step(x, loss_fn=lambda output: output.detach().mean()),
            "the loss does not depend on anything that requires a gradient",
        ),
        (
            step(stage_inputs={1: {"extra": x[:2]}}),
            "stage 1 was given inputs of 2 samples, but the mini-batch has 8: give every stage inputs of the",
        ),
        (
            step(stage_inputs={7: {"extra": x}}),
            "stage_inputs has inputs for stage 7, but there are 2 stages, 0 to 1",
        ),
        (
            step(stage_inputs=[x]),
            "expected stage_inputs to be a dict of keyword arguments by stage, but got list: write stage_inputs={1:",
        ),
        (
            lambda: pipe.step(x, loss_fn=mse),
            "No target was given on the rank of the last stage: write target=target, as loss_fn takes it",
        ),
        (
            lambda: pipe.step(x, loss_fn=lambda output: output.mean() * 1j),
            "the loss of a micro-batch has to be real, and is torch.complex64",
        ),
        (step(optimizer=optimizer), "raised OSError in the optimizer's step: no step"),
        (step(optimizer=optimizer), "Stages 1 had been stepped by then, which can't be undone"),
        (step(optimizer="sgd"), "expected an optimizer, or a dict of them by stage, but got str"),
        (
            step(optimizer={1: optimizer} if rank == 0 else None),
            "an optimizer was given for stage 1, but this rank holds the stages [0]",
        ),
        (lambda: pipe.evaluate(), "expected Tensor, but got nothing"),
        (
            lambda: DistributedPipe(nn.Sequential(mlp(1), Mean())).evaluate(x),
            "stage 1 on rank 1 raised ValueError in the forward: the output is a tensor without",
        ),
        (
            step_of(*wide, balance=[2, 1]),
            "mat1 and mat2 shapes cannot be multiplied (1x6 and 8x8)\n  it was given float32[1, 6] by stage 0",
        ),
        (
            step_of(Lambda(), nn.Tanh()),
            "raised TypeError in the forward of micro-batch 0: what a stage returns is sent",
        ),
        (step_of(Sparse(), nn.Tanh()), "expected a strided tensor to send, but got one of layout torch.sparse_coo"),
    ]
    texts = []
    for call, text in calls:
        with pytest.raises(StageError, match=re.escape(text)) as caught:
            call()
        texts.append(str(caught.value))
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, texts)
    assert by_rank[0] == by_rank[1]
    pipe.zero_grad()
    Plain(mlp(2), pipe).step_with(pipe, x, target)


@pytest.mark.ranks(2)
def test_a_cap_that_the_solver_can_not_keep_is_refused_once() -> None:
    """The second step is measured; those after it run as it did."""
    x, target = batch(8)
    pipe = DistributedPipe(mlp(2), "solve", balance=[1, 2, 2, 1], chunks=4, options=PipelineOptions(memory_cap=0.1))
    pipe.step(x, target=target, loss_fn=mse)
    text = "no schedule was found; ZB-V stays: rank 0: one micro-batch on each of its 2 stages must fit"
    with pytest.raises(ValueError, match=text):
        pipe.step(x, target=target, loss_fn=mse)
    pipe.step(x, target=target, loss_fn=mse)


@pytest.mark.fault(24, 25)
@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize(
    "options, first, second",
    [
        ({"schedule": ["1f1b", "gpipe"]}, "schedule 1F1B, 8 micro-batches", "schedule GPipe"),
        (
            {"balance": [[6, 6], [5, 7]]},
            "stage 0: Partition of 0, 1, 2, 3, 4, 5; rank 1",
            "stage 0: Partition of 0, 1, 2, 3, 4",
        ),
        ({"chunks": [4, 8]}, "schedule 1F1B, 4 micro-batches", "schedule 1F1B, 8"),
        ({"width": [8, 9]}, "stage 0: 1.weight [8, 8]", "stage 0: 1.weight [9, 9]"),
    ],
    ids=["schedule", "balance", "chunks", "width"],
)
def test_ranks_with_different_pipelines_are_refused(options: dict[str, list[Any]], first: str, second: str) -> None:
    own: dict[str, Any] = {name: by_rank[dist.get_rank()] for name, by_rank in options.items()}
    model = mlp(width=own.pop("width", 8))
    with pytest.raises(ContractError) as caught:
        DistributedPipe(model, **{"schedule": "1f1b", "balance": [6, 6], **own})
    assert f"rank 0: {first}" in str(caught.value) and f"rank 1: {second}" in str(caught.value)


def killed(victim: int, folder: str) -> None:
    """A rank dies in the middle of a step; the others write what they are told."""
    last_words._GRACE_SECONDS = 0.5  # The other rank leaves none.
    rank = dist.get_rank()
    x, target = batch(8)
    pipe = DistributedPipe(fragile(), "1f1b", balance=[4, 4, 4, 4], chunks=4, options=PipelineOptions(limit_seconds=30))
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
def test_a_rank_that_dies_is_named_by_all_that_waited_for_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_GRACE_SECONDS", 20.0)  # What the others saw is what this is about.
    with pytest.raises(testing.RankError, match=r"rank \d of 4"):
        run_ranks(killed, 4, 1, str(tmp_path))
    for rank, stage in ((0, 1), (2, 1), (3, 2)):
        first, second = (tmp_path / str(rank)).read_text().split("\n====\n")
        assert first.startswith(f"ScaleDistributedError step 2: rank {rank} waited for the ")
        assert f"of stage {stage} for stage {rank}" in first and f"(stage {stage} is on rank {stage})" in first
        assert "rank 1: no flight record: it has exited" in first and "(in a step)" in first
        assert "have lost each other in an earlier step" in second


@pytest.mark.ranks(2)
def test_ranks_without_batches_are_refused_under_join() -> None:
    """The last rank would pair its old target with the new input of the first one."""
    pipe = DistributedPipe(mlp(2), "1f1b", balance=[3, 3], chunks=2)
    x, target = batch()
    batches = [(x, target)] * (2 - pipe.group.rank)
    with pytest.raises(StageError, match=r"join\(\) has no batch left for one of the ranks") as raised:
        for inputs, expected in join(batches):
            pipe.step(inputs, target=expected, loss_fn=mse)
    assert "DistributedSampler(drop_last=True)" in str(raised.value)
