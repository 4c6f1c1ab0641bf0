"""What the tests of scale-adascale share: plain references with all local gradients, and small models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from scale_adascale import AdaScale
from scale_adascale.estimates import Average
from scale_adascale.gain import Moments, bounded, gain, moments


def net(width: int = 5) -> nn.Sequential:
    """A small model of prime sizes, alike on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def noise(*shape: int, seed: int) -> Tensor:
    """Numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int, width: int = 5) -> Tensor:
    """The loss of one micro-batch of four samples."""
    batch = noise(4, width, seed=seed)
    return (model(batch) - noise(4, 3, seed=seed + 1000) - 1.5).square().mean()


def gradients_of(model: nn.Module, params: Sequence[Tensor], seeds: Sequence[int]) -> list[list[Tensor]]:
    """For each micro-batch the gradients of these parameters, fp64, each computed alone."""
    found = []
    for seed in seeds:
        grads = torch.autograd.grad(loss_of(model, seed), params, allow_unused=True)
        zeros = (torch.zeros_like(param) for param in params)
        found.append([(z if g is None else g).double() for g, z in zip(grads, zeros, strict=True)])
    return found


def plain_moments(gradients: Sequence[Sequence[Tensor]], scale: float, divisors: Sequence[float] = ()) -> Moments:
    """The moments, computed from all local gradients of one group of parameters.

    Args:
        gradients: By micro-batch and parameter.
        scale: S.
        divisors: What the gradients of each parameter are divided by; none if empty.
    """
    divide = list(divisors) or [1.0] * len(gradients[0])
    rows = torch.stack(
        [torch.cat([(g / d).reshape(-1) for g, d in zip(row, divide, strict=True)]) for row in gradients]
    )
    return moments(rows.square().sum().item(), rows.mean(0).square().sum().item(), len(rows), scale)


def plain_gain(gradients: Sequence[Sequence[Tensor]], scale: float) -> float:
    """The gain of one step, of gradients as in `plain_moments`."""
    return gain(bounded(plain_moments(gradients, scale)), scale)


class Plain:
    """AdaScale on one process that knows every local gradient: the reference for all that is sharded.

    Args:
        model: The plain model.
        kind: "sgd", or "adam".
        scale: S, and the number of micro-batches of a step.
        lr: The learning rate.
        preconditioned: Gradients are divided by the root of Adam's mean second moment of their tensor.
        one_group: All parameters in one group; otherwise the first layer's, and the others.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        scale: float,
        lr: float,
        *,
        preconditioned: bool = False,
        one_group: bool = False,
    ) -> None:
        self.model, self.scale, self.lr = model, scale, lr
        self._preconditioned, self._one_group = preconditioned, one_group
        self.smoothing = 1 - scale / 1000
        groups = self.groups_of(model)
        self.optimizer = (torch.optim.Adam if kind == "adam" else torch.optim.SGD)(groups, lr=lr)
        self.power = 0.5 if kind == "adam" else 1.0
        self.averages = [Average() for _ in groups]

    def groups_of(self, model: nn.Module) -> list[dict[str, list[Tensor]]]:
        """Parameter groups: the first two parameters, and the others."""
        params = list(model.parameters())
        return [{"params": params}] if self._one_group else [{"params": params[:2]}, {"params": params[2:]}]

    def step(self, seeds: Sequence[int]) -> list[float]:
        """Takes one step with these micro-batches; returns the gain of each group."""
        gains = []
        knows = self._preconditioned and bool(self.optimizer.state)
        if knows and not getattr(self, "_has_begun", False):
            self.averages, self._has_begun = [Average() for _ in self.averages], True
        for number, group in enumerate(self.optimizer.param_groups):
            gradients = gradients_of(self.model, group["params"], seeds)
            divide = [self._divisor(param, group) for param in group["params"]] if knows else []
            new = bounded(plain_moments(gradients, self.scale, divide))
            self.averages[number] = self.averages[number].updated(new, self.smoothing, debias=True)
            gains.append(gain(self.averages[number].moments, self.scale))
            for index, param in enumerate(group["params"]):
                param.grad = torch.stack([row[index] for row in gradients]).mean(0).to(param.dtype)
        for group, factor in zip(self.optimizer.param_groups, gains, strict=True):
            group["lr"] = self.lr * factor**self.power
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gains

    def _divisor(self, param: Tensor, group: dict[str, object]) -> float:
        state = self.optimizer.state[param]
        mean = state["exp_avg_sq"].double().mean() / (1 - 0.999 ** state["step"].double())
        return float(mean.sqrt() + 1e-8)


class Fails(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on its way")


def backward(model: nn.Module, *samples: list[float], divisor: float = 1.0) -> None:
    """One backward pass for each sample, of the sum of the outputs."""
    for sample in samples:
        (model(torch.tensor(sample)).sum() / divisor).backward()


def linear(bias: bool = False) -> nn.Linear:
    """Two by two."""
    return nn.Linear(2, 2, bias=bias)


def two_steps(**kwargs: Any) -> AdaScale:
    """With two gradients to a step."""
    return AdaScale(SGD(linear().parameters(), lr=0.1), num_gradients_to_accumulate=2, **kwargs)


def build(
    num: int = 2, *, model: Any = None, kind: type[Optimizer] = SGD, lr: float = 0.1, **options: Any
) -> tuple[Any, AdaScale]:
    """A model, `net()` if none is given, and AdaScale around its optimizer, with `num` gradients to a step."""
    model = net() if model is None else model
    return model, AdaScale(kind(model.parameters(), lr=lr), num_gradients_to_accumulate=num, **options)


def run_passes(model: nn.Module, seeds: Sequence[int], scaler: GradScaler | None = None) -> None:
    """One backward pass for each micro-batch, of its part of the mean of their losses."""
    for seed in seeds:
        loss = loss_of(model, seed) / len(seeds)
        (loss if scaler is None else scaler.scale(loss)).backward()


def assert_gain(optimizer: AdaScale, seeds: Sequence[int], layers: slice = slice(None)) -> None:
    """Compares the gain with the one of these micro-batches' gradients by layers of `net()`, each computed alone."""
    plain = net()
    gradients = gradients_of(plain, list(plain[layers].parameters()), seeds)
    assert optimizer.gain() == pytest.approx(plain_gain(gradients, optimizer.scale), rel=1e-6)


def assert_gain_of_passes(model: nn.Module, optimizer: AdaScale, seeds: Sequence[int]) -> None:
    """Runs these passes and compares the gain, whatever was before."""
    run_passes(model, seeds)
    assert_gain(optimizer, seeds)
