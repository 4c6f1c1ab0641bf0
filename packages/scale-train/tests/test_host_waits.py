"""How often the host waits for the device in a steady step, by technique: none of these numbers may grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scale_tp
from scale_adascale import AdaScale
from scale_check.simulate import simulate
from scale_checkpoint import checkpoint_wrapper
from scale_core import ShardedGradScaler, clip_grad_norm_
from scale_core.comm.group import group_of
from scale_core.testing.host_waits import HostWaits
from scale_fsdp import fully_shard
from scale_moe import Balance, ExpertChoice, MoE, TokenChoice, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe

WIDTH, STEPS = 16, 4
Step = Callable[[], None]


def layers(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        return nn.Sequential(*blocks)


def sharded(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def step_of(model: nn.Module, optimizer: Any, device: str, after_backward: Step = lambda: None) -> Step:
    inputs = torch.randn(8, WIDTH, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Adam counts steps in tensors on the host, and its reads of them would be counted here."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **options)


def fsdp(device: str) -> Step:
    model = sharded(layers(device))
    return step_of(model, sgd(model), device)


def clipping(device: str) -> Step:
    model = sharded(layers(device))
    params = list(model.parameters())

    def clip() -> None:
        clip_grad_norm_(params, 1.0)

    return step_of(model, sgd(model), device, clip)


def checkpointed(device: str) -> Step:
    model = layers(device)
    model = nn.Sequential(*(checkpoint_wrapper(block) for block in model))
    sharded(model)
    return step_of(model, sgd(model), device)


def oss(device: str) -> Step:
    model = layers(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=1e-3, momentum=0.9)
    return step_of(ShardedDataParallel(model, optimizer), optimizer, device)


def adascale(device: str) -> Step:
    model = layers(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=1e-3)
    return step_of(ShardedDataParallel(model, optimizer), AdaScale(optimizer), device)


def experts(device: str, routing: Any = 2, balance: Balance | None = None) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(MoE(WIDTH, 8, 4, routing=routing, balance=balance) for _ in range(2)))
    average_replicated_gradients(model)
    return step_of(model, sgd(model), device)


def limited_experts(device: str) -> Step:
    """Some choices are dropped."""
    return experts(device, TokenChoice(2, capacity_factor=0.5), Balance(aux_loss_coef=0.01, z_loss_coef=0.01))


def choosing_experts(device: str) -> Step:
    return experts(device, ExpertChoice())


def tensor_parallel(device: str) -> Step:
    model = layers(device)
    scale_tp.initialize_model_parallel(group_of().size)
    scale_tp.parallelize(model, {"*.0": "colwise", "*.2": "rowwise"})
    return step_of(model, sgd(model), device)


def scaler(device: str, **options: Any) -> Step:
    model = sharded(layers(device))
    optimizer, grad_scaler = sgd(model, **options), ShardedGradScaler(init_scale=4.0)
    inputs = torch.randn(8, WIDTH, device=device)

    def step() -> None:
        grad_scaler.scale(model(inputs).square().mean()).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()

    return step


def fused_scaler(device: str) -> Step:
    return scaler(device, fused=True)


def pipeline(device: str) -> Step:
    pipe = DistributedPipe(layers(device)[:2], "1f1b", balance=[1, 1], chunks=2, device=device)
    optimizer, inputs = sgd(pipe), torch.randn(8, WIDTH)

    def step() -> None:
        pipe.step(inputs, target=inputs, loss_fn=nn.functional.mse_loss)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ring(device: str) -> Step:
    parts = [torch.randn(1, 2, 8, 4, device=device, requires_grad=True) for _ in range(3)]
    group = group_of()
    mask = torch.zeros(1, 8 * group.size, dtype=torch.bool, device=device)

    def step() -> None:
        scale_tp.ring_attention(*parts, group, is_causal=True, key_padding_mask=mask).sum().backward()

    return step


def padded(device: str) -> Step:
    """A new mask in each step."""
    scale_tp.initialize_model_parallel(1, context_parallel_size=group_of().size)
    torch.manual_seed(group_of().rank)  # Ranks with the same keys would be taken for ones with the full sequence.
    parts = [torch.randn(1, 2, 8, 4, device=device, requires_grad=True) for _ in range(3)]

    def step() -> None:
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=device)
        with scale_tp.context_parallel():
            nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask).sum().backward()

    return step


# The host waits once for the sizes of messages in each layer of experts, of which there are two here.
# Each rank of a pipeline reads its part of the norm, the last one also two losses, one by one on a host, and a mean.
BUDGETS: dict[Callable[[str], Step], int | tuple[int, int]] = {
    fsdp: 0,
    clipping: 0,
    checkpointed: 0,
    oss: 0,
    tensor_parallel: 0,
    ring: 0,
    padded: 1,
    adascale: 1,
    scaler: 1,
    fused_scaler: 1,
    pipeline: (1, 4),
    experts: 2,
    limited_experts: 2,
    choosing_experts: 4,  # Each layer also asks how many experts a token has at most.
}
IN_SIMULATION = [fsdp, clipping, checkpointed, oss, tensor_parallel, experts]


def waits_of(build: Callable[[str], Step], device: str) -> list[str]:
    """The lines of code that wait in the last of some steps."""
    step = build(device)
    for _ in range(STEPS - 1):
        step()
    with HostWaits(device) as waits:
        step()
    return waits.places


@pytest.mark.parametrize("technique", BUDGETS, ids=lambda technique: technique.__name__)
@pytest.mark.ranks(2, in_turn=True)
def test_a_step_on_two_ranks_waits_no_more_than_this(technique: Callable[[str], Step]) -> None:
    budget, places = BUDGETS[technique], waits_of(technique, "cpu")
    scale_tp.destroy_model_parallel()
    assert len(places) == (budget[group_of().rank] if isinstance(budget, tuple) else budget), places


@pytest.mark.simulation
@pytest.mark.parametrize("technique", IN_SIMULATION, ids=lambda technique: technique.__name__)
def test_a_step_copies_nothing_that_the_host_waits_for(technique: Callable[[str], Step]) -> None:
    """On a simulated device copies between it and the host are seen, too."""
    with simulate(world_size=2, device="sim", check=False):
        places = waits_of(technique, "sim")
    scale_tp.destroy_model_parallel()
    assert len(places) == BUDGETS[technique], places


def test_values_sizes_and_copies_are_counted() -> None:
    values = torch.arange(4)
    for wait in (
        lambda: values[0].item(),
        lambda: torch.equal(values, values),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: bool(values.any()),
        lambda: values.repeat_interleave(values),
    ):
        with HostWaits("cpu") as waits:
            wait()
        assert len(waits.places) >= 1
        assert waits.places[0].startswith(__file__)
    with HostWaits("cpu") as waits:
        values[torch.tensor([0, 1])] += 1
        values.repeat_interleave(values, output_size=8)
        values.to(torch.float64).clamp_(max=2)
    assert waits.places == []


@pytest.mark.simulation
def test_copies_of_a_simulated_device_are_counted() -> None:
    with simulate(device="sim"), HostWaits("sim") as waits:
        device, host = torch.ones(3, device="sim"), torch.ones(3, device="cpu")
        device.copy_(host, non_blocking=True)
        assert waits.places == []
        device.copy_(host)
        host.to("sim")
        device.cpu()
        assert len(waits.places) == 3
