"""What stands on the device and what on the host, where the shards are on the host: the real code on fake tensors."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from gpt_at_scale import GIB, LAYERS, Books, adamw, sharded_gpt, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_check.simulate import Simulation, simulate
from scale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]


@pytest.fixture(scope="module", params=[4, pytest.param(LAYERS, marks=pytest.mark.soak)])
def num_layers(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def steps(num_layers: int) -> dict[int, Books]:
    """By batch, the books of the one rank in a step after the first."""
    with simulate(device="sim") as simulation:
        model = sharded_gpt(num_layers, offload_policy=CPUOffloadPolicy())
        optimizer = adamw(model)
        train(model, optimizer, simulation, batch=1, chunks=8)
        return {batch: train(model, optimizer, simulation, batch, chunks) for batch, chunks in ((1, 8), (8, 16))}


DEVICE_GIB = {4: {1: 2.78, 8: 5.32}, LAYERS: {1: 3.93, 8: 11.33}}  # by layers and batch
HOST_GIB = {4: 28.5, LAYERS: 198.9}


@pytest.mark.parametrize("batch", [1, 8])
def test_a_large_gpt_trains_with_its_state_on_the_host(num_layers: int, steps: dict[int, Books], batch: int) -> None:
    books = steps[batch]
    assert books.peak_bytes <= DEVICE_GIB[num_layers][batch] * GIB, books.told
    assert books.host_peak_bytes <= HOST_GIB[num_layers] * GIB, books.told
    assert books.bytes_sent == {}


class Layer(nn.Module):
    """Attention and a linear layer, of which a checkpoint keeps the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.compute, x, use_reentrant=False)
        return result

    def compute(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        changed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + changed


class Held(NamedTuple):
    """What one rank holds, by kind, at the moments of a step at which nothing is under way; and what it has sent."""

    on_device: dict[str, dict[str, int]]
    on_host: dict[str, dict[str, int]]
    sent: list[tuple[str, str, int]]


def train_offloaded(simulation: Simulation) -> Held:
    """Two steps of a small model whose shards are on the host; the second counts."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Embedding(50, 32), Layer(), Layer(), Layer(), nn.Linear(32, 50, bias=False))
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    held = Held({}, {}, [])

    def count(moment: str) -> None:
        held.on_device[moment], held.on_host[moment] = (
            simulation.on(device).current_by_kind for device in (simulation.device, "cpu")
        )

    for _ in range(2):
        simulation.restart()
        tokens = torch.ones(2, 16, dtype=torch.int64, device=simulation.device)
        loss = model(tokens).float().square().mean()
        count("forward")
        loss.backward()
        count("backward")
        optimizer.step()
        count("step")
        optimizer.zero_grad()
        count("end")
    held.sent.extend((each.op, each.phase, each.bytes_sent) for each in simulation.collectives)
    return held


@pytest.fixture(scope="module", params=[1, 4], ids=["world 1", "world 4"])
def world(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


def test_device_and_host_together_hold_what_one_memory_does(world: int) -> None:
    with simulate(rank=world - 1, world_size=world, device="sim") as simulation:
        apart = train_offloaded(simulation)
    with simulate(rank=world - 1, world_size=world, fake=False) as simulation:
        real = train_offloaded(simulation)
    for moment, on_device in apart.on_device.items():
        together = Counter(on_device) + Counter(apart.on_host[moment])
        assert together == Counter(real.on_device[moment]), moment
    assert apart.sent == real.sent


def test_only_what_an_optimizer_touches_is_on_the_host(world: int) -> None:
    with simulate(world_size=world, device="sim") as simulation:
        held = train_offloaded(simulation)
    on_host = {
        "forward": {"parameters", "optimizer state"},
        "backward": {"parameters", "optimizer state", "temporaries"},  # Gradients, until an optimizer steps on them.
        "step": {"parameters", "optimizer state", "gradients"},
        "end": {"parameters", "optimizer state"},
    }
    assert {moment: set(kinds) for moment, kinds in held.on_host.items()} == on_host
    at_peak = set(simulation.peak_by_kind)
    assert "gathered" in at_peak
    assert not at_peak & {"parameters", "gradients", "optimizer state"}
    assert set(held.on_device["end"]) == {"activations"}  # The tokens and the loss.
