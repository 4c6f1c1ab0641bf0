"""Parameters beside their shards, and optimizers for them, that the tests of scale-oss share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.comm.group import Group, group_of
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import ShardGroups
from scale_core.flat.layout import FlatLayout
from scale_core.shard import on_local_tensors, shard_of
from scale_core.state.param_ownership import register_flat_param

Shapes = Mapping[str, tuple[int, ...]]

# Prime sizes, so that cuts fall inside of tensors; a scalar, a tensor without elements, and larger ones.
SHAPES: Shapes = {
    "embed": (11, 6),
    "up": (13, 5),
    "bias": (13,),
    "scale": (),
    "none": (0, 3),
    "mix": (2, 3, 3),
    "down": (5, 13),
}
MATRICES: Shapes = {"first": (7, 5), "second": (5, 11), "third": (3, 3), "fourth": (11, 2), "fifth": (2, 2)}


class Lamb(Optimizer):
    """Layer-wise adaptive rates (arXiv 1904.00962), which need each tensor's norm; it counts steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        state, (slow, fast) = self.state[param], group["betas"]
        state.setdefault("moments", [torch.zeros_like(param), torch.zeros_like(param)])
        first, second = state["moments"]
        first.lerp_(param.grad, 1 - slow)
        second.mul_(fast).addcmul_(param.grad, param.grad, value=1 - fast)
        update = (first / (1 - slow ** group["count"])) / (second / (1 - fast ** group["count"])).sqrt().add(1e-6)
        trust = param.norm() / update.norm().clamp(min=1e-6)
        state["trust"] = trust.clone()
        param.sub_(update * trust * group["lr"])


class Distance(Optimizer):
    """One step size for all tensors, estimated from all gradients (as arXiv 2301.07733 does), in its groups."""

    def __init__(self, params: Any, lr: float = 1.0, d: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "d": d, "history": torch.zeros(2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.square().sum() for param in params]).sum().sqrt().item()
        for group in self.param_groups:
            group["d"] = 0.5 * group["d"] + 0.01 * norm
            group["history"] = torch.tensor([norm, group["d"]])
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param].setdefault("total", torch.zeros_like(param))
                    param.sub_(total.add_(param.grad), alpha=group["lr"] * group["d"])


ELEMENTWISE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}
WHOLE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "lamb": (Lamb, {}),
}
if hasattr(torch.optim, "Muon"):
    WHOLE["muon"] = (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1})


def shapes_for(optimizer: str) -> Shapes:
    """What it can train: Muon takes matrices only, and the relative steps of Adafactor and LAMB need elements."""
    if optimizer == "muon":
        return MATRICES
    return {name: shape for name, shape in SHAPES.items() if optimizer in ELEMENTWISE or math.prod(shape)}


def plain_params(shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Parameters with values that depend on the name's place alone."""
    generator = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def model_of(params: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that has these parameters."""
    model = nn.Module()
    for name, param in params.items():
        model.register_parameter(name, param)
    return model


class Shards:
    """The same parameters in pieces, as `fully_shard` shows them: two units, neighbors together.

    Attributes:
        params: This rank's pieces by name.
    """

    def __init__(
        self,
        plain: Mapping[str, nn.Parameter],
        group: Group | None = None,
        *,
        replicas: Group | None = None,
        atom: Any = "auto",
        flatten: bool = False,
    ) -> None:
        self.group = group_of() if group is None else group
        names = list(plain)
        self.units: list[FlatBuffer] = []
        for members in (names[: len(names) // 2], names[len(names) // 2 :]):
            layout = FlatLayout.plan(members, [tuple(plain[n].shape) for n in members], self.group.size, atom)
            groups = ShardGroups(self.group, replicas or Group())
            self.units.append(FlatBuffer(members, [plain[n] for n in members], layout, groups, flatten=flatten))
            if flatten:
                register_flat_param(self.units[-1])
        named = [zip(unit.names, unit.sharded_params, strict=not flatten) for unit in self.units]
        self.params = {name: param for unit in named for name, param in unit}

    def wholes(self) -> dict[str, Tensor]:
        """Every parameter whole; all ranks call it together."""
        return {
            name: whole.clone()
            for unit in self.units
            for name, whole in zip(unit.names, unit.gather_full_params(), strict=True)
        }


def noise(step: int, number: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient, which is the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


@on_local_tensors
def give_gradients(params: Iterable[nn.Parameter], step: int, without: Sequence[int] = ()) -> None:
    """Gives each parameter its averaged gradient: all of it, or a shard's part. `without`: numbers that get none."""
    for number, param in enumerate(params):
        param.grad = None
        if param.requires_grad and number not in without:
            shard = shard_of(param)
            if shard is None:
                param.grad = noise(step, number, param.shape, param.dtype)
            else:
                whole = noise(step, number, shard.shape, param.dtype)
                param.grad = whole.reshape(-1)[shard.start : shard.stop].view(param.shape).clone()


def train(optimizer: Any, params: Iterable[nn.Parameter], steps: Iterable[int], without: Sequence[int] = ()) -> None:
    """Steps with gradients that depend on the step alone."""
    listed = list(params)
    for step in steps:
        give_gradients(listed, step, without)
        optimizer.step()
        optimizer.zero_grad()
