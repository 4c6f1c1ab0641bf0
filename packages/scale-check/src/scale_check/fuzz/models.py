"""Random models that plain PyTorch trains without a surprise, built of the blocks that sharding finds hard.

A model is described by a `ModelSpec`, which prints as the line of code that makes it. Every block takes and returns
[N, width], so that blocks follow each other in any order and nest in any depth; `pack` returns containers, and is
always followed by the block that takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 3
"""Of an input that is not made of words: tensors [N, FEATURES]."""
LENGTH = 3
"""Words of a sample: tensors [N, LENGTH]."""

Block = tuple[Any, ...]
"""The kind of a block and what belongs to it; blocks inside it stand in a tuple."""


@dataclass(frozen=True)
class ModelSpec:
    """What a model is made of.

    Attributes:
        dtype: Of its parameters and inputs, by the name that torch has for it.
        width: Of what passes between blocks.
        words: How many words its embedding has; 0 for inputs that are numbers.
        tied: Whether the last weight is the weight of the embedding.
        output: What it returns: "tensor", "tuple", "dict" or "dataclass".
        blocks: What stands between its first and its last layer.
    """

    dtype: str
    width: int
    words: int
    tied: bool
    output: str
    blocks: tuple[Block, ...]


class Boom(Exception):
    """Raised by a forward pass that is to fail."""


@dataclass
class Packed:
    """A container of a class of one's own."""

    first: Tensor
    rest: dict[str, Any]


class Linear(nn.Linear):
    """A square layer, whose weight `Tied` shares."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, width, bias)


class Tied(nn.Module):
    """A layer that uses the weight of an earlier one, transposed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Mlp(nn.Module):
    """What tensor parallelism divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(F.gelu(self.up(x)))
        return output


class Residual(nn.Module):
    """Blocks inside a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + 0.5 * self.inner(x)
        return output


class Again(Residual):
    """Blocks that are used twice in a pass."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(torch.tanh(self.inner(x)))
        return output


class Odd(nn.Module):
    """Parameters of shapes that cut badly: without dimensions, empty, strided, long and thin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.strided = nn.Parameter(torch.randn(width, 2).t().mul(0.3))
        self.thin = nn.Parameter(torch.randn(7, 1, 1).mul(0.3))
        self.one = nn.Parameter(torch.randn(1, width).mul(0.3))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x @ self.strided.t()) @ self.strided
        return x * self.scale + torch.tanh(mixed) + self.thin.mean() * self.one + self.nothing.sum()


class Unused(nn.Module):
    """A layer that no pass uses, and a parameter of a used one that none uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used, self.never = nn.Linear(width, width), nn.Linear(width, 2)
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Sometimes(nn.Module):
    """A layer that the data decide about, on each rank by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always, self.chosen = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.always(x))
        return y + self.chosen(x) if float(x.detach()[0, 0]) > 0.1 else y


class Branches(nn.Module):
    """Two layers whose results are added; the data decide which comes first, on each rank by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = Linear(width, True), Linear(width, True)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach()[0, 0]) > 0:
            left, right = self.left(x), self.right(x)
        else:
            right, left = self.right(x), self.left(x)
        return torch.tanh(left) + torch.sigmoid(right)


class EverySecond(nn.Module):
    """A layer that every second call uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += torch.is_grad_enabled()
        y = torch.tanh(self.always(x))
        return y if self.num_calls % 2 else y + self.second(x)


