"""Two ranks on one device over gloo: on CUDA with real streams, and the same programs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scale_tp
from scale_core import ShardedGradScaler
from scale_core.comm.group import Group, group_of
from scale_core.testing.ranks import run_ranks
from scale_fsdp import fully_shard
from scale_moe import MoE, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:gloo"}
WIDTH, STEPS = 16, 4


def layers(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks).double().to(device)


def batch(step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(device)


def train(model: nn.Module, optimizer: Any, device: torch.device, *, whole: bool = False) -> list[float]:
    """Losses of this rank's part of each batch, or of all of it."""
    group, losses = group_of(), []
    for step in range(STEPS):
        inputs = batch(step, device)
        loss = model(inputs if whole else inputs.chunk(group.size)[group.rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def train_plain(device: torch.device) -> list[float]:
    model = layers(device)
    return train(model, sgd(model.parameters()), device, whole=True)


def train_fsdp(device: torch.device) -> list[float]:
    model = layers(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return train(model, sgd(model.parameters()), device)


def train_oss(device: torch.device) -> list[float]:
    model = layers(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    return train(ShardedDataParallel(model, optimizer), optimizer, device)


def train_tensor_parallel(device: torch.device) -> list[float]:
    model = layers(device)
    scale_tp.initialize_model_parallel(group_of().size)
    scale_tp.parallelize(model, {"*.0": "colwise", "*.2": "rowwise"})
    return train(model, sgd(model.parameters()), device, whole=True)


def train_experts(device: torch.device, *, alone: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, 8, 3, process_group=Group() if alone else None))
    model = model.double().to(device)
    if not alone:
        average_replicated_gradients(model)
    return train(model, sgd(model.parameters()), device, whole=alone)


TECHNIQUES = {
    "fsdp": train_fsdp,
    "oss": train_oss,
    "tensor parallel": train_tensor_parallel,
    "experts": train_experts,
}


def device_of_ranks(kind: str) -> torch.device:
    return torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)


def train_on_rank(name: str, kind: str) -> list[float]:
    return TECHNIQUES[name](device_of_ranks(kind))


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_two_ranks_train_as_one_process(name: str, kind: str) -> None:
    losses = run_ranks(train_on_rank, 2, name, kind, backend=BACKENDS[kind])
    device = device_of_ranks(kind)
    expected = train_experts(device, alone=True) if name == "experts" else train_plain(device)
    means = [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*losses, strict=True)]
    assert means == pytest.approx(expected, rel=1e-10)


def step_with_empty_shards(kind: str) -> list[Tensor]:
    """Parameters of one element, so that the second rank has none, stepped by torch's fused kernel."""
    device = device_of_ranks(kind)
    model = nn.ParameterList([torch.ones(1, device=device) for _ in range(3)])
    module = nn.Module()
    module.params = model
    module.forward = lambda: sum(param.square().sum() for param in model)  # type: ignore[method-assign]
    fully_shard(module)
    options = {"fused": True, "capturable": True} if kind == "cuda" else {"fused": True}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    for _ in range(2):
        module().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().cpu() for param in module.parameters()]


@pytest.mark.parametrize("kind", DEVICES)
def test_fused_optimizers_step_ranks_whose_shards_are_empty(kind: str) -> None:
    plain = nn.Parameter(torch.ones(1, device=kind))
    optimizer = torch.optim.AdamW([plain], lr=0.1, fused=True)
    for _ in range(2):
        plain.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in run_ranks(step_with_empty_shards, 2, kind, backend=BACKENDS[kind]):
        assert len(params) == 3 and all(torch.equal(param, plain.detach().cpu()) for param in params)


def step_scaled(kind: str, fused: bool) -> tuple[list[float], float]:
    """Losses and scale of steps of which one has an infinite gradient on the second rank alone."""
    device, group = device_of_ranks(kind), group_of()
    model = layers(device).float()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler, losses = ShardedGradScaler(init_scale=4.0), []
    for step in range(3):
        loss = model(batch(step, device).float()).square().mean()
        losses.append(loss.item())
        scaler.scale(loss * (torch.inf if step == 1 and group.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, scaler.get_scale()


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_the_step_on_both_ranks(fused: bool, kind: str) -> None:
    first, second = run_ranks(step_scaled, 2, kind, fused, backend=BACKENDS[kind])
    assert first == second and first[1] == 2.0
    ((plain, _),) = run_ranks(step_scaled, 1, kind, fused, backend=BACKENDS[kind])
    assert first[0][:2] == pytest.approx(plain[:2], rel=1e-5) and first[0][2] != pytest.approx(plain[2], rel=1e-3)
