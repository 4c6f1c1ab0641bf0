"""What a rank saves of itself goes back to that rank, into the same wrapping, and nowhere else; by every method."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_cases import WRAPPINGS, Awkward, Layout, train
from through_a_file import through_a_file
from torch import nn

from scale_check.exact import assert_equal, gather_values
from scale_core.shard import shard_of
from scale_fsdp import (
    FullyShardedDataParallel,
    ShardOptions,
    full_optim_state_dict,
    fully_shard,
    shard_optim_state_dict,
)
from scale_fsdp.state_dict.loading import LOCAL_METADATA
from scale_fsdp.state_dict.local import consolidate_local_state_dicts


@pytest.mark.ranks(1, 2, 3)
def test_a_rank_s_own_state_goes_both_ways() -> None:
    for wrapping in WRAPPINGS:
        for flatten in (False, True):
            layout = Layout(wrapping=wrapping, flatten=flatten)
            old, new = layout.shard(Awkward(0)), layout.shard(Awkward(1))
            state = through_a_file({"weights": old.local_state_dict()})
            metadata = state["weights"]._metadata[""][LOCAL_METADATA]
            assert json.loads(json.dumps(metadata)) == metadata
            result = new.load_local_state_dict(state["weights"])
            assert result.missing_keys == result.unexpected_keys == []
            assert_equal(new, Awkward(0), layout)
            # Other names than flat ones are those of the plain model, and each is this rank's shard.
            for name, tensor in () if flatten else old.local_state_dict(keep_vars=True).items():
                shard = shard_of(tensor)
                is_shard = shard is not None and shard.numel >= tensor.numel()
                assert is_shard or not isinstance(tensor, nn.Parameter), name
            new.load_local_state_dict(dict(state["weights"]))  # Without metadata names and shapes are compared.


def test_it_shares_memory_with_the_shards_under_the_prefix() -> None:
    model = FullyShardedDataParallel(Awkward())
    state = model.local_state_dict(prefix="a.")
    assert all(name.startswith("a.") for name in state)
    state["a.embed.weight"].zero_()
    assert not model.state_dict()["embed.weight"].any()
    given: dict[str, Any] = {"before": 1}
    assert model.local_state_dict(destination=given) is given
    assert list(given) == ["before", *(name.removeprefix("a.") for name in state)]


def test_it_shows_shards_where_the_module_shows_whole_parameters() -> None:
    for flatten in (False, True):
        model = fully_shard(Awkward(), options=ShardOptions(flatten_parameters=flatten))
        names = list(model.local_state_dict())
        with model.summon_full_params():
            assert list(model.local_state_dict()) == names


@pytest.mark.ranks(2)
def test_the_state_of_another_rank_or_wrapping_is_refused() -> None:
    rank = dist.get_rank()
    alone = dist.new_group([0]), dist.new_group([1])
    model = fully_shard(Awkward())
    state = model.local_state_dict()
    told: list[Any] = [None, None]
    dist.all_gather_object(told, state)
    finer = Layout(wrapping="units", atom="element").shard(Awkward())
    otherwise = Layout(flatten=True).shard(Awkward())
    lacking = dict(state)
    del lacking["scale"]
    before = {name: tensor.clone() for name, tensor in finer.state_dict().items()}
    refused = {
        f"expected the state of rank {rank}, got the state of rank {1 - rank}, of 2 ranks: read the file that": (
            model,
            told[1 - rank],
        ),
        f"expected the state of one of 1 ranks, got the state of rank {rank} of 2. Make full weights": (
            fully_shard(Awkward(), alone[rank]),
            state,
        ),
        "another wrapping; first, '": (finer, state),
        "another wrapping; first, 'scale': expected elements": (otherwise, state),
        "'flat_param_0' is missing": (otherwise, dict(state)),
        "'scale' is missing": (model, lacking),
        "'extra' is unexpected": (model, {**state, "extra": torch.ones(1)}),
        "'count': expected this rank's shape (2,), got (3,)": (model, {**state, "count": torch.ones(3)}),
        "'scale': expected a tensor, got str": (model, {**state, "scale": "text"}),
    }
    for message, (target, given) in refused.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            target.load_local_state_dict(given)
    assert_equal(finer, before)
    with (
        model.summon_full_params(),
        pytest.raises(RuntimeError, match="load_local_state_dict: the parameters of the root unit are in use"),
    ):
        model.load_local_state_dict(state)
    assert model.load_local_state_dict(lacking, strict=False).missing_keys == ["scale"]


def test_a_unit_that_borrows_from_outside_says_where_to_ask() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Sequential(nn.Linear(2, 3, bias=False)))
    model[1][0].weight = model[0].weight
    fully_shard(model[0], options=ShardOptions(flatten_parameters=True))
    fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"'0.weight' belongs to a unit outside of this module: call this on the outer"
    ):
        model[1].local_state_dict()


# A sharded module and the wrapper around one save and load alike, as the frameworks of FairScale's users call them.


METHODS = ["state_dict", "load_state_dict", "local_state_dict", "load_local_state_dict"]


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