class Counting(nn.Module):
    """Buffers of its own: a count, a moving mean, and one that no state dict has."""

    count: Tensor
    mean: Tensor
    factor: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("factor", torch.full((1,), 0.9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        return (x - 0.1 * self.mean) * self.factor + self.bias


class Pack(nn.Module):
    """Returns a dict of a tuple, a dataclass, a list and values that aren't tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"pair": (y, None), "packed": Packed(torch.tanh(y), {"twice": [y * 2, "two"]}), "unused": x * 3}


class Unpack(nn.Module):
    """Takes what `Pack` returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: dict[str, Any]) -> Tensor:
        (y, _), packed = x["pair"], x["packed"]
        output: Tensor = y + packed.first * self.weight + 0.25 * packed.rest["twice"][0]
        return output


class InPlace(nn.Module):
    """Changes results in place, where autograd allows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += 1
        y.mul_(0.5)
        return F.relu(y, inplace=True) + x


class View(nn.Module):
    """Returns a view of what a layer returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).view(len(x), 2, -1)[:, 1]
        return output


class Gru(nn.Module):
    """A recurrent layer over two steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gru(torch.stack([x, x.flip(1)], 1))[0][:, -1]
        return output


class PairAttention(nn.Module):
    """torch's attention over two positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(2, width))
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        both = x[:, None] + self.place
        output: Tensor = self.attention(both, both, both, need_weights=False)[0].mean(1)
        return output


class OtherDtype(nn.Module):
    """A layer in another dtype than its model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.to(self.dtype)).to(x.dtype))


class Entry(nn.Module):
    """[N, LENGTH] words or [N, FEATURES] numbers to [N, width]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.layer = nn.Embedding(spec.words, spec.width) if spec.words else nn.Linear(FEATURES, spec.width)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.layer(batch)
        output: Tensor = x.mean(1) if x.dim() == 3 else x
        return output


class Exit(nn.Module):
    """[N, width] to what the model returns."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.output = spec.output
        self.head = nn.Linear(spec.width, spec.words or 2, bias=not spec.tied)

    def forward(self, x: Tensor) -> Any:
        y = self.head(x)
        if self.output == "tuple":
            return y, (torch.tanh(x), None)
        if self.output == "dict":
            return {"logits": y, "hidden": [torch.tanh(x)], "name": "dict"}
        if self.output == "dataclass":
            return Packed(y, {"hidden": torch.tanh(x), "count": 2})
        return y


class Net(nn.Module):
    """The model of a spec.

    Attributes:
        fails_at: The number of the block before which the forward pass raises; None for none.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.fails_at: int | None = None
        self.entry = Entry(spec)
        self.blocks = nn.ModuleList()
        for block in spec.blocks:
            self.blocks.append(self._made(block, spec.width))
        self.exit = Exit(spec)
        if spec.tied:
            self.exit.head.weight = self.entry.layer.weight

    def _made(self, block: Block, width: int) -> nn.Module:
        kind, *arguments = block
        if kind in NESTED:
            inner = nn.Sequential(*(self._made(part, width) for part in arguments[0]))
            nested: nn.Module = NESTED[kind](inner)
            return nested
        if kind == "frozen":
            return self._made(arguments[0], width).requires_grad_(False)
        if kind == "tied":
            linear = next((module for module in self.modules() if isinstance(module, Linear)), None)
            return Linear(width, False) if linear is None else Tied(cast(nn.Parameter, linear.weight))
        module: nn.Module = KINDS[kind](width, *arguments)
        return module

    def forward(self, batch: Tensor) -> Any:
        x = self.entry(batch)
        for number, block in enumerate(self.blocks):
            if number == self.fails_at:
                raise Boom
            x = block(x)
        return self.exit(x)


NESTED: dict[str, Any] = {"residual": Residual, "again": Again}
KINDS: dict[str, Any] = {
    "linear": Linear,
    "mlp": Mlp,
    "layernorm": nn.LayerNorm,
    "rmsnorm": nn.RMSNorm,
    "batchnorm": lambda width, momentum: nn.BatchNorm1d(width, momentum=momentum),
    "odd": Odd,
    "unused": Unused,
    "sometimes": Sometimes,
    "branches": Branches,
    "second": EverySecond,
    "counting": Counting,
    "pack": Pack,
    "unpack": Unpack,
    "inplace": InPlace,
    "view": View,
    "gru": Gru,
    "attention": PairAttention,
    "other": OtherDtype,
    "dropout": lambda width, p: nn.Dropout(p),
}
DTYPES = ("float64",) * 6 + ("float32",) * 3 + ("bfloat16",)
"""Dtypes of models, as often as they are drawn."""
OF_EACH_RANK = frozenset({"sometimes", "dropout", "batchnorm", "counting"})
"""Blocks that compute otherwise with a part of a batch: by random numbers, statistics, or what the data decide."""


