"""Three models that plans are tried on, small ones here: a transformer, a residual network, and a U-Net with skips.

The benchmark of the planner takes the same models, larger: what is measured there is what is tested here.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class AttentionBlock(nn.Module):
    """Pre-norm attention and feed-forward layer, x: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, sequence, width)))
        fed: Tensor = x + self.dropout(self.feed(self.feed_norm(x)))
        return fed


class Transformer(nn.Module):
    """A language model, tokens: [batch, sequence]; returns the loss."""

    def __init__(self, width: int = 64, num_blocks: int = 5, vocabulary: int = 128, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, 4, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, x: [batch, channels, height, width]; more channels halve height and width."""

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
    """Stages `stage1`, `stage2`, ..., each twice as wide as the one before, images: [batch, 3, height, width]."""

    def __init__(self, width: int = 8, num_stages: int = 2, blocks_per_stage: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.num_stages = num_stages
        for stage in range(num_stages):
            after = width * 2**stage
            before = [width if stage == 0 else after // 2] + [after] * (blocks_per_stage - 1)
            self.add_module(f"stage{stage + 1}", nn.Sequential(*(ResidualBlock(b, after) for b in before)))
        self.head = nn.Linear(width * 2 ** (num_stages - 1), 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in range(self.num_stages):
            x = self.get_submodule(f"stage{stage + 1}")(x)
        logits: Tensor = self.head(x.mean((2, 3)))
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

    def __init__(self, width: int = 8, depth: int = 2) -> None:
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
