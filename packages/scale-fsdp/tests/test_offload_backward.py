"""offload_backward.py: gradients that are copied, or used, while the backward pass runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import offload_cases as cases
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import scale_fsdp.offload.backward
from scale_check.exact import assert_equal
from scale_core.hooks.gradients import call_grad_published_hooks
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_fsdp import OffloadOptimizer
from scale_fsdp.offload.backward import ConsumedGradient
from scale_fsdp.offload.host_update import OffloadUpdate


@pytest.fixture(params=["here", "away", "away, by a thread"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parameters are; the thread is what works beside a CUDA device."""
    cases.small_pieces(monkeypatch, 1024)
    if request.param != "here":
        cases.let_parameters_be_away(monkeypatch)
    if "thread" in request.param:
        monkeypatch.setattr(scale_fsdp.offload.backward, "worker_for", lambda device: ThreadPoolExecutor(1))


def overlapped(model: nn.Module, fraction: float = 0.6, **kwargs: Any) -> OffloadOptimizer:
    settings = {"lr": 0.01, "fused": True, **kwargs}
    return OffloadOptimizer(torch.optim.Adam, model.parameters(), host_fraction=fraction, overlap_step=True, **settings)


def plain_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("name", ["adam, fused", "adam", "sgd, fused", "adagrad", "rmsprop"])
def test_an_overlapped_step_is_the_step_to_the_bit(name: str) -> None:
    kind, settings = cases.ELEMENTWISE[name]
    for fraction in (0.0, 0.4, 1.0):
        cases.assert_trains_alike(
            lambda model, f=fraction: OffloadOptimizer(  # type: ignore[misc]
                kind, model.parameters(), host_fraction=f, overlap_step=True, **settings
            ),
            lambda model: kind(model.parameters(), **settings),
            lambda model, optimizer, number: cases.train(model, optimizer, [number]),
        )


def test_the_update_is_made_when_the_backward_returns() -> None:
    model, twin = cases.twins()
    optimizer, other = overlapped(model), plain_adam(twin)
    cases.loss_of(model, 0).backward()
    cases.loss_of(twin, 0).backward()
    other.step()
    assert_equal(model, twin)
    assert all(isinstance(param.grad, ConsumedGradient) for param in model.parameters())
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert_equal(model, twin)
    assert_equal(optimizer, other)


def test_a_bucket_is_used_before_the_next_gradients_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.network()
    log: list[str] = []
    original = OffloadUpdate.finish_bucket

    def finish(self: OffloadUpdate, *args: Any) -> None:
        original(self, *args)
        log.append("update")

    monkeypatch.setattr(OffloadUpdate, "finish_bucket", finish)
    optimizer = overlapped(model, 1.0)
    model[0].weight.register_hook(lambda _: log.append("gradient of the first weight"))
    monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 500)
    cases.loss_of(model, 0).backward()
    if "thread" not in str(optimizer._in_backward._worker):  # type: ignore[union-attr]
        assert log.index("update") < log.index("gradient of the first weight")
    assert log[-1] == "update"


def scaled(optimizer: OffloadOptimizer) -> None:
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


REFUSED: dict[str, Callable[[nn.Module, OffloadOptimizer], object]] = {
    "clipping by torch": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clipping by scale-core": lambda model, optimizer: clip_grad_norm_(model.parameters(), 1.0),
    "a second backward": lambda model, optimizer: cases.loss_of(model, 1).backward(),
    "a scaler": lambda model, optimizer: scaled(optimizer),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_gradients_is_refused(what: str) -> None:
    model = cases.network()
    optimizer = overlapped(model)
    cases.loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"was used for its update .*overlap_step=False"):
        REFUSED[what](model, optimizer)


def test_clipping_by_the_optimizer_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"updates during the backward pass, .*overlap_step=False\) to clip"):
        overlapped(cases.network()).clip_grad_norm_(1.0)


DROPPED: dict[str, Callable[[nn.Module, OffloadOptimizer], None]] = {
    "by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "by the optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
}


@pytest.mark.parametrize("how", DROPPED)
def test_a_second_backward_is_refused_after_zero_grad(how: str) -> None:
    model = cases.network()
    optimizer = overlapped(model)
    cases.loss_of(model, 0).backward()
    DROPPED[how](model, optimizer)
    for fails in (lambda: cases.loss_of(model, 1).backward(), optimizer.step):
        with pytest.raises(RuntimeError, match=r"allows one backward\(\) per step\(\)"):
            fails()
    DROPPED[how](model, optimizer)
    cases.train(model, optimizer, [2])


def test_an_option_changed_between_backward_and_step_fails() -> None:
    model = cases.network()
    optimizer = overlapped(model)
    cases.loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"the option 'lr' .* from 0\.01 to 0\.5 .*change options after step\(\)"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    cases.loss_of(model, 1).backward()
    optimizer.step()


