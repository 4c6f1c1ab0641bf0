"""Optimizers of timm, schedulefree, prodigyopt, adam-mini and heavyball, and of names that people know, over shards."""

from __future__ import annotations

import pytest
from client_optimizers import CLIENTS, PLACES, verdicts

from scale_core.testing import run_ranks

for _package in ("timm", "schedulefree", "prodigyopt", "adam_mini", "heavyball", "pytorch_optimizer"):
    if _package != "timm":  # Its import needs a torchvision that is built for this torch.
        pytest.importorskip(_package)

LEAST_EQUAL = {
    "fully_shard": {"timm": 50, "schedulefree": 4, "small_packages": 0, "heavyball": 6, "by_name": 0},
    "sharded_ddp": {"timm": 70, "schedulefree": 4, "small_packages": 0, "heavyball": 10, "by_name": 6},
}


@pytest.mark.parametrize("package", CLIENTS)
@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_steps_as_on_one_process_or_is_refused(package: str, place: str) -> None:
    by_rank = run_ranks(verdicts, 2, package, place, limit_seconds=1200)
    for name, verdict in by_rank[0].items():
        assert verdict.startswith(("equal", "refused", "not judged")), (name, [found[name] for found in by_rank])
        kinds = {found[name].partition(":")[0] for found in by_rank}
        assert len(kinds) == 1, (name, [found[name] for found in by_rank])
    num_equal = sum(verdict == "equal" for verdict in by_rank[0].values())
    assert num_equal >= LEAST_EQUAL[place][package], by_rank[0]
