"""No way to shard an optimizer has a race: three steps of each on simulated streams."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from with_options import with_options

import scale_core
from scale_check.simulate import simulate
from scale_core.hooks import autograd as hooks
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_oss import OSS, LocalSGD, OSSOptions, OuterStep, ShardedDataParallel
from scale_oss.reducer import Reducer

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

WIDTH, STEPS = 32, 3


@pytest.fixture(autouse=True)
def _simulation() -> Iterator[None]:
    with simulate(world_size=4, device="sim", races=True):
        yield


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("sim"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4)))


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, WIDTH, device="sim", dtype=dtype)


def train(model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(STEPS):
        model(batch(dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_gather": False},
        {"reduce_fp16": True},
        {"bucket_numel": WIDTH * WIDTH},
        {"elementwise": False},
        {"together": True},
        {"broadcast_fp16": True},
    ],
    ids=str,
)
def test_sharded_data_parallel_has_no_race(options: dict[str, Any]) -> None:
    model = mlp()
    of_wrapper = {name: options[name] for name in ("overlap_gather", "reduce_fp16") if name in options}
    of_optimizer = {name: value for name, value in options.items() if name not in of_wrapper}
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3, **with_options(OSSOptions, **of_optimizer))
    train(ShardedDataParallel(model, optimizer, **of_wrapper), optimizer)


def test_bf16_parameters_have_no_race() -> None:
    model = mlp(torch.bfloat16)
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    train(ShardedDataParallel(model, optimizer), optimizer, torch.bfloat16)


class ReadsAnother(nn.Module):
    """Its second layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(WIDTH, WIDTH, device="sim")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.second.weight, self.second.bias)


def test_a_module_that_is_never_called_has_no_race() -> None:
    model = ReadsAnother()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    train(ShardedDataParallel(model, optimizer), optimizer)


def test_steps_without_a_forward_between_them_have_no_race() -> None:
    model = mlp()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped(batch()).sum().backward()
    for _ in range(STEPS):
        optimizer.step()


def test_accumulation_and_clipping_have_no_race() -> None:
    model = mlp()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    wrapped = ShardedDataParallel(model, optimizer)
    for _ in range(STEPS):
        with wrapped.no_sync():
            wrapped(batch()).sum().backward()
        wrapped(batch()).sum().backward()
        scale_core.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            wrapped(batch())


def test_a_gradient_scaler_has_no_race() -> None:
    model = mlp()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    wrapped, scaler = ShardedDataParallel(model, optimizer), ShardedGradScaler("sim")
    for _ in range(STEPS):
        scaler.scale(wrapped(batch()).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_gradients_that_a_program_averages_have_no_race() -> None:
    """As DistributedDataParallel does, which is C++ that looks at values of tensors without any."""
    model = mlp()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    for _ in range(STEPS):
        model(batch()).sum().backward()
        works = [dist.all_reduce(param.grad, async_op=True) for param in model.parameters()]
        for work in works:
            assert work is not None
            work.wait()
        optimizer.step()
        optimizer.zero_grad()


def test_local_sgd_has_no_race() -> None:
    model = mlp()
    inner = SGD(model.parameters(), lr=0.1)
    averaging = LocalSGD(model, inner, sync_every=2, outer=OuterStep(momentum=0.9))
    train(model, inner)
    averaging.sync()


def test_a_pass_that_autograd_drops_late_is_aborted_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    aborts: list[str] = []
    queue_callback, abort = hooks.queue_callback, Reducer.abort

    def fail(_: Tensor) -> None:
        raise KeyError("hook")

    def recorded_abort(reducer: Reducer, error: BaseException) -> None:
        aborts.append(threading.current_thread().name)
        abort(reducer, error)

    monkeypatch.setattr(hooks, "queue_callback", lambda callback: (kept.append(callback), queue_callback(callback)))
    monkeypatch.setattr(Reducer, "abort", recorded_abort)
    model = mlp()
    optimizer = OSS(model.parameters(), optim=AdamW, lr=1e-3)
    wrapped = ShardedDataParallel(model, optimizer)
    hidden = torch.randn(2, WIDTH, device="sim", requires_grad=True)
    hidden.register_hook(fail)
    with pytest.raises(KeyError, match="hook"):
        wrapped(hidden).sum().backward()
    dropped = threading.Event()
    assert kept
    _thread.start_new_thread(lambda: (kept.clear(), dropped.set()), ())
    assert dropped.wait(60) and aborts == []
    train(wrapped, optimizer)
    assert aborts == [threading.main_thread().name]
