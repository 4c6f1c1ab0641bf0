"""What is saved under one layout and loaded under another is bitwise the same: models and optimizers, by every way."""

from __future__ import annotations

import copy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_cases import Awkward, Layout, fill, layouts, train, two_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.dcp import dcp_target
from scale_fsdp import full_optim_state_dict, shard_optim_state_dict
from scale_fsdp.state_dict.local import consolidate_local_state_dicts
from scale_snapshot import load_snapshot, save_snapshot

WORLD = 3
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}


def make(kind: str, model: nn.Module, in_two: bool) -> torch.optim.Optimizer:
    groups = two_groups(model)
    return OPTIMIZERS[kind](groups if in_two else [{"params": [p for group in groups for p in group["params"]]}])


def original(seed: int, kind: str, dtype: torch.dtype, in_two: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the optimizer state of a plain model, of random numbers."""
    plain = Awkward(seed, dtype)
    optimizer = make(kind, plain, in_two)
    train(plain, optimizer, 2)
    fill(optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.5 + seed
    full = full_optim_state_dict(plain, optimizer)
    assert full is not None
    return plain.state_dict(), full


class Side:
    """The model and optimizer of one layout, on the ranks that it has; on the others nothing."""

    def __init__(self, layout: Layout, kind: str, dtype: torch.dtype, in_two: bool, groups: dict[int, Any]) -> None:
        self.takes_part = dist.get_rank() < layout.world
        if self.takes_part:
            self.process_group = groups[layout.world]
            self.model = layout.shard(Awkward(99, dtype), self.process_group)
            self.optimizer = make(kind, self.model, in_two)

    def load(self, weights: dict[str, Any], full: dict[str, Any]) -> None:
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(shard_optim_state_dict(full, self.model, self.optimizer))

    def assert_has(self, weights: dict[str, Any], full: dict[str, Any], what: str) -> None:
        assert_equal(self.model, weights, what)
        state = full_optim_state_dict(self.model, self.optimizer, recipient_rank=None)
        assert state is not None
        assert_equal(state["state"], full["state"], what)
        assert_equal(grouped(state), grouped(full), what)


def grouped(full: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups, without the order inside, which is that of the optimizer that was asked."""
    return [{**group, "params": sorted(group["params"])} for group in full["param_groups"]]


def by_full_tensors(old: Side, new: Side, folder: Path) -> None:
    told: list[Any] = [None, None]
    if old.takes_part:
        told = [old.model.state_dict(), full_optim_state_dict(old.model, old.optimizer)]
    dist.broadcast_object_list(told)
    if new.takes_part:
        before = copy.deepcopy(told[1])
        new.load(*told)
        assert_equal(told[1], before, "the argument")


def by_torchs_checkpoint(old: Side, new: Side, folder: Path) -> None:
    if old.takes_part:
        state = {"all": sharded_state_dict(old.model, old.optimizer)}
        dcp.save(state, checkpoint_id=folder, process_group=old.process_group)
    dist.barrier()
    if new.takes_part:
        target = dcp_target(folder, new.model, new.optimizer, key="all")
        dcp.load({"all": target}, checkpoint_id=folder, process_group=new.process_group)
        load_sharded_state_dict(target, new.model, new.optimizer, copy=False)


def by_a_snapshot(old: Side, new: Side, folder: Path) -> None:
    if old.takes_part:
        save_snapshot(folder, 1, sharded_state_dict(old.model, old.optimizer), group_of(old.process_group))
    dist.barrier()
    if new.takes_part:
        target = partial(target_state_dict, new.model, new.optimizer)
        snapshot = load_snapshot(folder, target, group_of(new.process_group))
        load_sharded_state_dict(snapshot.state, new.model, new.optimizer, copy=False)


def by_local_states(old: Side, new: Side, folder: Path) -> None:
    mine = old.model.local_state_dict() if old.takes_part else None
    told: list[Any] = [None] * WORLD
    dist.all_gather_object(told, mine)
    full = full_optim_state_dict(old.model, old.optimizer) if old.takes_part else None
    alone = [full]
    dist.broadcast_object_list(alone)
    if new.takes_part:
        shards = [each for each in reversed(told) if each is not None]
        new.load(consolidate_local_state_dicts(shards), alone[0])


WAYS = [by_full_tensors, by_torchs_checkpoint, by_a_snapshot, by_local_states]


def go_round(folder: str, pairs: int, seed: int) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in range(1, WORLD + 1)}
    olds, news = layouts(range(1, WORLD + 1), seed), layouts(range(1, WORLD + 1), seed + 1)
    for number, (old_layout, new_layout) in enumerate(islice(zip(olds, news, strict=False), pairs)):
        kind = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
        # torch's own load_state_dict rounds NAdam's product to the parameter's dtype, on plain models as well.
        dtype = torch.bfloat16 if number // 2 % 2 and kind != "nadam" else torch.float32
        way = WAYS[number % len(WAYS)]
        in_two = not (old_layout.flatten or new_layout.flatten)
        weights, full = original(number, kind, dtype, in_two)
        old, new = (Side(layout, kind, dtype, in_two, groups) for layout in (old_layout, new_layout))
        if old.takes_part:
            old.load(weights, full)
        way(old, new, Path(folder) / f"{seed}-{number}")
        if new.takes_part:
            new.assert_has(weights, full, f"{way.__name__}, {kind}, {dtype}, {old_layout} -> {new_layout}")
        dist.barrier()


@pytest.mark.ranks(WORLD)
def test_save_and_load_under_random_layouts_is_bitwise_equal(tmp_path: Path) -> None:
    go_round(str(tmp_path), 24, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.ranks(WORLD)
def test_save_and_load_under_many_layouts_is_bitwise_equal(tmp_path: Path, seed: int) -> None:
    go_round(str(tmp_path), 200, seed)


@pytest.mark.ranks(4)
def test_copies_of_the_model_count_once(tmp_path: Path) -> None:
    """Two copies of the model, each cut between two ranks."""
    folder = str(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    for flatten in (False, True):
        weights, full = original(7, "adamw", torch.float32, in_two=False)
        model = Layout(wrapping="units", flatten=flatten).shard(Awkward(99), mesh)
        optimizer = make("adamw", model, in_two=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))
        assert_equal(dict(model.state_dict()), dict(weights), "weights")
        state = full_optim_state_dict(model, optimizer, recipient_rank=3)
        assert_equal(state is None, dist.get_rank() != 3, "who got it")
        if state is not None:
            assert_equal(state["state"], full["state"], "state")
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, model.local_state_dict())
        whole = consolidate_local_state_dicts(told)
        assert_equal(whole, dict(weights), "consolidated")
        dcp.save(sharded_state_dict(model, optimizer), checkpoint_id=f"{folder}/{flatten}")
        flat = Layout().shard(Awkward(98))
        into = make("adamw", flat, in_two=False)
        target = dcp_target(f"{folder}/{flatten}", flat, into)
        dcp.load(target, checkpoint_id=f"{folder}/{flatten}")
        load_sharded_state_dict(target, flat, into, copy=False)
        assert_equal(dict(flat.state_dict()), dict(weights), "loaded")
        again = full_optim_state_dict(flat, into, recipient_rank=None)
        assert_equal((again or {})["state"], full["state"], "loaded state")
