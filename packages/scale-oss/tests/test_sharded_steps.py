"""Optimizers whose hyperparameters differ between ranks raise on all of them: in the step, or one pass later."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from scale_check.exact import gather_values
from scale_core import ContractError, ScaleDistributedError
from scale_core.testing import run_ranks
from scale_oss import OSS, OSSOptions, ShardedDataParallel


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()


def train(wrapped: nn.Module, optimizers: list[OSS], rank: int, differ: str = "") -> str:
    """Four steps; the ranks' optimizers differ from the third one on."""
    for number in range(4):
        try:
            wrapped(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            if differ.startswith("frozen") and number == 1:
                wrapped.module[2].bias.requires_grad_(differ == "frozen" and rank == 0)  # type: ignore[index, union-attr]
            if differ == "steps" and number == 2 and rank == 0:
                optimizers[0].recorded_steps.add(optimizers[0])  # As a step that sends nothing.
        except ContractError as error:
            return f"{number}: {error}"
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                if differ == "rates" and number == 1 and rank == 0:
                    group["lr"] *= 0.5
    return "nothing"


def outcomes() -> dict[str, str]:
    rank = dist.get_rank()
    said = {}
    for differ in ("rates", "steps", "frozen", "frozen alike", ""):
        layers = model()
        optimizers = [OSS(layers[0].parameters(), SGD, lr=0.4), OSS(layers[2].parameters(), Adam, lr=0.4)]
        said[f"sharded {differ}"] = train(ShardedDataParallel(layers, optimizers), optimizers, rank, differ)
    for differ in ("rates", ""):
        layers = model()
        optimizers = [OSS(layers.parameters(), SGD, lr=0.4)]
        said[f"oss {differ}"] = train(DistributedDataParallel(layers), optimizers, rank, differ)
    return said


class Failing(Adam):
    """Raises where it is told to, before its part of a step or in the middle."""

    fails = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.fails:
            self.param_groups[0]["params"][0].add_(1)
            raise MemoryError("no memory for the step")
        super().step()


def without_memory(wrapping: str, rank: int) -> str:
    """The program catches that one rank has no memory for its second step, and goes on."""
    layers = model()
    together = wrapping == "together"
    inner = SGD if wrapping == "in turn" else Failing
    optimizer = OSS(
        layers.parameters(), inner, lr=0.1, options=OSSOptions(together=together, bucket_numel=40, limit_seconds=60)
    )
    wrapped = (DistributedDataParallel if wrapping == "ddp" else ShardedDataParallel)(
        *((layers,) if wrapping == "ddp" else (layers, optimizer))
    )
    original = optimizer.optim.step

    def fail(**_: object) -> None:
        raise MemoryError("no memory for the step")

    for number in range(4):
        fails = number == 1 and rank == (0 if together else 1)
        Failing.fails = fails
        if inner is SGD:
            optimizer.optim.step = fail if fails else original  # type: ignore[method-assign]
        try:
            wrapped(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        except MemoryError:
            if wrapping in ("ddp", "together"):  # The others have heard of it in this step.
                return f"{number}: its own"
        except ScaleDistributedError as error:
            return f"{number}: {type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.fault(101)
@pytest.mark.ranks(2)
def test_a_step_without_memory_on_one_rank_is_an_error_on_all() -> None:
    first, second = gather_values(
        {wrapping: without_memory(wrapping, dist.get_rank()) for wrapping in ("sharded", "in turn", "ddp", "together")}
    )
    for said in (first, second):
        assert said["sharded"].startswith("2: ContractError: ")
        assert "rank 0: OSS; rank 1: OSS that failed with MemoryError" in said["sharded"]
        assert "go back to the last checkpoint" in said["sharded"]
        assert "rank 0: OSS; rank 1: OSS that failed with MemoryError" in said["in turn"]
    assert first["ddp"].startswith("1: ContractError: ") and second["ddp"] == "1: its own"
    assert "MemoryError: no memory for the step. They may be updated in part" in second["together"], second


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(outcomes, 2)


def test_a_pass_finds_steps_that_differed_before_it(said: list[dict[str, str]]) -> None:
    for outcome in said:
        assert outcome["sharded rates"].startswith("3: ")
        assert "rank 0: OSS with lr=0.05; rank 1: OSS with lr=0.1" in outcome["sharded rates"]
        assert (
            "on '0.weight' since they last compared: rank 0: 2 steps, OSS, OSS; rank 1: OSS."
            in outcome["sharded steps"]
        )


@pytest.mark.fault(97)
def test_a_pass_finds_what_is_frozen_on_one_rank(said: list[dict[str, str]]) -> None:
    for outcome in said:
        assert outcome["sharded frozen"].startswith(
            "2: step 3: the ranks train different parameters: rank 0: as at first; rank 1: '2.bias' was frozen. Freeze"
        )


def test_without_such_a_pass_the_step_itself_compares(said: list[dict[str, str]]) -> None:
    for outcome in said:
        assert outcome["oss rates"].startswith("2: the ranks have stepped differently")
        assert "rank 0: OSS with lr=0.05; rank 1: OSS with lr=0.1" in outcome["oss rates"]


def test_ranks_that_step_alike_go_on(said: list[dict[str, str]]) -> None:
    alike = ("sharded ", "sharded frozen alike", "oss ")
    assert [[outcome[name] for name in alike] for outcome in said] == [["nothing"] * 3] * 2


@pytest.mark.fault(98)
@pytest.mark.ranks(2)
def test_options_that_decide_about_messages_are_compared_first() -> None:
    """Options that decide about the messages of a rank."""
    rank, said = dist.get_rank(), []

    def build(**options: bool) -> OSS:
        layers = model().float()
        optimizer = OSS(layers.parameters(), SGD, lr=0.1, broadcast_fp16=options.pop("broadcast_fp16", False))
        ShardedDataParallel(layers, optimizer, **options)
        return optimizer

    def set_later(optimizer: OSS, value: bool) -> None:
        optimizer.broadcast_fp16 = value

    kept = build()
    for call in (
        lambda: build(broadcast_fp16=rank == 1),
        lambda: build(reduce_fp16=rank == 1),
        lambda: build(broadcast_buffers=rank == 1),
        lambda: set_later(kept, rank == 1),
    ):
        with pytest.raises(ContractError) as caught:
            call()
        said.append(str(caught.value))
    set_later(kept, True)
    assert kept.broadcast_fp16
    names = ("broadcast_fp16", "reduce_fp16", "broadcast_buffers", "broadcast_fp16")
    for name, message in zip(names, said, strict=True):
        assert f"{name}=False" in message and f"{name}=True" in message
