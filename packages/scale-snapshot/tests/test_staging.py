from typing import Any

import pytest
import torch
from torch import nn

from scale_core.state.local_shard import LocalShard
from scale_snapshot import staging
from scale_snapshot.staging import copy_to_host, kept_bytes


def test_a_copy_has_the_values_and_shares_no_memory() -> None:
    shard = torch.arange(3.0)
    state: dict[str, Any] = {
        "whole": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "part": LocalShard(shard, (7,), 2, 5),
        "number": torch.tensor(1.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "parameter": nn.Parameter(torch.ones(5, dtype=torch.bool), requires_grad=False),
        "value": {"a": 1},
    }
    copies = copy_to_host(state)
    for key in ("whole", "number", "nothing", "parameter"):
        assert torch.equal(copies[key], state[key])
        assert copies[key].dtype == state[key].dtype
    part = copies["part"]
    assert (tuple(part.shape), part.start, part.stop, part.ranges) == ((7,), 2, 5, ())
    shard.zero_()
    state["whole"].zero_()
    assert part.tensor.tolist() == [0.0, 1.0, 2.0]
    assert copies["whole"].flatten().tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert copies["value"] == {"a": 1}


def test_what_another_rank_writes_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_kept", None)
    shard = LocalShard(torch.arange(1000.0), (1000,), 0, 1000, written=False)
    assert copy_to_host({"a": shard})["a"] is shard
    assert kept_bytes() == 0


def test_the_memory_is_one_copy_and_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_kept", None)
    state = {f"weight {number}": torch.randn(1000, 250) for number in range(8)}
    size = sum(tensor.nbytes for tensor in state.values())
    first = copy_to_host(state)["weight 0"].data_ptr()
    assert size <= kept_bytes() <= 1.01 * size
    assert copy_to_host(state)["weight 0"].data_ptr() == first
    copy_to_host({"small": torch.ones(3)})
    assert size <= kept_bytes() <= 1.01 * size
