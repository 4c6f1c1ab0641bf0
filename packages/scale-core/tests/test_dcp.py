"""What is handed out goes through torch's own format, to another number of ranks and into fresh optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_by_hand import Model, adam, cut, train
from torch import Tensor
from torch.distributed.checkpoint import staging

from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.dcp import dcp_target
from scale_core.state.local_shard import LocalShard
from scale_core.state.validation import StateMismatch
from scale_core.testing import run_ranks


def save(folder: str, key: str) -> None:
    model = cut(Model(), dist.get_rank(), dist.get_world_size())
    optimizer = adam(model)
    train(model, optimizer, 3)
    state = sharded_state_dict(model, optimizer)
    if key:
        dcp.save({key: state}, checkpoint_id=folder)
        return
    saving = dcp.async_save(state, checkpoint_id=folder)
    train(model, optimizer, 1)  # What was saved is what was there before.
    saving.result()


def load(folder: str, key: str) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, expected = cut(Model(), rank, size), cut(Model(), rank, size)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = adam(model)
    optimizer.param_groups[1]["lr"] = 0.7
    target = dcp_target(folder, model, optimizer, key=key)
    dcp.load({key: target} if key else target, checkpoint_id=folder)
    load_sharded_state_dict(target, model, optimizer, copy=False)
    its_optimizer = adam(expected)
    train(expected, its_optimizer, 3)
    train(model, optimizer, 2, first=3)
    train(expected, its_optimizer, 2, first=3)
    ours, theirs = sharded_state_dict(model, optimizer), sharded_state_dict(expected, its_optimizer)
    return [*(ours.keys() ^ theirs.keys()), *(name for name in ours if not is_same(ours[name], theirs[name]))]


def is_same(ours: Any, theirs: Any) -> bool:
    ours, theirs = (value.tensor if isinstance(value, LocalShard) else value for value in (ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else bool(ours == theirs)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (3, 2, "train"),
        pytest.param(
            *(1, 3, ""),
            marks=pytest.mark.skipif(
                not hasattr(staging, "DefaultStager"),
                reason="async_save of torch 2.8 takes no shard of a single number",
            ),
        ),
    ],
)
def test_a_state_goes_through_dcp_to_another_number_of_ranks(tmp_path: Path, old: int, new: int, key: str) -> None:
    run_ranks(save, old, str(tmp_path), key)
    assert run_ranks(load, new, str(tmp_path), key) == [[]] * new


def refuse(folder: str) -> list[str]:
    model = cut(Model(), 0, 1)
    dcp.save(sharded_state_dict(model, adam(model)), checkpoint_id=folder)
    messages = []
    for other, optimizer in ((cut(Model(hidden=6), 0, 1), None), (model, torch.optim.SGD(model.parameters(), lr=0.1))):
        try:
            dcp_target(folder, other, optimizer)
        except StateMismatch as error:
            messages.append(str(error))
    return messages


def test_another_model_or_optimizer_is_refused_before_reading(tmp_path: Path) -> None:
    shape, groups = run_ranks(refuse, 1, str(tmp_path))[0]
    assert "model.embed.weight: the saved shape is (7, 5), expected (7, 6)" in shape
    assert "optim.groups: group 0 of the optimizer has frozen, which was saved in none" in groups
