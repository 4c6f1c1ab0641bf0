"""Trains any model sharded and plain side by side, and tells where they differ.

The plain side is what `fsdp_cases` states: each rank's gradient computed alone, summed in rank order, divided by the
number of ranks, for each backward pass by itself. A parameter that only some ranks use counts as zeros on the others;
one that none uses has no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fsdp_cases import differing_grads, differing_weights
from torch import Tensor, nn

from scale_core.comm.group import GroupLike, group_of
from scale_fsdp import fully_shard

Step = Callable[[nn.Module, int, int], Iterable[Tensor]]


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same on every rank for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(plain: nn.Module, units: Sequence[str], process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
    """Returns a sharded copy, whose modules of these names are wrapped in this order; "" is the model itself."""
    model = copy.deepcopy(plain)
    for name in units:
        fully_shard(model.get_submodule(name), process_group, **kwargs)
    return model


@dataclass
class Beside:
    """A model beside its sharded copy.

    Attributes:
        units: The names of the modules to shard, in this order.
        step: Yields the losses of one step, given the model, the rank and the step's number; a backward follows each.
        before: Called with each model before each step, for what a user changes on the way.
        both: The optimizers to train with, one after the other.
    """

    plain: nn.Module
    units: Sequence[str]
    step: Step
    before: Callable[[nn.Module, int], None] = lambda model, step: None
    steps: int = 4
    both: Sequence[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = (adam, sgd)
    process_group: GroupLike = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def differences(self) -> list[str]:
        """Trains; returns what differs on this rank. All ranks call it together."""
        for make in self.both:
            wrong = self._train(make)
            if wrong:
                return [f"{make.__name__}: {line}" for line in wrong]
        return []

    def _train(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> list[str]:
        group = group_of(self.process_group)
        plain = copy.deepcopy(self.plain)
        model = sharded(plain, self.units, self.process_group, **self.kwargs)
        optimizers = [make(p for p in each.parameters() if p.is_floating_point()) for each in (model, plain)]
        for number in range(self.steps):
            for each in (model, plain):
                self.before(each, number)
            expected = self._reference(plain, group.size, number)[group.rank]
            losses = []
            for loss in self.step(model, group.rank, number):
                loss.backward()
                losses.append(loss.item())
            wrong = differing_grads(model, plain)
            if losses != expected:
                wrong.append(f"losses {losses} instead of {expected}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            wrong += differing_weights(model, plain)
            if wrong:
                return [f"rank {group.rank} of {group.size}, step {number}: {line}" for line in wrong]
        return []

    def _reference(self, plain: nn.Module, world: int, number: int) -> list[list[float]]:
        """Puts the mean gradient into `plain`; returns the losses by rank."""
        passes = [list(self._alone(plain, rank, number)) for rank in range(world)]
        for index, param in enumerate(plain.parameters()):
            param.grad = None
            for of_all_ranks in zip(*passes, strict=True):
                grads = [grads[index] for _, grads in of_all_ranks]
                if any(grad is not None for grad in grads):
                    mean = torch.zeros_like(param)
                    for grad in grads:
                        mean += 0 if grad is None else grad
                    mean /= world
                    param.grad = mean if param.grad is None else param.grad + mean
        return [[loss for loss, _ in of_rank] for of_rank in passes]

    def _alone(self, plain: nn.Module, rank: int, number: int) -> Iterator[tuple[float, list[Tensor | None]]]:
        """Yields the loss and the gradients of each backward pass of one rank."""
        replica = copy.deepcopy(plain)
        for loss in self.step(replica, rank, number):
            loss.backward()
            yield loss.item(), [param.grad for param in replica.parameters()]
            replica.zero_grad()


def mean_square(*shape: int) -> Step:
    """The step that runs a model once on noise of this shape."""

    def step(model: nn.Module, rank: int, number: int) -> Iterable[Tensor]:
        yield model(noise(*shape, seed=100 * number + rank)).square().mean()

    return step
