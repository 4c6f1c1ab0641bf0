"""A small model, cut between ranks by hand, whose sharded training equals the plain one's element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Shard, on_local_tensors, shard_of
from scale_core.sharded_tensor.tensor import set_shard


class Model(nn.Module):
    """Tied, odd-sized, scalar, empty and frozen parameters, and buffers of both kinds."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(7, hidden)
        self.inner = nn.Sequential(nn.Linear(hidden, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(hidden, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator))


@on_local_tensors
def cut(model: nn.Module, rank: int, size: int, *, leave_whole: tuple[str, ...] = ()) -> nn.Module:
    """Replaces each parameter by the elements that `rank` of `size` holds, wherever the cut falls."""
    group = Group(rank=rank, size=size)
    pieces: dict[Tensor, nn.Parameter] = {}
    names = {param: name for name, param in model.named_parameters()}
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is None or names.get(param) in leave_whole or shard_of(param) is not None:
                continue
            if param not in pieces:
                start, stop = (param.numel() * at // size for at in (rank, rank + 1))
                piece = nn.Parameter(param.detach().reshape(-1)[start:stop].clone(), param.requires_grad)
                shape = tuple(param.shape)
                set_shard(piece, Shard(names[param], shape, start, stop, (Axis(group, Placement.SHARD),)))
                pieces[param] = piece
            module._parameters[key] = pieces[param]
    return model


@on_local_tensors
def train(model: nn.Module, optimizer: Optimizer, num_steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on the step, the parameter and the element alone."""
    for step in range(first, first + num_steps):
        for number, param in enumerate(model.parameters()):
            if param.requires_grad:
                shard = shard_of(param)
                numel, start = (param.numel(), 0) if shard is None else (shard.numel, shard.start)
                whole = torch.linspace(-1, 1, numel, dtype=param.dtype).mul(1 + step).add(0.1 * number)
                param.grad = whole[start : start + param.numel()].clone().view(param.shape)
        optimizer.step()
    model.get_buffer("inner.1.running_mean").fill_(float(first + num_steps))


def adam(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, of which one has a hyperparameter of its own."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:]}]
    return torch.optim.AdamW(groups, lr=0.01)
