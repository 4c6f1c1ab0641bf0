"""The budget that the guide on checkpointing gives for a sharded model is kept, as the simulator counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scale_check.simulate import simulate
from scale_checkpoint import apply_plan, plan_memory
from scale_fsdp import fully_shard

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoint.md"
RANKS = 4


def functions_of_the_guide() -> dict[str, Any]:
    """Returns the functions of the section on the budget."""
    section = GUIDE.read_text(encoding="utf-8").partition("### The budget of a sharded model\n")[2]
    session = section.partition("```python\n")[2].partition("```")[0].partition(">>> budget =")[0]
    names: dict[str, Any] = {}
    exec(re.sub(r"^(>>>|\.\.\.) ?", "", session, flags=re.MULTILINE), names)
    return names


def build() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 128)) for _ in range(8))
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("device_mib", [14, 16])
def test_a_plan_for_the_budget_of_the_guide_fits_a_sharded_rank(device_mib: int) -> None:
    model, device_bytes = build(), device_mib * 2**20
    budget = functions_of_the_guide()["budget_for"](model, list(model), device_bytes, RANKS)
    plan = plan_memory(model, torch.randn(512, 128), budget)
    assert "recompute" in plan.strategies.values(), "the budget is short, so that the plan matters"
    with simulate(rank=0, world_size=RANKS) as simulation:
        model = build()
        apply_plan(model, plan)  # in place
        for block in model:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            simulation.restart()
            model(torch.randn(512, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert simulation.peak_bytes <= device_bytes