def build(spec: ModelSpec, seed: int) -> Net:
    """The model of a spec, with the values that a seed gives."""
    torch.manual_seed(seed)
    net = Net(spec).to(getattr(torch, spec.dtype))
    for module in net.modules():
        if isinstance(module, OtherDtype):
            module.dtype = torch.float64 if spec.dtype == "float32" else torch.float32
            module.to(module.dtype)
    return net


def batch_of(spec: ModelSpec, num_samples: int, *numbers: int) -> Tensor:
    """A batch, [num_samples, LENGTH] or [num_samples, FEATURES], the same for the same numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1000003 + number + 1) % 2**31
    generator = torch.Generator().manual_seed(seed)
    if spec.words:
        return torch.randint(spec.words, (num_samples, LENGTH), generator=generator)
    return torch.randn(num_samples, FEATURES, generator=generator, dtype=torch.float64).to(getattr(torch, spec.dtype))


def loss_of(output: Any) -> Tensor:
    """A mean over the samples of all that a model returns."""
    terms = [(tensor - 0.5).square().mean() for tensor in tensors_of(output)]
    return torch.stack(terms).sum()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in what a model returns, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Packed):
        yield value.first
        yield from tensors_of(value.rest)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def random_model(
    random: Random,
    *,
    avoid: AbstractSet[str],
    num_blocks: int,
    dtypes: Sequence[str] = DTYPES,
) -> ModelSpec:
    """Draws a model.

    Args:
        random: What draws.
        avoid: Kinds of blocks that it is not to have; "tied" for any tied weight.
        num_blocks: How many blocks there are at least.
        dtypes: One of them is drawn.
    """
    words = random.choice([0, 0, 5, 11])
    blocks: list[Block] = []
    while len(blocks) < num_blocks:
        blocks += _random_blocks(random, avoid, depth=0)
    return ModelSpec(
        dtype=random.choice(dtypes),
        width=random.choice([3, 4, 5, 8]),
        words=words,
        tied=bool(words) and "tied" not in avoid and random.random() < 0.5,
        output=random.choice(["tensor", "tuple", "dict", "dataclass"]),
        blocks=tuple(blocks),
    )


def _random_blocks(random: Random, avoid: AbstractSet[str], depth: int) -> list[Block]:
    """One block, or two that belong together."""
    kinds = [
        candidate
        for candidate in (*KINDS, "linear", "mlp", "tied", "residual", "again", "frozen")
        if candidate not in avoid
    ]
    kind = random.choice([candidate for candidate in kinds if candidate != "unpack"])
    if kind == "pack":
        return [(kind,), ("unpack",)]
    if kind in NESTED:
        if depth == 2:
            return [("linear", True)]
        blocks = [block for _ in range(random.randint(1, 2)) for block in _random_blocks(random, avoid, depth + 1)]
        return [(kind, tuple(blocks))]
    if kind == "frozen":
        inner = [("linear", True), ("odd",), ("mlp", 6), ("layernorm",)]
        return [("frozen", random.choice([candidate for candidate in inner if candidate[0] not in avoid]))]
    if kind == "linear":
        return [(kind, random.random() < 0.7)]
    if kind == "mlp":
        return [(kind, random.choice([4, 6, 7]))]
    if kind == "batchnorm":
        return [(kind, random.choice([0.1, 0.3, None]))]
    if kind == "dropout":
        return [(kind, random.choice([0.1, 0.5]))]
    return [(kind,)]
