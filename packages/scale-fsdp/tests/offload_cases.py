"""Models and optimizers for the tests of offloading, and a device that is away although it is the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import scale_fsdp.offload.backward
import scale_fsdp.offload.optimizer
import scale_fsdp.offload.placement
import scale_fsdp.offload.transfer
from scale_check.exact import assert_equal

ELEMENTWISE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam, fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "fused": False, "weight_decay": 0.1}),
    "adamw, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "fused": True, "amsgrad": True, "maximize": True}),
    "sgd, fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd, plain": (torch.optim.SGD, {"lr": 0.1, "fused": False}),
    "adagrad": (torch.optim.Adagrad, {"fused": True, "initial_accumulator_value": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}


def let_parameters_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing counts as being on the host, so that all that goes to a device and back is copied."""
    for module in (
        scale_fsdp.offload.backward,
        scale_fsdp.offload.transfer,
        scale_fsdp.offload.optimizer,
        scale_fsdp.offload.placement,
    ):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


def small_pieces(monkeypatch: pytest.MonkeyPatch, elements: int = 128) -> None:
    """Has small tensors take the way of large ones: in several pieces and buckets."""
    for module in (scale_fsdp.offload.backward, scale_fsdp.offload.host_update):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(scale_fsdp.offload.host_kernel, "_CACHED_ELEMENTS", elements // 2)


def network() -> nn.Sequential:
    """Sizes that are no multiples of anything, and 13,763 elements."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 131), nn.ReLU(), nn.Linear(131, 4), nn.LayerNorm(4, bias=False))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()))
    loss: Tensor = model(x).square().mean() + model(x).sin().sum()
    return loss


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int] = range(4)) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    model = network()
    return model, copy.deepcopy(model)


Step = Callable[[nn.Module, Optimizer, int], None]


def assert_trains_alike(
    optimizer: Callable[[nn.Module], Optimizer], plain: Callable[[nn.Module], Optimizer], step: Step, steps: int = 4
) -> None:
    """Trains two copies of a network by `step`, and compares weights and states to the bit."""
    mine, theirs = twins()
    ours, other = optimizer(mine), plain(theirs)
    for number in range(steps):
        step(mine, ours, number)
        step(theirs, other, number)
    assert_equal(mine, theirs)
    assert_equal(ours, other)
