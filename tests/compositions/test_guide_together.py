"""The guide's program of several packages in one loop."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from scale_core.testing import run_ranks

PROGRAM = Path(__file__).parents[2] / "docs" / "guides" / "together.py"


def _train() -> list[tuple[float, float]]:
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    seen: list[tuple[float, float]] = runpy.run_path(str(PROGRAM))["main"]()
    return seen


@pytest.mark.composition("scale-adascale", "scale-checkpoint", "scale-tp", "scale-fsdp")
def test_the_guides_program_prints_the_same_on_two_axes() -> None:
    (alone,) = run_ranks(_train, 1)
    assert alone[-1][0] < alone[0][0] / 2, "it learns"
    assert all(1 <= gain <= 4 for _, gain in alone)
    for seen in run_ranks(_train, 4):
        for one, expected in zip(seen, alone, strict=True):
            assert one == pytest.approx(expected, rel=1e-4)
