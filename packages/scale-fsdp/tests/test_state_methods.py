"""A sharded module and the wrapper around one save and load alike, as the frameworks of FairScale's users call them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from state_cases import Awkward, Differences, train
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import (
    FullyShardedDataParallel,
    consolidate_local_state_dicts,
    full_optim_state_dict,
    fully_shard,
    shard_optim_state_dict,
)

METHODS = [
    "state_dict",
    "load_state_dict",
    "local_state_dict",
    "load_local_state_dict",
]


@pytest.mark.parametrize("name", METHODS)
def test_the_wrapper_has_every_method_of_the_module(name: str) -> None:
    assert name in vars(FullyShardedDataParallel)


def test_what_they_give_is_the_same() -> None:
    wrapper = FullyShardedDataParallel(Awkward())
    optimizer = torch.optim.Adam(wrapper.parameters())
    train(wrapper, optimizer, 1)
    found = Differences()
    for name in ("state_dict", "local_state_dict"):
        found.compare(name, dict(getattr(wrapper, name)()), dict(getattr(wrapper.module, name)()))
    full = full_optim_state_dict(wrapper, optimizer)
    assert full is not None
    found.compare("gathered", full, full_optim_state_dict(wrapper.module, optimizer))
    for each in (wrapper, wrapper.module):
        found.compare("cut", shard_optim_state_dict(full, each)["state"], optimizer.state_dict()["state"])
        each.load_local_state_dict(each.local_state_dict())
        each.load_state_dict(each.state_dict())
    assert not found.found


class FairseqLike(FullyShardedDataParallel):
    """As fairseq subclasses it: what it saves is whole or local, by a switch."""

    def __init__(self, *args: Any, use_sharded_state: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_sharded_state = use_sharded_state

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if self.use_sharded_state:
            return super().local_state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None) -> Any:
        if self.use_sharded_state:
            return super().load_local_state_dict(state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict=strict)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def work_as_the_frameworks_do() -> tuple[list[str], Any]:
    found = Differences()
    for sharded_state in (False, True):
        for flatten in (False, True):
            kwargs: dict[str, Any] = {"use_sharded_state": sharded_state, "flatten_parameters": flatten}
            old = FairseqLike(Awkward(0), state_dict_device=torch.device("cpu"), **kwargs)
            new = FairseqLike(Awkward(1), **kwargs)
            new.load_state_dict(through_a_file(old.state_dict()), strict=True, model_cfg=None)
            whole = FullyShardedDataParallel.state_dict(new)
            found.compare(str(kwargs), dict(whole), dict(Awkward(0).state_dict()))
    model = FullyShardedDataParallel(Awkward(0))
    return found.found, through_a_file(model.local_state_dict())  # One file for each worker.


def test_a_subclass_as_fairseqs_and_files_of_workers_work() -> None:
    ranks = run_ranks(work_as_the_frameworks_do, 2)
    assert not [line for rank in ranks for line in rank[0]]
    whole = consolidate_local_state_dicts([state for _, state in reversed(ranks)])  # as glob() may find them
    found = Differences()
    found.compare("whole", whole, dict(Awkward(0).state_dict()))
    assert not found.found


@pytest.mark.parametrize("flatten", [False, True])
def test_the_state_of_a_copy_is_its_own(flatten: bool) -> None:
    model = fully_shard(Awkward(0), flatten_parameters=flatten)
    copied = copy.deepcopy(model)
    copied.load_state_dict(Awkward(1).state_dict())
    optimizer = torch.optim.Adam([param for param in copied.parameters() if param.requires_grad])
    found = Differences()
    for each, seed in ((model, 0), (copied, 1)):
        found.compare("whole", dict(each.state_dict()), dict(Awkward(seed).state_dict()))
        found.compare("inside", dict(each.body.state_dict()), dict(Awkward(seed).body.state_dict()))
    train(copied, optimizer, 1)
    full = full_optim_state_dict(copied, optimizer)
    assert full is not None
    found.compare("names", sorted(full["state"]), sorted(n for n, p in Awkward().named_parameters() if p.requires_grad))
    assert not found.found


def test_a_module_that_is_not_sharded_has_no_such_methods() -> None:
    assert not any(hasattr(nn.Linear(2, 2), name) for name in METHODS if name not in ("state_dict", "load_state_dict"))
