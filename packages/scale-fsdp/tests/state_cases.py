"""What state is saved from and loaded into: one model that has all that is awkward, and many ways to shard it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn

from scale_core.comm.group import GroupLike
from scale_core.flat.layout import BlockAtom
from scale_core.shard import full_shape
from scale_fsdp import MixedPrecisionPolicy, fully_shard

TOKENS = torch.tensor([1, 2, 5, 3])


class Awkward(nn.Module):
    """Tied, prime-sized, scalar, empty, frozen and unused parameters, and buffers of both kinds."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 5))
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.full((2,), float(seed)))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator).to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)) * self.scale + self.nothing.sum()
        output: Tensor = self.head(self.frozen(hidden))
        return output


WRAPPINGS: dict[str, Sequence[str]] = {
    "root": [""],
    "units": ["embed", "body.0", "body", ""],
    "head first": ["head", "body", ""],
}
ATOMS = {"auto": "auto", "element": "element", "row": "row", "parameter": "parameter", "block": BlockAtom(3)}


HALF = MixedPrecisionPolicy(torch.float16, torch.float16)


@dataclass(frozen=True)
class Layout:
    """One way to shard the model."""

    world: int = 1
    wrapping: str = "root"
    atom: str = "auto"
    flatten: bool = False
    mixed: bool = False

    def shard(self, model: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        kwargs = {
            "atom": ATOMS[self.atom],
            "flatten_parameters": self.flatten,
            "mp_policy": HALF if self.mixed else None,
            **kwargs,
        }
        for name in WRAPPINGS[self.wrapping]:
            fully_shard(model.get_submodule(name), process_group, **shard_arguments(**kwargs))
        return model


def layouts(worlds: Iterable[int], seed: int) -> Iterator[Layout]:
    """Yields all layouts of these worlds in a random order, again and again; the same for the same seed."""
    choices = [Layout(*each) for each in itertools.product(worlds, WRAPPINGS, ATOMS, (False, True), (False, True))]
    while True:
        yield from random.Random(seed).sample(choices, len(choices))
        seed += 1


def two_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """What trains, in two groups: matrices, and the rest; also where one flat parameter holds both, as one group."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if any(name.rpartition(".")[2].startswith("flat_param") for name, _ in model.named_parameters()):
        return [{"params": trained, **options}]
    wide = [param for param in trained if len(full_shape(param)) >= 2]
    rest = [param for param in trained if len(full_shape(param)) < 2]
    return [{"params": wide, "weight_decay": 0.1, **options}, {"params": rest, "weight_decay": 0.0, **options}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Trains on the same tokens on every rank, so that any number of ranks computes the same numbers."""
    for _ in range(steps):
        model(TOKENS).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fill(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Overwrites an optimizer's full state, on a plain model, by random numbers: what is swapped then shows."""
    generator = torch.Generator().manual_seed(seed)
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor) and value.ndim:
                value.copy_(torch.randn(value.shape, generator=generator).abs())
