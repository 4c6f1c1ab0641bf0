"""Three small models that plans are tried on: a transformer, a residual network, and a U-Net with skips."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, sequence, width)))
        fed: Tensor = x + self.dropout(self.feed(self.feed_norm(x)))
        return fed


class Transformer(nn.Module):
    def __init__(self, width: int = 64, num_blocks: int = 5, vocabulary: int = 128) -> None:
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
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm, self.second_norm = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)), inplace=True)
        return functional.relu(self.second_norm(self.second(y)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.first = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, width))
        self.second = nn.Sequential(ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 2 * width))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(self.stem(images))).mean((2, 3)))
        return logits


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU())
        self.layers = nn.Sequential(*layers, nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y: Tensor = self.layers(x if skip is None else torch.cat((x, skip), 1))
        return y


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(4, width), ConvBlock(width, 2 * width)])
        self.middle = ConvBlock(2 * width, 4 * width)
        self.up = nn.ModuleList([ConvBlock(6 * width, 2 * width), ConvBlock(3 * width, width)])
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(functional.interpolate(x, scale_factor=2), skip=skips.pop())
        y: Tensor = self.out(x)
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (Transformer, lambda: torch.randint(0, 128, (4, 64))),
    "resnet": (ResNet, lambda: torch.randn(4, 3, 32, 32)),
    "unet": (UNet, lambda: torch.randn(2, 4, 32, 32)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model and a batch, the same each time."""
    torch.manual_seed(0)
    model, batch = MODELS[name]
    return model(), batch()
