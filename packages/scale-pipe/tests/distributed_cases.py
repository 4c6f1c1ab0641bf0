"""What pipelines over ranks are compared with: the plain model on one process, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_pipe import DistributedPipe, Kind, Schedule

mse = nn.functional.mse_loss


def mlp(num_blocks: int = 4, width: int = 8, seed: int = 0) -> nn.Sequential:
    """A sequence of 3 * num_blocks layers, [N, width] to the same; each block begins in place."""
    torch.manual_seed(seed)
    blocks = (
        (nn.LeakyReLU(0.1, inplace=True) if index else nn.Identity(), nn.Linear(width, width), nn.LayerNorm(width))
        for index in range(num_blocks)
    )
    return nn.Sequential(*(layer for block in blocks for layer in block))


def batch(samples: int = 8, width: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [samples, width] each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, width, generator=generator), torch.randn(samples, width, generator=generator)


def turns(schedule: Schedule) -> dict[int, list[int]]:
    """By stage, its micro-batches in the order in which the gradients of its parameters are computed."""
    found: dict[int, list[int]] = {}
    for actions in schedule.actions:
        for action in actions:
            if action.kind in (Kind.WEIGHT_GRADIENT, Kind.BACKWARD):
                found.setdefault(action.stage, []).append(action.micro_batch)
    return found


class Plain:
    """The plain model; gradients are added up in any order of micro-batches, parameter by parameter.

    Args:
        model: On this process alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.grads: dict[str, Tensor] = {}

    def step(
        self,
        parts: Sequence[tuple[Any, Any]],
        loss_fn: Callable[[Any, Any], Tensor],
        order_of: Callable[[str], Sequence[int]],
        call: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the mean loss; gradients are added to `grads`.

        Args:
            parts: Inputs and target of each micro-batch.
            loss_fn: Of one micro-batch.
            order_of: By the name of a parameter, its micro-batches in the order of their sums.
            call: Of the model, where it is not called with the inputs alone.
            sizes: Samples of each micro-batch, where the inputs are no tensor.
        """
        sizes = sizes or [len(x) for x, _ in parts]
        names, params = zip(*((n, p) for n, p in self.model.named_parameters() if p.requires_grad), strict=True)
        found, total = [], None
        for (x, target), size in zip(parts, sizes, strict=True):
            loss = loss_fn(call(self.model, x), target) * (size / sum(sizes))
            found.append(dict(zip(names, torch.autograd.grad(loss, params, allow_unused=True), strict=True)))
            total = loss.detach() if total is None else total + loss.detach()
        for name in names:
            for number in order_of(name):
                part = found[number][name] if number < len(parts) else None
                if part is not None:
                    self.grads[name] = part.clone() if name not in self.grads else self.grads[name].add_(part)
        assert total is not None
        return total


def micro_batches(x: Tensor, target: Tensor, chunks: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Inputs and target of each micro-batch."""
    return list(zip(x.chunk(chunks), target.chunk(chunks), strict=True))


def step_beside(pipe: DistributedPipe, plain: Plain, x: Tensor, target: Tensor) -> list[str]:
    """A step of both, in the pipeline's order of sums; returns what differs, to the bit."""
    expected = plain.step(micro_batches(x, target, pipe.chunks), mse, order_in(pipe))
    loss = pipe.step(x, target=target, loss_fn=mse)
    return differences(pipe, plain.grads) + [f"loss {loss} and {expected}"] * (not torch.equal(loss, expected))


def stage_names(pipe: DistributedPipe) -> dict[str, int]:
    """By the plain name of each parameter on this rank, its stage."""
    return {name: index for index, stage in pipe.stages.items() for name, _ in stage.named_parameters()}


def differences(pipe: DistributedPipe, grads: Mapping[str, Tensor]) -> list[str]:
    """The names of parameters on this rank whose gradients are not these, to the bit."""
    wrong = []
    for name, param in pipe.named_parameters():
        expected = grads.get(name)
        if (param.grad is None) != (expected is None):
            wrong.append(f"{name}: {param.grad} and {expected}")
        elif param.grad is not None and expected is not None and not torch.equal(param.grad, expected):
            wrong.append(f"{name}: off by {(param.grad - expected).abs().max():.3g}")
    return wrong


def order_in(pipe: DistributedPipe) -> Callable[[str], Sequence[int]]:
    """The order in which a pipeline adds up the gradients of a parameter on this rank."""
    stages, orders = stage_names(pipe), turns(pipe.schedule)
    return lambda name: orders[stages[name]] if name in stages else ()
