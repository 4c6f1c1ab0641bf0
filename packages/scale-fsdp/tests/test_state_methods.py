"""A sharded module and the wrapper around one save and load alike, as the frameworks of FairScale's users call them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from state_cases import Awkward, train
from torch import nn

from scale_check.exact import assert_equal, gather_values
from scale_fsdp import (
    FullyShardedDataParallel,
    ShardOptions,
    full_optim_state_dict,
    fully_shard,
    shard_optim_state_dict,
)
from scale_fsdp.state_dict.local import consolidate_local_state_dicts

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
    for name in ("state_dict", "local_state_dict"):
        assert_equal(dict(getattr(wrapper, name)()), dict(getattr(wrapper.module, name)()), name)
    full = full_optim_state_dict(wrapper, optimizer)
    assert full is not None
    assert_equal(full, full_optim_state_dict(wrapper.module, optimizer), "gathered")
    for each in (wrapper, wrapper.module):
        assert_equal(shard_optim_state_dict(full, each)["state"], optimizer.state_dict()["state"], "cut")
        each.load_local_state_dict(each.local_state_dict())
        each.load_state_dict(each.state_dict())


@pytest.mark.ranks(2)
def test_a_subclass_as_fairseqs_and_files_of_workers_work() -> None:
    def through_a_file(value: Any) -> Any:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

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

    for sharded_state in (False, True):
        for flatten in (False, True):
            kwargs: dict[str, Any] = {"use_sharded_state": sharded_state, "flatten_parameters": flatten}
            old = FairseqLike(Awkward(0), state_dict_device=torch.device("cpu"), **kwargs)
            new = FairseqLike(Awkward(1), **kwargs)
            new.load_state_dict(through_a_file(old.state_dict()), strict=True, model_cfg=None)
            assert_equal(FullyShardedDataParallel.state_dict(new), Awkward(0), kwargs)
    model = FullyShardedDataParallel(Awkward(0))
    states = gather_values(through_a_file(model.local_state_dict()))  # One file for each worker.
    whole = consolidate_local_state_dicts(states[::-1])  # as glob() may find them
    assert_equal(whole, dict(Awkward(0).state_dict()), "whole")


@pytest.mark.parametrize("flatten", [False, True])
def test_the_state_of_a_copy_is_its_own(flatten: bool) -> None:
    model = fully_shard(Awkward(0), options=ShardOptions(flatten_parameters=flatten))
    copied = copy.deepcopy(model)
    copied.load_state_dict(Awkward(1).state_dict())
    optimizer = torch.optim.Adam([param for param in copied.parameters() if param.requires_grad])
    for each, seed in ((model, 0), (copied, 1)):
        assert_equal(dict(each.state_dict()), dict(Awkward(seed).state_dict()), "whole")
        assert_equal(dict(each.body.state_dict()), dict(Awkward(seed).body.state_dict()), "inside")
    train(copied, optimizer, 1)
    full = full_optim_state_dict(copied, optimizer)
    assert full is not None
    assert_equal(sorted(full["state"]), sorted(n for n, p in Awkward().named_parameters() if p.requires_grad), "names")


def test_a_module_that_is_not_sharded_has_no_such_methods() -> None:
    assert not any(hasattr(nn.Linear(2, 2), name) for name in METHODS if name not in ("state_dict", "load_state_dict"))
