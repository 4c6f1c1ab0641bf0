"""__init__.py: what `import scale_fsdp` loads."""

from __future__ import annotations

import subprocess
import sys

import scale_fsdp

WINGS = (
    "scale_fsdp.description",
    "scale_fsdp.ema",
    "scale_fsdp.offload",
    "scale_fsdp.reshard.attached_state",
    "scale_fsdp.reshard.reshard",
)
STEP = """
import sys, torch
from scale_fsdp import fully_shard
model = fully_shard(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(*sys.modules)
"""


def test_a_step_loads_nothing_that_was_not_asked_for():
    run = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.split()
    assert "scale_fsdp.runtime.step" in loaded and not set(WINGS) & set(loaded)


def test_every_public_name_is_listed_and_imported_when_asked_for():
    assert set(scale_fsdp.__all__) <= set(dir(scale_fsdp))
    for name in scale_fsdp.__all__:
        assert getattr(scale_fsdp, name) is not None
    assert not hasattr(scale_fsdp, "no_such_name")
