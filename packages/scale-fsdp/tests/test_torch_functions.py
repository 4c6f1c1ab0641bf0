"""torch.distributed.checkpoint and its functions for state do right by a sharded model, or say what to call instead."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shard_arguments import shard_arguments
from state_cases import Awkward, Layout, train, two_groups
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from scale_check.exact import assert_equal
from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, full_optim_state_dict, fully_shard, shard_optim_state_dict

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

Pair = tuple[nn.Module, Optimizer]


def make(layout: Layout, seed: int = 0, *, wrapper: bool = False) -> Pair:
    """A sharded model and its optimizer, which has not stepped."""
    model = Awkward(seed)
    if wrapper:
        model.body = FullyShardedDataParallel(model.body)
        model = FullyShardedDataParallel(model)
    else:
        layout.shard(model)
    return model, torch.optim.Adam(two_groups(model), lr=0.1 + seed)


def plain() -> Pair:
    model = Awkward()
    optimizer = torch.optim.Adam(two_groups(model), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def full_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    full = full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert full is not None
    return full


def trained(layout: Layout, *, wrapper: bool = False) -> Pair:
    pair = make(layout, wrapper=wrapper)
    train(*pair)
    return pair


@pytest.mark.ranks(2)
def test_of_models_torch_s_functions_get_and_set_the_plain_state() -> None:
    first = dist.get_rank() == 0
    expected, other = dict(Awkward().state_dict()), dict(Awkward(3).state_dict())
    for wrapper in (False, True):
        model, _ = make(Layout(wrapping="units"), wrapper=wrapper)
        assert_equal(dict(get_model_state_dict(model)), expected, "get")
        assert_equal(dict(get_model_state_dict(model, options=FULL)), expected, "get full")
        assert_equal(dict(get_model_state_dict(model, options=ON_RANK_0)), expected if first else {}, "get on rank 0")
        for options in (None, FULL, FROM_RANK_0):
            given = copy.deepcopy(other) if first or options is not FROM_RANK_0 else {}
            result = set_model_state_dict(model, given, options=options)
            assert_equal(result.missing_keys + result.unexpected_keys, [], "missing")
            assert_equal(dict(model.state_dict()), other, f"set {options}")
            model.load_state_dict(expected)
        lacking = copy.deepcopy(other)
        del lacking["body.0.weight"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"body.0.weight"'):
            set_model_state_dict(model, lacking, options=FULL)
    flat, _ = make(Layout(flatten=True))
    for options in (None, FULL, ON_RANK_0):
        with pytest.raises(
            RuntimeError, match=r"call scale_fsdp.full_state_dict\(model\) for full tensors, or scale_core"
        ):
            get_model_state_dict(flat, options=options)
    for options in (None, FULL):
        set_model_state_dict(flat, copy.deepcopy(other), options=options)
        assert_equal(dict(flat.state_dict()), other, f"set flat {options}")
        flat.load_state_dict(expected)
    model = FullyShardedDataParallel(Awkward(), state_dict_on_rank_0_only=True)
    assert_equal(dict(get_model_state_dict(model, options=ON_RANK_0)), expected if first else {}, "form")


@pytest.mark.ranks(2)
def test_torch_s_functions_get_ranges_and_set_full_states() -> None:
    first = dist.get_rank() == 0
    expected = full_of(*plain())
    for wrapper in (False, True):
        model, optimizer = trained(Layout(wrapping="units"), wrapper=wrapper)
        before = copy.deepcopy(optimizer.state_dict())
        state = get_optimizer_state_dict(model, optimizer)
        assert list(state["state"]) == list(expected["state"])
        for name, values in state["state"].items():
            shard, whole = values["exp_avg"], expected["state"][name]["exp_avg"]
            assert isinstance(shard, LocalShard)
            assert_equal(shard.tensor.view(-1), whole.view(-1)[shard.start : shard.stop], name)
        assert_equal(optimizer.state_dict(), before, "to everybody else")
        for options in (None, FULL, FROM_RANK_0):
            fresh = torch.optim.Adam(two_groups(model), lr=0.7)
            given = copy.deepcopy(expected) if first or options is not FROM_RANK_0 else {}
            set_optimizer_state_dict(model, fresh, given, options=options)
            assert_equal(full_of(model, fresh), expected, f"set {options}")
        # Nobody can take a shard for the full tensor.
        with pytest.raises(TypeError, match=r"scale_fsdp.full_optim_state_dict\(model, optimizer\)"):
            torch.save(state, io.BytesIO())
        with pytest.raises(RuntimeError, match=r"scale_fsdp.full_optim_state_dict\(model, optimizer\)"):
            state["state"]["scale"]["exp_avg"].sum()
        assert_equal(get_optimizer_state_dict(model, optimizer, options=FULL), expected, "whole")
        on_rank_0 = get_optimizer_state_dict(model, optimizer, options=ON_RANK_0)
        assert_equal(on_rank_0, expected if first else {}, "on rank 0")
        assert list(get_state_dict(model, optimizer, options=FULL)[0]) == list(Awkward().state_dict())
        assert_equal(optimizer.state_dict(), before, "to everybody else, then")
        taken = optimizer.state_dict()
        shard = state["state"]["body.2.weight"]["exp_avg"]
        number = [id(p) for group in optimizer.param_groups for p in group["params"]].index(id(model.body[2].weight))
        other_range = LocalShard(shard.tensor, (40,), shard.start + 5, shard.stop + 5)
        taken["state"][number]["exp_avg"] = other_range
        with pytest.raises(ValueError, match=r"^optimizer state body\.2\.weight\.exp_avg:"):
            optimizer.load_state_dict(taken)


def test_flat_parameters_are_refused_with_what_to_call() -> None:
    model, optimizer = trained(Layout(flatten=True))
    with pytest.raises(
        RuntimeError, match=r"'flat_param_0' is a flat parameter, .*full_optim_state_dict\(model, optimizer"
    ):
        get_optimizer_state_dict(model, optimizer)
    # torch 2.8 looks for the name itself before it asks the optimizer.
    with pytest.raises((RuntimeError, KeyError), match="'flat_param_0'"):
        set_optimizer_state_dict(model, optimizer, full_of(*plain()))


def test_a_plain_optimizer_takes_the_gathered_state() -> None:
    model, optimizer = plain()
    full = full_of(*trained(Layout(flatten=False)))
    fresh = torch.optim.Adam(two_groups(model), lr=0.7)
    set_optimizer_state_dict(model, fresh, full)
    assert_equal(full_of(model, fresh), full_of(model, optimizer), "state")


def test_a_child_named_module_keeps_its_name_below_a_wrapper() -> None:
    class Holder(nn.Module):
        """A model whose own child has the name that a wrapper's has."""

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(3, 2), FullyShardedDataParallel(nn.Linear(2, 3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.module(x)
            return output

    model = FullyShardedDataParallel(Holder())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer, options=FULL)
    names = ["module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]
    assert list(weights) == list(state["state"]) == names
    other = FullyShardedDataParallel(Holder())
    fresh = torch.optim.Adam(other.parameters(), lr=0.7)
    set_state_dict(other, fresh, model_state_dict=dict(weights), optim_state_dict=state, options=FULL)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()), "model")
    assert_equal(full_of(other, fresh), full_of(model, optimizer), "optimizer")