def test_schedulers_step_after_the_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 0:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        cases.train(model, optimizer, [number])
        schedulers[id(optimizer)].step()

    schedulers: dict[int, Any] = {}
    cases.assert_trains_alike(overlapped, plain_adam, step)


def test_a_shard_is_updated_when_its_gradient_is_reported() -> None:
    weight, shards = nn.Parameter(torch.ones(3)), [nn.Parameter(torch.ones(300)) for _ in range(2)]
    for number, shard in enumerate(shards):
        set_shard(shard, Shard(f"shard {number}", (300,), 0, 300))
    optimizer = OffloadOptimizer(torch.optim.SGD, [weight, *shards], host_fraction=0.5, overlap_step=True, lr=1.0)

    def reduced(_: torch.Tensor) -> None:
        for shard in shards:
            shard.grad = torch.full((300,), 0.25)
        call_grad_published_hooks(shards[:1])

    out = weight.sum() * 1
    out.register_hook(reduced)
    out.backward()
    assert [set(param.tolist()) for param in (weight, *shards)] == [{0.0}, {0.75}, {1.0}]
    optimizer.step()
    assert [set(param.tolist()) for param in (weight, *shards)] == [{0.0}, {0.75}, {0.75}]
    assert shards[0].grad is None


def test_what_was_not_used_or_set_by_hand_is_seen_to_in_the_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        first, last = model.get_parameter("0.weight"), model.get_parameter("3.weight")
        (model[2](model[1](model[0](torch.ones(2, 100)))).sum() + number * first.sum()).backward()
        if number == 1:
            last.grad = torch.full_like(last, 0.3)
        optimizer.step()
        optimizer.zero_grad()

    cases.assert_trains_alike(overlapped, plain_adam, step)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_modules_that_are_recomputed_may_be_updated_on_the_way(use_reentrant: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        x = torch.full((3, 100), 0.1 * number, requires_grad=True)
        for layer in (model[0], model[1], model[2], model[3]):  # type: ignore[index]
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        x.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    cases.assert_trains_alike(overlapped, plain_adam, step)


def test_a_parameter_that_backward_still_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 4)
    for fraction in (0.0, 1.0):
        weight, x = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
        optimizer = OffloadOptimizer(torch.optim.SGD, [weight], host_fraction=fraction, overlap_step=True, lr=0.1)
        y = (x * weight.detach()).sum()  # Older than the use that trains, so its backward comes after the update.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y + (weight * 3).sum()).backward()
        assert optimizer.placement().host_elements == 4 * fraction


def test_after_a_backward_that_failed_the_next_one_may_follow() -> None:
    model, twin = cases.twins()
    optimizer = overlapped(model)

    class Failure(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("here")

    hidden = Failure.apply(model[1](model[0](torch.ones(2, 100))))
    with pytest.raises(ArithmeticError, match="here"):
        model[2](hidden).sum().backward()  # What comes before the failure waits for more of its bucket.
    optimizer.zero_grad()
    assert_equal(model, twin)
    other = plain_adam(twin)
    for each, its in ((model, optimizer), (twin, other)):
        cases.train(each, its)
    assert_equal(model, twin)


def test_an_error_of_the_update_comes_out_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.network()
    optimizer = overlapped(model, 1.0)
    cases.train(model, optimizer, [0])
    original, failing = OffloadUpdate.finish_bucket, [True]

    def finish(self: OffloadUpdate, load: Any, *args: Any) -> None:
        if failing and failing.pop():
            load.chunks.clear()
        original(self, load, *args)

    monkeypatch.setattr(OffloadUpdate, "finish_bucket", finish)
    with pytest.raises(IndexError):
        cases.loss_of(model, 1).backward()
    optimizer.step()
    for number in range(2, 6):  # Every slot has come back.
        cases.train(model, optimizer, [number])


def test_no_more_is_on_its_way_than_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is slower than the device holds up the backward pass instead of taking memory without end."""
    cases.let_parameters_be_away(monkeypatch)
    monkeypatch.setattr(scale_fsdp.offload.backward, "worker_for", lambda device: ThreadPoolExecutor(1))
    model = cases.network()
    under_way, most, lock = [0], [0], threading.Lock()
    fetch, finish = OffloadUpdate.fetch, OffloadUpdate.finish_bucket

    def slow_finish(self: OffloadUpdate, *args: Any) -> None:
        time.sleep(0.01)
        finish(self, *args)
        with lock:
            under_way[0] -= 1

    def counted_fetch(self: OffloadUpdate, *args: Any) -> Any:
        load = fetch(self, *args)
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        return load

    monkeypatch.setattr(OffloadUpdate, "finish_bucket", slow_finish)
    monkeypatch.setattr(OffloadUpdate, "fetch", counted_fetch)
    optimizer = overlapped(model, 1.0)
    cases.train(model, optimizer, [0])
    assert under_way == [0] and 1 < most[0] <= 4  # One more may have begun before the last one was counted out.
