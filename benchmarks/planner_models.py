"""The models of the memory planner's benchmark: those of its tests, of a size that is worth measuring on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

# The package's tests must be complete without this folder, and this folder needs the whole checkout anyhow.
sys.path.append(str(Path(__file__).parents[1] / "packages" / "scale-checkpoint" / "tests"))
from planned_models import ResNet, Transformer, UNet


@dataclass(frozen=True)
class Planned:
    """A model, a batch and what it is called."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


PLANNED = {
    "transformer": Planned(
        "Transformer, 8 blocks of width 256, batch 4x256",
        lambda: Transformer(256, 8, 2048, dropout=0.0),
        lambda: torch.randint(0, 2048, (4, 256)),
    ),
    "resnet": Planned(
        "ResNet, 3 stages of 3 blocks from 32 channels, batch 8x3x64x64",
        lambda: ResNet(32, 3, 3),
        lambda: torch.randn(8, 3, 64, 64),
    ),
    "unet": Planned(
        "U-Net, 4 levels from 16 channels, batch 4x4x96x96",
        lambda: UNet(16, 4),
        lambda: torch.randn(4, 4, 96, 96),
    ),
    "tiny": Planned(
        "Tiny transformer", lambda: Transformer(32, 3, 64, dropout=0.0), lambda: torch.randint(0, 64, (2, 32))
    ),
}
