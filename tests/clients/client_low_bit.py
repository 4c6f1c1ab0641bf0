"""Optimizers whose state is quantized block by block, over shards that are cut between blocks, beside one process.

Both libraries quantize tensors from 4096 elements on, in blocks of 256, so every shard here is at least that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from scale_core import BlockAtom, snapshot
from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import fully_shard
from scale_oss import OSS

BLOCK = 256
STEPS = 3

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    wide, narrow = nn.Linear(160, 256, bias=False), nn.Linear(256, 18, bias=False)  # The first is cut, however packed.
    return nn.Sequential(wide, nn.Tanh(), narrow, nn.Tanh(), nn.Linear(18, 7))


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    """The loss of one rank in one step, a scalar."""
    data = torch.randn(4, 160, generator=torch.Generator().manual_seed(10 * number + rank))
    result: Tensor = model(data.to(next(model.parameters()).dtype)).square().mean()
    return result


def step_beside(plain: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The step of all ranks' mean gradient on one process."""
    group, summands = group_of(), []
    for rank in range(group.size):
        plain.zero_grad()
        loss_of(plain, rank, number).backward()
        summands.append([param.grad for param in plain.parameters()])
    for param, grads in zip(plain.parameters(), zip(*summands, strict=True), strict=True):
        param.grad = torch.stack(grads).sum(0) / group.size
    optimizer.step()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, group_of().rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def differing(model: nn.Module, plain: nn.Module) -> list[str]:
    ours = model.state_dict()
    return [name for name, weight in plain.state_dict().items() if not torch.equal(ours[name], weight)]


def units_of_blocks(
    make: Make, seed: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A unit whose parameters are cut between blocks, and an optimizer on its shards."""
    model = fully_shard(network(seed).to(dtype), atom=BlockAtom(BLOCK))
    first = next(model.parameters())
    shard, num_elements = shard_of(first), local_tensor(first).numel()
    assert shard is not None and shard.start % BLOCK == 0 and (group_of().size == 1 or num_elements < 160 * 256)
    assert num_elements >= 4096
    return model, make(model.parameters())


def trains_on_blocks(make: Make, dtype: torch.dtype = torch.float32) -> list[str]:
    """Whatever is not as on one process, to the bit."""
    plain = network().to(dtype)
    model, optimizer = units_of_blocks(make, dtype=dtype)
    theirs = make(plain.parameters())
    for number in range(STEPS):
        step_beside(plain, theirs, number)
        step(model, optimizer, number)
    return differing(model, plain)


def trains_under_oss(cls: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> list[str]:
    """The same with `OSS` over a sharded model, which gives each full parameter to one rank for the step."""
    plain, model = network().to(dtype), fully_shard(network().to(dtype))
    optimizer = OSS(model.parameters(), cls, lr=0.01)
    theirs = cls(plain.parameters(), lr=0.01)
    for number in range(STEPS):
        step_beside(plain, theirs, number)
        step(model, optimizer, number)
    return differing(model, plain)


def is_saved_and_goes_on(make: Make, folder: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """A snapshot goes into a model of other weights with a fresh optimizer, which then takes the same step."""
    model, optimizer = units_of_blocks(make, dtype=dtype)
    for number in range(STEPS):
        step(model, optimizer, number)
    snapshot.save(folder, STEPS, {"model": model, "optimizer": optimizer})
    again, its_optimizer = units_of_blocks(make, seed=2, dtype=dtype)
    snapshot.load(folder, {"model": again, "optimizer": its_optimizer})
    for each, of_each in ((model, optimizer), (again, its_optimizer)):
        step(each, of_each, STEPS)
    return differing(again, model)


def goes_on_from(make: Make, folder: str) -> dict[str, Tensor]:
    """The weights after one more step from a snapshot; at 1, 2 or 4 ranks, as each has the same batch, the same."""
    model, optimizer = units_of_blocks(make, seed=3)
    snapshot.load(folder, {"model": model, "optimizer": optimizer})
    loss_of(model, 0, STEPS).backward()
    optimizer.step()
    return dict(model.state_dict())
