"""Optimizers whose state is quantized block by block, over shards that are cut between blocks, beside one process.

Both libraries quantize tensors from 4096 elements on, in blocks of 256, so every shard here is at least that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from trainings import train_beside

import scale_snapshot
from scale_core.comm.group import group_of
from scale_core.flat.layout import BlockAtom
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import ShardOptions, fully_shard
from scale_oss import OSS

BLOCK = 256
STEPS = 3

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def network(seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    wide, narrow = nn.Linear(160, 256, bias=False), nn.Linear(256, 18, bias=False)  # The first is cut, however packed.
    return nn.Sequential(wide, nn.Tanh(), narrow, nn.Tanh(), nn.Linear(18, 7)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    data = torch.randn(4, 160, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(data.to(next(model.parameters()).dtype)).square().mean()
    return loss


def units_of_blocks(
    make: Make, seed: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A unit whose parameters are cut between blocks, and an optimizer on its shards."""
    model = fully_shard(network(seed, dtype), options=ShardOptions(atom=BlockAtom(BLOCK)))
    first = next(model.parameters())
    shard, num_elements = shard_of(first), local_tensor(first).numel()
    assert shard is not None and shard.start % BLOCK == 0 and (group_of().size == 1 or num_elements < 160 * 256)
    assert num_elements >= 4096
    return model, make(model.parameters())


def trains_on_blocks(make: Make, dtype: torch.dtype = torch.float32) -> None:
    plain = network(dtype=dtype)
    model, optimizer = units_of_blocks(make, dtype=dtype)
    train_beside(plain, model, loss_of, (make(plain.parameters()), optimizer))


def trains_under_oss(cls: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> None:
    """With `OSS` over a sharded model, which gives each full parameter to one rank for the step."""
    plain, model = network(dtype=dtype), fully_shard(network(dtype=dtype))
    optimizers = cls(plain.parameters(), lr=0.01), OSS(model.parameters(), cls, lr=0.01)
    train_beside(plain, model, loss_of, optimizers)


def is_saved_and_goes_on(make: Make, folder: str, dtype: torch.dtype = torch.float32) -> None:
    """A snapshot goes into a model of other weights with a fresh optimizer, which then takes the same step."""
    trainings = [units_of_blocks(make, seed, dtype) for seed in (1, 2)]
    step_of = partial(_step, rank=group_of().rank)
    for number in range(STEPS):
        step_of(*trainings[0], number)
    scale_snapshot.save(folder, STEPS, dict(zip(("model", "optimizer"), trainings[0], strict=True)))
    scale_snapshot.load(folder, dict(zip(("model", "optimizer"), trainings[1], strict=True)))
    for training in trainings:
        step_of(*training, STEPS)
    (model, _), (loaded, _) = trainings
    weights = loaded.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def goes_on_from(make: Make, folder: str) -> dict[str, Tensor]:
    """The weights after one more step from a snapshot; at 1, 2 or 4 ranks, as each has the same batch, the same."""
    model, optimizer = units_of_blocks(make, seed=3)
    scale_snapshot.load(folder, {"model": model, "optimizer": optimizer})
    _step(model, optimizer, STEPS, rank=0)
    return dict(model.state_dict())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    loss_of(model, rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()
