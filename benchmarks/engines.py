"""The models that data parallel engines are compared on, and the engines: all train the same numbers.

Each engine makes of a plain model one that averages its gradients over the ranks, and its optimizer: fused Adam, unless
its title says otherwise, on whatever that model calls its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import scale_fsdp
import scale_oss
from scale_fsdp import ShardOptions

VOCABULARY = 256
LEARNING_RATE = 1e-3


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
            scale_fsdp.fully_shard(
                block, reshard_after_forward=reshard, options=ShardOptions(flatten_parameters=flatten)
            )
        return scale_fsdp.fully_shard(
            model, reshard_after_forward=reshard, options=ShardOptions(flatten_parameters=flatten)
        )

    return shard


def fused_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)


def default_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def zero_redundancy_adam(model: nn.Module) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=LEARNING_RATE, fused=True)


def _oss(model: nn.Module, *, fused: bool = True) -> scale_oss.OSS:
    return scale_oss.OSS(model.parameters(), torch.optim.Adam, lr=LEARNING_RATE, fused=fused)


def oss_with_ddp(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = _oss(model)
    return ddp(model), optimizer


def default_oss_with_ddp(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = _oss(model, fused=False)
    return ddp(model), optimizer


def oss_with_sharded_ddp(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = _oss(model)
    return scale_oss.ShardedDataParallel(model, optimizer), optimizer


@dataclass(frozen=True)
class Engine:
    """One way to train a model on several ranks."""

    title: str
    start: Callable[[nn.Module], tuple[nn.Module, Optimizer]]
    by_default: bool = True


def _engine(
    title: str,
    shard: Callable[[nn.Module], nn.Module],
    optimize: Callable[[nn.Module], Optimizer] = fused_adam,
    *,
    by_default: bool = True,
) -> Engine:
    def start(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        sharded = shard(model)
        return sharded, optimize(sharded)

    return Engine(title, start, by_default)


ENGINES = {
    "ddp": _engine("torch DDP", ddp),
    "ddp-views": _engine("torch DDP, gradients as bucket views", ddp_views, by_default=False),
    "ddp-default": _engine("torch DDP, Adam as torch builds it", ddp, default_adam, by_default=False),
    "zero": _engine("torch DDP + ZeroRedundancyOptimizer", ddp, zero_redundancy_adam),
    "fsdp1": _engine("torch FSDP1, per block", fsdp1),
    "fsdp2": _engine("torch FSDP2, per block", fsdp2),
    "scale": _engine("scale-fsdp, reshard", _scale(reshard=True)),
    "scale-keep": _engine("scale-fsdp, no reshard", _scale(reshard=False)),
    "scale-flat": _engine("scale-fsdp, reshard, flat", _scale(True, flatten=True), by_default=False),
    "scale-keep-flat": _engine("scale-fsdp, no reshard, flat", _scale(False, flatten=True), by_default=False),
    "oss": Engine("scale-oss, OSS + DDP", oss_with_ddp),
    "oss-default": Engine("scale-oss, OSS + DDP, Adam as torch builds it", default_oss_with_ddp, by_default=False),
    "oss-sharded": Engine("scale-oss, OSS + ShardedDataParallel", oss_with_sharded_ddp),
}
REFERENCE = "ddp"
