"""A small U-Net with skips, for both runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scale_pipe import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Down(nn.Module):
    """Halves the image, and stashes what it was."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels * 2, 3, stride=2, padding=1)

    def forward(self, input: Tensor) -> Iterator[Any]:
        yield stash("skip", input)
        return torch.relu(self.conv(input))  # type: ignore[return-value]


@skippable(pop=["skip"])
class Up(nn.Module):
    """Doubles the image, and adds what was popped."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels * 2, channels, 2, stride=2)

    def forward(self, input: Tensor) -> Any:
        skip = yield pop("skip")
        return torch.relu(self.conv(input)) + skip


def u_net(depth: int = 3) -> nn.Sequential:
    """[N, 1, S, S] to the same; 2 * depth + 2 layers, with a skip between the first and the last, and so on."""
    torch.manual_seed(0)
    downs: list[Any] = [Down(2**level) for level in range(depth)]
    ups: list[Any] = [Up(2**level) for level in reversed(range(depth))]
    for level in range(depth):
        space = Namespace()
        downs[level].isolate(space)
        ups[-1 - level].isolate(space)
    middle = 2**depth
    return nn.Sequential(*downs, nn.Conv2d(middle, middle, 1), nn.GroupNorm(1, middle), *ups)
