"""What only a GPU can show: shards on the host, units on the device, and copies that must arrive in time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, ShardOptions, fully_shard
from scale_fsdp.runtime.unit import units_in

pytestmark = pytest.mark.gpu


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))


def data(step: int) -> Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(step)).cuda()


def by_fairscales_names(module: nn.Module, **kwargs: Any) -> nn.Module:
    FullyShardedDataParallel(module, **kwargs)
    return module


def sharded(plain: nn.Module, shard: Any = fully_shard, **kwargs: object) -> nn.Module:
    model = copy.deepcopy(plain)
    for layer in model:
        if isinstance(layer, nn.Linear):
            shard(layer, **kwargs)
    return shard(model, **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(data(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("grads", [True, False])
def test_with_shards_on_the_host_it_trains_as_the_plain_model(grads: bool) -> None:
    plain = layers()
    model = sharded(plain, by_fairscales_names, move_params_to_cpu=True, move_grads_to_cpu=grads, compute_device="cuda")
    for unit in units_in(model):
        for buffer in unit.buffers:
            assert buffer.shard.device.type == "cpu" and buffer.shard.is_pinned()
            assert buffer.full.device.type == "cuda" and buffer.full.untyped_storage().nbytes() == 0
    plain.cuda()
    ours = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    # The optimizer runs on another processor: a unit in the last place each step.
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert all(param.grad is None and param.device.type == "cpu" for param in model.parameters())


def test_gradients_on_the_host_come_back_after_the_backward() -> None:
    plain = layers().cuda()
    model = sharded(plain, by_fairscales_names, move_grads_to_cpu=True)
    ours = train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert ours == train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))


def test_in_bf16_from_the_host_the_device_holds_few_units() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(
        layers(), offload_policy=CPUOffloadPolicy(), options=ShardOptions(compute_device="cuda"), mp_policy=policy
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    train(model, optimizer, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(model, optimizer, 1)
    unit = 256 * 257
    activations = 9 * 32 * 256 * 4
    assert torch.cuda.max_memory_allocated() - before < 3 * unit * 2 + 3 * unit * 4 + 2 * activations + 2**20
