"""Wrong programs, each with a bug that people have written, are found, at the tensor where it shows first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from check_models import (
    TiedModel,
    adamw,
    average,
    averaging,
    batches,
    ddp,
    fsdp2,
    is_rank,
    mlp,
    parity_in_turn,
    tokens,
    with_batch_norm,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_check import ParityError, ParityVerdict, parity
from scale_check.harness import mean_square_step

# Wrappers with a bug.


def not_averaged(model: nn.Module) -> nn.Module:
    return model


def summed(model: nn.Module) -> nn.Module:
    def change(name: str, grad: Tensor) -> Tensor:
        return average(grad) * dist.get_world_size()

    return averaging(model, change)


def one_layer_left_out(model: nn.Module) -> nn.Module:
    return averaging(model, lambda name, grad: grad if name == "2.0.weight" else average(grad))


def frozen_on_rank_1(model: nn.Module) -> nn.Module:
    return averaging(
        model, lambda name, grad: average(grad * 0 if name == "2.0.bias" and dist.get_rank() == 1 else grad)
    )


def wrong_number_of_ranks(model: nn.Module) -> nn.Module:
    return averaging(model, lambda name, grad: average(grad) * 2 / 3)


def reduced_in_half_precision(model: nn.Module) -> nn.Module:
    return averaging(model, lambda name, grad: average(grad.bfloat16()).to(grad.dtype))


def two_gradients_exchanged(model: nn.Module) -> nn.Module:
    kept: dict[str, Tensor] = {}

    def change(name: str, grad: Tensor) -> Tensor:
        if name == "4.bias":  # The same shape twice, as two experts have.
            return average(grad).flip(0)
        kept[name] = grad
        return average(grad)

    return averaging(model, change)


def transposed_on_rank_1(model: nn.Module) -> nn.Module:
    if is_rank(1):
        weight = model.get_parameter("2.0.weight").data
        weight.copy_(weight.t().clone())
    return averaging(model)


def other_weights_on_rank_1(model: nn.Module) -> nn.Module:
    if is_rank(1):
        with torch.no_grad():
            model.get_parameter("4.weight").add_(0.01)
    return averaging(model)


def detached_layer(model: nn.Module) -> nn.Module:
    model.get_submodule("2").register_forward_hook(lambda module, args, output: output.detach())
    return averaging(model)


def scaled_layer_on_rank_0(model: nn.Module) -> nn.Module:
    if is_rank(0):
        model.get_submodule("2.0").register_forward_hook(lambda module, args, output: output * (1 + 1e-7))
    return ddp(model)


def tied_weight_averaged_twice(model: nn.Module) -> nn.Module:
    def change(name: str, grad: Tensor) -> Tensor:
        return average(grad) if name != "embed.weight" else average(grad) + average(grad)

    return averaging(model, change)


def statistics_of_the_rank(model: nn.Module) -> nn.Module:
    return ddp(model)


def sharded_but_forgotten(model: nn.Module) -> nn.Module:
    """The root is not sharded, so nobody averages what is in it alone."""
    return fsdp2(model.get_submodule("2")) and model


# Steps with a bug.


def step_then(act: Callable[[nn.Module, Optimizer], None]) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        loss = mean_square_step(model, optimizer, batch)
        act(model, optimizer)
        return loss

    return step


def clipped_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    """A right step. By the clipping all gradients are wrong if one of them is."""
    optimizer.zero_grad()
    loss: Tensor = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return loss


def clips_by_the_norm_of_the_rank(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if dist.is_initialized():
        for param in model.parameters():
            assert param.grad is not None
            param.grad = average(param.grad)
    optimizer.step()
    return loss


def accumulates_without_dividing(model: nn.Module, optimizer: Optimizer, micro_batches: Sequence[Tensor]) -> None:
    optimizer.zero_grad()
    for part in micro_batches:
        (model(part).square().mean() / (1 if dist.is_initialized() else 2)).backward()
    optimizer.step()


def drops_a_micro_batch_on_rank_1(model: nn.Module, optimizer: Optimizer, micro_batches: Sequence[Tensor]) -> None:
    optimizer.zero_grad()
    for number, part in enumerate(micro_batches):
        loss = model(part).square().mean() / 2
        (loss * 0 if number == 0 and is_rank(1) else loss).backward()
    optimizer.step()


def both_ranks_take_the_first_half(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    if dist.is_initialized():
        batch = batch.clone()
        dist.broadcast(batch, 0)
    return mean_square_step(model, optimizer, batch)


def steps_on_a_piece_on_rank_1(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    before = model.get_parameter("module.2.0.weight" if dist.is_initialized() else "2.0.weight")
    kept = before.detach().clone()
    handle = optimizer.register_step_post_hook(lambda *_: before.data[4:].copy_(kept[4:]) if is_rank(1) else None)
    loss = mean_square_step(model, optimizer, batch)
    handle.remove()
    return loss


def decays_once_more_on_rank_1(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    loss = mean_square_step(model, optimizer, batch)
    if is_rank(1):
        model.get_parameter("module.2.0.weight").data.mul_(0.999)
    return loss


def forgets_momentum_on_rank_0(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    if is_rank(0):
        for state in optimizer.state.values():
            if "momentum_buffer" in state:
                state["momentum_buffer"].zero_()
    return mean_square_step(model, optimizer, batch)


def other_rate_on_rank_1(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    optimizer.param_groups[0]["lr"] = 0.1 if not is_rank(1) else 0.11
    return mean_square_step(model, optimizer, batch)


def leaves_out_the_second_step_on_rank_1(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    is_second = len(optimizer.state) > 0 and optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.0 if is_second and is_rank(1) else 0.1
    return mean_square_step(model, optimizer, batch)


def draws_on_rank_1_alone(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    if is_rank(1):
        torch.rand(1)
    return mean_square_step(model, optimizer, batch)


MICRO_BATCHES = list(zip(batches(6), batches(6)[::-1], strict=True))
BUGS: dict[str, tuple[dict[str, Any], str]] = {
    "ranks train apart": ({"wrap": not_averaged}, "step 1: gradient of "),
    "a gradient is summed": ({"wrap": summed}, "step 1: gradient of "),
    "a layer is not averaged": ({"wrap": one_layer_left_out}, "step 1: gradient of 2.0.weight "),
    "a layer is frozen on one rank": ({"wrap": frozen_on_rank_1}, "step 1: gradient of 2.0.bias "),
    "frozen on one rank, and clipped": (
        {"step": clipped_step, "wrap": frozen_on_rank_1},
        "step 1: gradient of 2.0.bias ",
    ),
    "divided by another number of ranks": ({"wrap": wrong_number_of_ranks}, "step 1: gradient of "),
    "reduced in half precision": ({"wrap": reduced_in_half_precision}, "step 1: gradient of "),
    "exchanged gradients": ({"wrap": two_gradients_exchanged}, "step 1: gradient of 4.bias "),
    "a transposed shard": ({"wrap": transposed_on_rank_1}, "step 1: weight at the start 2.0.weight differs on rank 1"),
    "other weights": ({"wrap": other_weights_on_rank_1}, "step 1: weight at the start 4.weight differs on rank 1"),
    "a detached layer": ({"wrap": detached_layer}, "step 1: gradient of the output of 2"),
    "a layer that is a little off": ({"wrap": scaled_layer_on_rank_0}, "step 1: output of 2.1 differs on rank 0: "),
    "a tied weight that counts twice": (
        {"build": TiedModel, "wrap": tied_weight_averaged_twice, "batches": tokens()},
        "step 1: gradient of embed.weight ",
    ),
    "batch norm of the rank": (
        {"build": with_batch_norm, "wrap": statistics_of_the_rank},
        "step 1: output of 1 differs on ranks 0, 1",
    ),
    "a unit without its root": ({"wrap": sharded_but_forgotten}, "step 1: gradient of "),
    "clipped by the norm of the rank": (
        {"step": clips_by_the_norm_of_the_rank, "wrap": not_averaged},
        "step 1: gradient of ",
    ),
    "accumulated without dividing": (
        {"step": accumulates_without_dividing, "wrap": averaging, "batches": MICRO_BATCHES},
        "step 1: gradient of the output of ",
    ),
    "a dropped micro-batch": (
        {"step": drops_a_micro_batch_on_rank_1, "wrap": averaging, "batches": MICRO_BATCHES},
        "step 1: gradient of the output of ",
    ),
    "the same samples on both ranks": ({"step": both_ranks_take_the_first_half, "wrap": ddp}, "step 1: output of 0 "),
    "a step on a piece": (
        {"step": steps_on_a_piece_on_rank_1, "wrap": ddp},
        "step 1: weight after the step: 2.0.weight differs on rank 1",
    ),
    "decayed after the step": (
        {"step": decays_once_more_on_rank_1, "wrap": ddp},
        "step 2: weight at the start 2.0.weight differs on rank 1",
    ),
    "momentum that is lost": (
        {"step": forgets_momentum_on_rank_0, "wrap": ddp},
        "step 2: weight after the step: 0.weight differs on rank 0",
    ),
    "another learning rate": (
        {"step": other_rate_on_rank_1, "wrap": ddp},
        "step 1: optimizer option lr of group 0 differs on rank 1: one process has 0.1, the ranks have 0.11,",
    ),
    "a random number that one rank draws": (
        {"step": draws_on_rank_1_alone, "wrap": ddp},
        "step 1: random generator after the step differs on rank 1: the ranks draw more or fewer random numbers",
    ),
    "a stale weight for one step": (
        {"step": leaves_out_the_second_step_on_rank_1, "wrap": ddp},
        "step 2: optimizer option lr of group 0 differs on rank 1",
    ),
}

OF_ALL = frozenset(name for name, _ in mlp().named_parameters())
# The gradients of step 1 that are wrong. The one that is named differs by most of its rounding, which is the machine's.
WRONG_GRADIENTS = {
    "ranks train apart": OF_ALL,
    "a gradient is summed": OF_ALL,
    "a layer is not averaged": {"2.0.weight"},
    "a layer is frozen on one rank": {"2.0.bias"},
    "frozen on one rank, and clipped": OF_ALL,
    "divided by another number of ranks": OF_ALL,
    "reduced in half precision": OF_ALL,
    "exchanged gradients": {"4.bias"},
    "a tied weight that counts twice": {"embed.weight"},
    "a unit without its root": OF_ALL - {"2.0.weight", "2.0.bias"},
    "clipped by the norm of the rank": OF_ALL,
}


def test_a_bug_is_found_where_it_shows_first() -> None:
    programs = {name: {"build": mlp, "batches": batches(6), **given} for name, (given, _) in BUGS.items()}
    reports = parity_in_turn(programs)
    for name, (_, expected) in BUGS.items():
        report = reports[name]
        assert report.verdict is ParityVerdict.BUG and report.first is not None, name
        assert str(report).startswith(expected), f"{name}: {report}"
        assert report.first.ratio > 1e6 or math.isinf(report.first.ratio), name
        if report.first.phase == "gradient of":
            of_step = [other for other in report.differences if (other.step, other.phase) == (1, "gradient of")]
            assert {other.name for other in of_step} == WRONG_GRADIENTS[name], name
            assert report.first in of_step, name


def test_the_report_says_where_and_how_much_in_words_and_json() -> None:
    with pytest.raises(ParityError) as caught:
        parity(mlp, wrap=one_layer_left_out, batches=batches(6), optimizer=adamw)
    report = caught.value.report
    assert report.first is not None and report.first.phase == "gradient of" and len(report.first.index) == 2
    assert "one process has" in str(report) and "times the rounding of this program" in str(report)
    assert "The last tensor before it that is right: step 1: gradient of 0.bias" in str(report)
    found = report.to_json()
    assert found["verdict"] == "different" and found["first"]["name"] == "2.0.weight"
