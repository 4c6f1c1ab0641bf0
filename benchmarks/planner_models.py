"""The models of the memory planner's benchmark: transformer, residual network and U-Net, of a size for a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class AttentionBlock(nn.Module):
    """Pre-norm attention and feed-forward layer, x: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_in, self.feed_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        fed: Tensor = x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return fed


class Transformer(nn.Module):
    """A language model, tokens: [batch, sequence]; returns the loss."""

    def __init__(self, width: int, num_blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, 4) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, x: [batch, channels, height, width]."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm, self.second_norm = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)), inplace=True)
        return functional.relu(self.second_norm(self.second(y)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    """Three stages, images: [batch, 3, height, width]; returns logits."""

    def __init__(self, width: int, blocks_per_stage: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width]
        self.stages = nn.Sequential(
            *(
                ResidualBlock(before if index == 0 else after, after)
                for before, after in itertools.pairwise(widths)
                for index in range(blocks_per_stage)
            )
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits


class ConvBlock(nn.Module):
    """Two convolutions over the input and, where there is one, a skip."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU())
        self.layers = nn.Sequential(*layers, nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y: Tensor = self.layers(x if skip is None else torch.cat((x, skip), 1))
        return y


class UNet(nn.Module):
    """As many levels down as up, with skips between them, images: [batch, 4, height, width]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(ConvBlock(b, a) for b, a in zip([4, *widths], widths[:-1], strict=False))
        self.middle = ConvBlock(widths[-2], widths[-1])
        self.up = nn.ModuleList(ConvBlock(widths[i] + widths[i + 1], widths[i]) for i in reversed(range(depth)))
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(functional.interpolate(x, scale_factor=2), skips.pop())
        y: Tensor = self.out(x)
        return y


@dataclass(frozen=True)
class Planned:
    """A model, a batch and what it is called."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


PLANNED = {
    "transformer": Planned(
        "Transformer, 8 blocks of width 256, batch 4x256",
        lambda: Transformer(256, 8, 2048),
        lambda: torch.randint(0, 2048, (4, 256)),
    ),
    "resnet": Planned(
        "ResNet, 3 stages of 3 blocks from 32 channels, batch 8x3x64x64",
        lambda: ResNet(32, 3),
        lambda: torch.randn(8, 3, 64, 64),
    ),
    "unet": Planned(
        "U-Net, 4 levels from 16 channels, batch 4x4x96x96",
        lambda: UNet(16, 4),
        lambda: torch.randn(4, 4, 96, 96),
    ),
    "tiny": Planned("Tiny transformer", lambda: Transformer(32, 3, 64), lambda: torch.randint(0, 64, (2, 32))),
}