def test_whoever_steps_on_no_shards_gets_no_hooks() -> None:
    _, optimizer = plain()
    assert not optimizer._optimizer_state_dict_post_hooks
    hooks = [hook.__name__ for hook in optimizer._optimizer_load_state_dict_pre_hooks.values()]
    assert hooks in ([], ["_with_own_elements"])  # It refuses one rank's part of a state.


def save(folder: str) -> None:
    model, optimizer = make(Layout(wrapping="units", atom="element"), seed=2)
    expected = plain()
    model.load_state_dict(expected[0].state_dict())
    optimizer.load_state_dict(shard_optim_state_dict(full_of(*expected), model, optimizer))  # It has never stepped.
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(folder: str) -> None:
    model, optimizer = make(Layout(), seed=5)
    weights, state = get_state_dict(model, optimizer)
    target = {"model": weights, "optimizer": state}
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_equal(dict(model.state_dict()), dict(plain()[0].state_dict()), "model")
    assert_equal(full_of(model, optimizer), full_of(*plain()), "optimizer")


def test_torch_s_recipe_saves_and_loads_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    run_ranks(load, 3, str(tmp_path))


@pytest.mark.ranks(1, 2, 3)
def test_torch_s_clipping_works_and_its_ddp_is_refused() -> None:
    """torch's own lines in a loop that knows of no shards: two models, one of which is clipped beside the other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for kwargs in ({}, {"flatten_parameters": True}, {"atom": "parameter"}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 3))
        model, critic = copy.deepcopy(plain), nn.Linear(3, 1)
        fully_shard(model[0], **shard_arguments(**kwargs))
        fully_shard(model, **shard_arguments(**kwargs))
        judge = copy.deepcopy(critic)
        theirs, mine = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model))
        x = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(3))
        for step in range(3):
            for each, judged, optimizer, part in (
                (plain, judge, theirs, x),
                (model, critic, mine, x[2 * rank : 2 * rank + 2]),
            ):
                judged.zero_grad()
                judged(each(part)).square().mean().mul(100.0).backward()
                optimizer.norm = nn.utils.clip_grad_norm_((p for p in each.parameters()), 0.1 + step)
                if step == 2:
                    nn.utils.clip_grad_value_(each.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad()
            assert torch.allclose(mine.norm, theirs.norm, rtol=1e-6), f"{mine.norm} and {theirs.norm}"
            with torch.no_grad():
                own = torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1) for p in critic.parameters()]))
            beside = nn.utils.clip_grad_norm_(critic.parameters(), 1e6)  # Whole, and this rank's own.
            assert torch.allclose(own, beside, rtol=1e-6), "the critic"
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-7)
        before = [param.detach().clone() for param in model.parameters()]
        for wrapped in (model, nn.ModuleList([nn.Linear(1, 1), model])):
            with pytest.raises(ValueError, match=r"DistributedDataParallel: '.*' is a shard .*train it without"):
                nn.parallel.DistributedDataParallel(wrapped)
        assert_equal([*model.parameters()], before, "overwritten")


@pytest.mark.ranks(2)
def test_an_optimizer_s_state_knows_whose_part_it_is() -> None:
    """A plain optimizer's state on shards, as programs save it."""
    rank, layout = dist.get_rank(), Layout()
    model, optimizer = make(layout)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    states = [torch.load(io.BytesIO(each), weights_only=True) for each in files]
    fresh = torch.optim.Adam(two_groups(model), lr=0.7)
    with pytest.raises(ValueError, match=r"the shard of rank 0 of 2.*full_optim_state_dict"):
        fresh.load_state_dict(states[0])
    assert not fresh.state
    fresh.load_state_dict(states[rank])
    assert_equal(full_of(model, fresh), full_of(model, optimizer), "its own")
    _, whole = plain()
    other, fresh = make(layout)
    fresh.load_state_dict(whole.state_dict())
    assert_equal(full_of(other, fresh)["state"], full_of(*plain())["state"], "a plain one")
