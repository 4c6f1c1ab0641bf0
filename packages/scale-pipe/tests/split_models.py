"""Models to be cut by name, and the pass through their stages one after another in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_in_turn(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Returns what the last stage returns."""
    output = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        output = stage(output)
    return output


class Tower(nn.Module):
    """Blocks between an embedding and a head, with whatever its forward does besides: `odd` says what.

    Inputs [batch, 4], output [batch, 3].
    """

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        self.odd = odd
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.embed = nn.Linear(4, 6)
        self.dropout = nn.Dropout(0.3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.BatchNorm1d(6, affine=False)) for _ in range(4)
        )
        self.head = nn.Linear(6, 3)
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        odd = self.odd
        if odd == "random input":
            x = self.dropout(x)
        if odd == "random function":
            x = nn.functional.dropout(x, 0.5)
        assert isinstance(self.shift, Tensor)
        first = hidden = self.dropout(self.embed(x - self.shift) * self.scale)
        if mask is not None:
            hidden = hidden * mask
        ones = torch.ones_like(hidden)
        for index, block in enumerate(self.blocks):
            if odd == "recomputed":
                hidden = checkpoint(block, hidden, use_reentrant=False)
                continue
            if odd == "values" and hidden.sum() > 1e9:
                break
            if odd == "another way" and index == 1 and not hidden.requires_grad:
                continue
            hidden = block(hidden) if odd == "straight" else hidden + block(hidden) * ones
        if odd == "forwards":
            return self.head.forward(self.blocks[3].forward(hidden))
        if odd == "around":
            hidden = hidden + first
        if odd == "parameter":
            hidden = hidden * self.scale
        if odd == "called again":
            hidden = hidden + self.embed(x)
        if odd == "tied":
            return nn.functional.linear(hidden, self.embed.weight.t())
        if odd == "written":
            table = torch.zeros(2, *hidden.shape)
            table[0] = first
        output = self.head(hidden)
        return {"output": output, "first": first} if odd == "output" else output
