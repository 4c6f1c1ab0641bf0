"""Losses of what a unit keeps and does not return, and of objects that torch does not know: as in the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_fsdp import fully_shard


class Bag:
    """An object of the user's own, which holds tensors."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class BagBlock(nn.Module):
    """Is recomputed as a whole in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, bag: Bag) -> Bag:
        output: Bag = checkpoint(self.compute, bag, use_reentrant=False)
        return output

    def compute(self, bag: Bag) -> Bag:
        return Bag(bag.hidden + self.second(torch.tanh(self.first(bag.hidden))))


class BagNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 4), nn.ModuleList([BagBlock(), BagBlock()])

    def forward(self, x: Tensor) -> Bag:
        bag = Bag(self.embed(x))
        for block in self.blocks:
            bag = block(bag)
        return bag


def train(plain: nn.Module, model: nn.Module, loss_of: Callable[[nn.Module, Any, int], Tensor]) -> None:
    """Three steps of both, each on two micro-batches; the sharded one has a half of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, model)]
    for step in range(3):
        for _ in range(2):
            batch = torch.randn(2 * world, 4, dtype=torch.float64)
            loss_of(plain, plain(batch), step).backward()
            loss_of(model, model(batch.chunk(world)[rank]), step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = model.state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(full[name], expected, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_loss_of_what_a_unit_keeps_trains_as_plain() -> None:
    def features_of(module: nn.Module) -> list[Tensor]:
        """A list that a hook on an inner layer fills, as for a perceptual loss."""
        features: list[Tensor] = []

        def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            features[:] = [output]

        module.register_forward_hook(keep)
        return features

    class Block(nn.Module):
        """Keeps a result in an attribute, in a list, and lets hooks see it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
            self.history: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.norm(torch.tanh(self.first(x)))
            self.history[:] = [self.kept * 2]
            output: Tensor = self.second(self.kept)
            return output

    features: dict[nn.Module, list[Tensor]] = {}
    losses: list[Callable[[Any, Tensor, int], Tensor]] = [
        lambda module, output, step: module[2].kept.square().mean(),
        lambda module, output, step: module[1].kept.square().mean(),
        lambda module, output, step: module[1].history[0].square().mean(),
        lambda module, output, step: module[1].kept.square().mean() + module[2].kept.mean(),
        lambda module, output, step: features[module][0].square().mean(),
        lambda module, output, step: (output if step == 1 else module[1].kept).square().mean(),
    ]
    for loss_of in losses:
        for reshard in (True, None, False):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(4, 4), Block(), Block()).double()
            model = copy.deepcopy(plain)
            for module in (plain, model):
                features[module] = features_of(module[1].norm)
            for block in model[1:]:
                fully_shard(block, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            train(plain, model, loss_of)


@pytest.mark.ranks(2)
def test_a_recomputed_unit_may_return_an_unknown_class() -> None:
    for units in (["0", "1", ""], ["0"], [""]):
        torch.manual_seed(0)
        plain = BagNet().double()
        model = copy.deepcopy(plain)
        for unit in units:
            fully_shard(model.blocks[int(unit)] if unit else model, reshard_after_forward=True)
        if "" not in units:
            fully_shard(model)
        train(plain, model, lambda module, bag, step: bag.hidden.square().mean())


@pytest.mark.ranks(2)
def test_a_recomputed_unit_sees_that_its_weights_changed() -> None:
    model = BagNet()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    loss = model(torch.ones(1, 4)).hidden.sum()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    with pytest.raises(RuntimeError, match="were changed between its forward and its backward"):
        loss.backward()


def test_a_view_whose_history_torch_refuses_is_passed_over() -> None:
    """In the program of the user, anywhere: all tensors that are alive are searched."""
    table = torch.ones(2)
    with torch.no_grad():
        row = table[:1]
    table.mul_(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        _ = row.grad_fn
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
