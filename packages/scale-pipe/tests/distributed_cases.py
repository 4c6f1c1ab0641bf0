"""What pipelines over ranks are compared with: the plain model on one process, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_pipe import DistributedPipe, Schedule
from scale_pipe.schedules.action import Kind

mse = nn.functional.mse_loss
Parts = Sequence[tuple[Any, Any]]


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


def micro_batches(x: Tensor, target: Tensor, chunks: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Inputs and target of each micro-batch."""
    return list(zip(x.chunk(chunks), target.chunk(chunks), strict=True))


def turns(schedule: Schedule) -> dict[int, list[int]]:
    """By stage, its micro-batches in the order in which the gradients of its parameters are computed."""
    orders: dict[int, list[int]] = {}
    for actions in schedule.actions:
        for action in actions:
            if action.kind in (Kind.WEIGHT_GRADIENT, Kind.BACKWARD):
                orders.setdefault(action.stage, []).append(action.micro_batch)
    return orders


def order_in(pipe: DistributedPipe) -> Callable[[str], Sequence[int]]:
    """The order in which a pipeline adds up the gradients of a parameter on this rank; none of those elsewhere."""
    orders = turns(pipe.schedule)
    stages = {
        name.removeprefix("module."): index
        for index, stage in pipe.stages.items()
        for name, _ in stage.named_parameters()
    }
    return lambda name: orders[stages[name]] if name in stages else ()


class Plain:
    """The plain model on this process alone, which adds up gradients of micro-batches in the order of a pipeline.

    Args:
        model: The plain model.
        order: A pipeline, or by the name of a parameter its micro-batches in the order of their sums.
    """

    def __init__(self, model: nn.Module, order: DistributedPipe | Callable[[str], Sequence[int]]) -> None:
        self.model = model
        self.order_of = order_in(order) if isinstance(order, DistributedPipe) else order
        self.grads: dict[str, Tensor] = {}

    def step(
        self,
        parts: Parts,
        loss_fn: Callable[[Any, Any], Tensor] = mse,
        call: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the mean loss; gradients are added to `grads`.

        Args:
            parts: Inputs and target of each micro-batch.
            loss_fn: Of one micro-batch.
            call: Of the model, where it is not called with the inputs alone.
            sizes: Samples of each micro-batch, where the inputs are no tensor.
        """
        sizes = sizes or [len(x) for x, _ in parts]
        names, params = zip(*((n, p) for n, p in self.model.named_parameters() if p.requires_grad), strict=True)
        grads, total = [], torch.zeros(())
        for (x, target), size in zip(parts, sizes, strict=True):
            loss = loss_fn(call(self.model, x), target) * (size / sum(sizes))
            grads.append(dict(zip(names, torch.autograd.grad(loss, params, allow_unused=True), strict=True)))
            total = total + loss.detach()
        for name in names:
            for number in self.order_of(name):
                part = grads[number][name] if number < len(parts) else None
                if part is not None:
                    self.grads[name] = part.clone() if name not in self.grads else self.grads[name].add_(part)
        return total

    def step_with(self, pipe: DistributedPipe, x: Tensor, target: Tensor) -> None:
        """A step of both, which have the same loss and gradients."""
        expected = self.step(micro_batches(x, target, pipe.chunks))
        assert_equal(pipe.step(x, target=target, loss_fn=mse), expected)
        check_grads(pipe, self.grads)


def assert_equal(actual: object, expected: object, name: object = "") -> None:
    """Tensors, or trees of them, are equal to the bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda why: f"{name}: {why}")


def assert_near(actual: object, expected: object, name: object = "") -> None:
    """Tensors in float64, or trees of them, differ by rounding alone."""
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda why: f"{name}: {why}"
    )


def check_grads(
    pipe: DistributedPipe, grads: Mapping[str, Tensor], compare: Callable[..., None] = assert_equal
) -> None:
    """The gradients of the parameters on this rank are these, to the bit by default; a missing one is None there."""
    for name, param in pipe.named_parameters():
        compare(param.grad, grads.get(name), name)
