"""The models that data parallel engines are compared on, and the engines: all train the same numbers.

Each engine is a function from a plain model to one that averages its gradients over the ranks; the optimizer is
fused Adam on whatever that model calls its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import scale_fsdp

VOCABULARY = 256


class Block(nn.Module):
    """One pre-norm transformer block, [B, T, d] -> [B, T, d]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.feed(self.feed_norm(x))
        return y


class GPT(nn.Module):
    """A byte-level GPT that returns its loss."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    """Square linear layers and their loss: as little computation per parameter as there can be."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        for layer in self.blocks:
            x = F.relu(layer(x))
        return F.mse_loss(x, targets)


@dataclass(frozen=True)
class Row:
    """One model with its batches.

    Attributes:
        title: The model in words.
        build: Makes the model; its `blocks` are the units.
        batch: Makes inputs and targets from a generator.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def _text(batch: int, length: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return make


def _vectors(batch: int, width: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)

    return make


ROWS = {
    "gpt": Row("GPT 6x512, batch 2x128", lambda: GPT(6, 512, 8, 128), _text(2, 128)),
    "mlp": Row("MLP 4x(3584x3584), batch 4", lambda: MLP(4, 3584), _vectors(4, 3584)),
    "tiny": Row("GPT 2x64, batch 2x32", lambda: GPT(2, 64, 2, 32), _text(2, 32)),
}


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def ddp_views(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    blocks: Sequence[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    policy = ModuleWrapPolicy({type(block) for block in blocks})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _scale(reshard: bool, flatten: bool = False) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            scale_fsdp.fully_shard(block, reshard_after_forward=reshard, flatten_parameters=flatten)
        return scale_fsdp.fully_shard(model, reshard_after_forward=reshard, flatten_parameters=flatten)

    return shard


@dataclass(frozen=True)
class Engine:
    """One way to train a model on several ranks."""

    title: str
    shard: Callable[[nn.Module], nn.Module]
    by_default: bool = True


ENGINES = {
    "ddp": Engine("torch DDP", ddp),
    "ddp-views": Engine("torch DDP, gradients as bucket views", ddp_views, by_default=False),
    "fsdp1": Engine("torch FSDP1, per block", fsdp1),
    "fsdp2": Engine("torch FSDP2, per block", fsdp2),
    "scale": Engine("scale-fsdp, reshard", _scale(reshard=True)),
    "scale-keep": Engine("scale-fsdp, no reshard", _scale(reshard=False)),
    "scale-flat": Engine("scale-fsdp, reshard, flat", _scale(True, flatten=True), by_default=False),
    "scale-keep-flat": Engine("scale-fsdp, no reshard, flat", _scale(False, flatten=True), by_default=False),
}
REFERENCE = "ddp"
