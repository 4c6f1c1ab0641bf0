"""Scripts written for DDP, over fully_shard and OSS with ShardedDataParallel: the same weights."""

from __future__ import annotations

import pytest
from ddp_scripts import SCRIPTS, difference

from scale_core.testing import run_ranks


@pytest.mark.parametrize("wrap", ["fully_shard", "sharded_ddp"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_ddp_ends_with_the_same_numbers(name: str, wrap: str) -> None:
    assert max(run_ranks(difference, 2, name, wrap, limit_seconds=120)) < 1e-12
