"""The state of OSS: that of the plain optimizer on one process, whoever keeps which part of it."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oss_cases import ELEMENTWISE, MATRICES, WHOLE, Shards, model_of, plain_params, shapes_for, train
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from with_options import with_options

from scale_check.exact import assert_equal, gather_values
from scale_check.simulate import simulate
from scale_core.comm.group import Group, group_of
from scale_core.errors import ContractError
from scale_core.shard import shard_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.dcp import dcp_target
from scale_core.state.param_ownership import ParamSlice
from scale_core.testing import run_ranks
from scale_core.tree import tensors_in
from scale_oss import OSS, OSSOptions, ShardedDataParallel
from scale_snapshot import SnapshotError, load_snapshot, save_snapshot

OPTIMIZERS = {**ELEMENTWISE, **WHOLE}
CASES = [*itertools.product(OPTIMIZERS, (False, True))]
BUCKET_NUMEL = 50


def plain_side(name: str) -> tuple[dict[str, nn.Parameter], Any]:
    params = plain_params(shapes_for(name))
    cls, kwargs = OPTIMIZERS[name]
    return params, cls(params.values(), **kwargs)


def our_side(name: str, sharded: bool, params: dict[str, nn.Parameter] | None = None) -> tuple[Any, OSS, Shards | None]:
    """Parameters and an OSS over them, whole on each rank or in shards."""
    params = plain_params(shapes_for(name)) if params is None else params
    cls, kwargs = OPTIMIZERS[name]
    shards = Shards(params) if sharded else None
    mine = shards.params if shards is not None else params
    return mine, OSS(mine.values(), cls, **with_options(OSSOptions, bucket_numel=BUCKET_NUMEL, **kwargs)), shards


def weights(params: Any, shards: Shards | None) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in params.items()} if shards is None else shards.wholes()


def gather_and_go_on(name: str, sharded: bool, recipient: int) -> None:
    """The gathered state is the plain one; the plain optimizer and a fresh OSS train on from it."""
    theirs, plain = plain_side(name)
    params, ours, _ = our_side(name, sharded)
    train(plain, theirs.values(), range(3))
    train(ours, params.values(), range(3))
    ours.consolidate_state_dict(recipient)
    if recipient in (-1, group_of().rank):
        gathered = ours.state_dict()
        assert_equal(gathered, plain.state_dict(), "gathered")
        fresh_params, fresh = plain_side(name)
        for param, value in zip(fresh_params.values(), theirs.values(), strict=True):
            param.data.copy_(value.detach())
        fresh.load_state_dict(copy.deepcopy(gathered))
        train(fresh, fresh_params.values(), range(3, 5))
    else:
        with pytest.raises(RuntimeError, match=r"Call optimizer\.consolidate_state_dict\(\) on all ranks"):
            ours.state_dict()
        fresh_params = None
    saved = plain.state_dict()
    before = copy.deepcopy(saved)
    start = {n: nn.Parameter(param.detach().clone()) for n, param in theirs.items()}
    params, ours, shards = our_side(name, sharded, start)
    ours.load_state_dict(saved)
    train(ours, params.values(), range(3, 5))
    assert_equal(saved, before, "the argument")
    train(plain, theirs.values(), range(3, 5))
    expected = {n: param.detach() for n, param in theirs.items()}
    assert_equal(weights(params, shards), expected, "weights")
    if fresh_params is not None:
        assert_equal({n: param.detach() for n, param in fresh_params.items()}, expected, "plain weights")
    with pytest.raises(RuntimeError, match="since the last step"):  # What was gathered is older than the parameters.
        ours.state_dict()
    assert_equal(ours.state_dict(all_ranks=True), plain.state_dict(), "after loading")


def gather_all(cases: list[tuple[str, bool]]) -> None:
    size = group_of().size
    recipients = itertools.cycle([0, size - 1, -1])
    for (name, sharded), r in zip(cases, recipients, strict=False):
        gather_and_go_on(name, sharded, r)


def test_the_gathered_state_of_a_world_of_one_is_the_plain_one() -> None:
    gather_all(CASES)


@pytest.mark.ranks(2, 3)
def test_the_gathered_state_is_the_plain_one_and_loads_both_ways() -> None:
    gather_all(CASES)


@pytest.mark.ranks(2)
def test_programs_that_look_at_storages_save_a_model_once(tmp_path: Path) -> None:
    """Those that look at storages find each parameter alone in its own, as in the plain model."""
    folder = tmp_path
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = copy.deepcopy(plain)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    for net, name in ((plain, "plain"), (model, "ours"), (wrapped, "wrapped")):
        save_model(net, str(folder / f"{name}-{group_of().rank}"))
        torch.save(net.state_dict(), folder / f"{name}-{group_of().rank}.pt")
        torch.save(next(iter(net.state_dict().values())), folder / f"{name}-{group_of().rank}-one.pt")
    for ending in ("", ".pt", "-one.pt"):
        sizes = {n: (folder / f"{n}-{group_of().rank}{ending}").stat().st_size for n in ("plain", "ours", "wrapped")}
        assert abs(sizes["ours"] - sizes["plain"]) < 128 and abs(sizes["wrapped"] - sizes["plain"]) < 256, sizes
    load_model(model, folder / f"plain-{group_of().rank}")
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert not optimizer.buckets[0].moved_indices()


@pytest.mark.ranks(2)
def test_every_rank_may_ask_for_the_state_while_there_is_none() -> None:
    """As accelerate does, which loads what it gets, on all ranks."""
    model = nn.Linear(3, 1, bias=False)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    ours = OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        assert_equal(ours.state_dict(), plain.state_dict())
        ours.load_state_dict(ours.state_dict())
        for each in (plain, ours):
            each.param_groups[0]["lr"] *= 0.5
    messages = []
    model.weight.grad = torch.ones_like(model.weight)
    ours.step()
    begun = OSS(nn.Linear(1, 1, bias=False).parameters(), torch.optim.Adagrad)  # One rank of two has all of its state.
    for optimizer in (ours, begun):
        with pytest.raises(RuntimeError) as caught:
            optimizer.state_dict()
        messages.append(str(caught.value))
    ours.load_state_dict(plain.state_dict())
    assert ours.state_dict()["state"] == {}
    # A rank that has looked at its shard knows no more than the others, which have not.
    first, second = nn.Linear(3, 1), nn.Linear(1, 1)
    grown = OSS(first.parameters(), torch.optim.AdamW, lr=0.1, options=OSSOptions(limit_seconds=20))
    if dist.get_rank() == 0:
        grown.sharded_state(ParamSlice("weight", first.weight, (1, 3), 0, 3))
    grown.add_param_group({"params": second.parameters()})
    assert grown.state_dict()["state"] == {}
    assert len(messages) == 2 and all("consolidate_state_dict(-1) where all ranks call it" in m for m in messages)


@pytest.mark.ranks(2)
def test_a_training_with_rounded_parameters_is_resumed() -> None:
    """A training that goes on from what was saved is the one that was not cut off, in whatever order it is loaded."""

    def begin(name: str) -> tuple[nn.Module, OSS]:
        params = plain_params(shapes_for(name))
        cls, kwargs = OPTIMIZERS[name]
        return model_of(params), OSS(
            params.values(), cls, **with_options(OSSOptions, bucket_numel=BUCKET_NUMEL, broadcast_fp16=True, **kwargs)
        )

    for name in OPTIMIZERS:
        model, ours = begin(name)
        train(ours, model.parameters(), range(3))
        weights, state = copy.deepcopy(model.state_dict()), ours.state_dict(all_ranks=True)
        sharded = (
            None if name == "lamb" else copy.deepcopy(sharded_state_dict(model, ours))
        )  # Which has lists of tensors.
        train(ours, model.parameters(), range(3, 6))
        for way in range(2 if sharded is None else 3):
            again, optimizer = begin(name)
            if sharded is not None and way == 2:
                load_sharded_state_dict(sharded, again, optimizer)
            if way == 1:
                optimizer.load_state_dict(state)
            if way < 2:
                again.load_state_dict(weights)
            if way == 0:
                optimizer.load_state_dict(state)
            train(optimizer, again.parameters(), range(3, 6))
            assert_equal(again.state_dict(), model.state_dict(), f"{name}, way {way}")
        plain_side(name)[1].load_state_dict(state)


@pytest.mark.ranks(2)
def test_the_state_is_found_by_the_parameters() -> None:
    params = plain_params(MATRICES)
    for name, whole in (("adamw", False), ("lamb", True)):
        cls, kwargs = OPTIMIZERS[name]
        ours = OSS(params.values(), cls, **with_options(OSSOptions, bucket_numel=BUCKET_NUMEL, **kwargs))
        train(ours, params.values(), range(2))
        places = [ours.sharded_state(ParamSlice("", param, tuple(param.shape), 0, 0)) for param in params.values()]
        mine = [param for param, place in zip(params.values(), places, strict=True) if place.state != "nothing"]
        assert {id(param) for param in ours.state} == {id(param) for param in mine} and len(ours.state) == len(mine)
        for param, place in zip(params.values(), places, strict=True):
            held = ours.state[param]
            assert (param in ours.state) == any(param is each for each in mine) == bool(held)
            moment = held.get("moments", [None])[0] if whole else held.get("exp_avg")
            assert moment is None or moment.shape == place.owner.shape
        others = [param for param in params.values() if id(param) not in map(id, mine)]
        assert others or not whole
        for param in others:
            ours.state[param] = {"step": 5}
            assert not ours.state[param] and len(ours.optim.state) == len(mine)
            with pytest.raises(KeyError):
                del ours.state[param]
        ours.state = defaultdict(dict, {mine[0]: ours.state[mine[0]]})
        assert [id(param) for param in ours.state] == [id(mine[0])] and len(ours.optim.state) == 1
        assert ours.state.get(params["fifth"], 5) == 5 and len(ours.state) == 1
        train(ours, params.values(), [2])
        assert len(ours.state) == len(mine)


# State as each rank has it, saved and loaded at other world sizes.


def mixed(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, OSS]:
    """A model of which one half is in shards, and one optimizer for all of it."""
    params = plain_params(shapes_for("adafactor"), dtype)
    names = list(params)
    shards = Shards({name: params[name] for name in names[:3]})
    model = model_of({**shards.params, **{name: params[name] for name in names[3:]}})
    model.shards = shards  # type: ignore[assignment]  # what holds the shards must live as long as they do
    return model, OSS(model.parameters(), torch.optim.Adafactor, lr=0.01, options=OSSOptions(bucket_numel=BUCKET_NUMEL))


def built(name: str, sharded: bool) -> tuple[nn.Module, OSS]:
    if name == "mixed":
        return mixed()
    params, optimizer, shards = our_side(name, sharded)
    model = model_of(params)
    model.shards = shards  # type: ignore[assignment]
    return model, optimizer


WAYS = [("adamw", False), ("adamw", True), ("adafactor", False), ("mixed", True)]


def save_all(folder: Path) -> None:
    for number, (name, sharded) in enumerate(WAYS):
        model, optimizer = built(name, sharded)
        train(optimizer, model.parameters(), range(3))
        state = sharded_state_dict(model, optimizer)
        save_snapshot(folder / f"{number}", 3, state)
        dcp.save({"train": state}, checkpoint_id=folder / f"dcp-{number}")


def load_all(folder: Path) -> None:
    """A fresh optimizer, at another world size, trains on as the one that was saved."""
    for number, (name, sharded) in enumerate(WAYS):
        model, optimizer = built(name, sharded)
        optimizer.consolidate_state_dict(-1)
        read = load_snapshot(folder / f"{number}", lambda saved, m=model, o=optimizer: target_state_dict(m, o, saved))
        load_sharded_state_dict(read.state, model, optimizer, copy=False)
        with pytest.raises(RuntimeError, match="was not gathered"):  # What was gathered is none of what was loaded.
            optimizer.state_dict()
        other, its = built(name, sharded)
        path = folder / f"dcp-{number}"
        target = dcp_target(path, other, its, key="train")
        dcp.load({"train": target}, checkpoint_id=path)
        load_sharded_state_dict(target, other, its, copy=False)
        straight, third = built(name, sharded)
        train(third, straight.parameters(), range(5))
        for trained, by, how in ((model, optimizer, "snapshot"), (other, its, "dcp")):
            train(by, trained.parameters(), range(3, 5))
            assert_equal(dict(trained.named_parameters()), dict(straight.named_parameters()), how)
            assert_equal(by.state_dict(all_ranks=True), third.state_dict(all_ranks=True), how)
    model, optimizer = built("sgd", False)
    with pytest.raises(SnapshotError, match="belongs to another optimizer"):
        load_snapshot(folder / "0", lambda saved: target_state_dict(model, optimizer, saved))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # What DCP says in a world of one.
def test_sharded_states_load_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(save_all, 3, tmp_path)
    run_ranks(load_all, 2, tmp_path)
    load_all(tmp_path)


# What changes on the way, and what must not.


@pytest.mark.ranks(2, 4)  # At 4 some ranks have no parameter at all.
def test_added_groups_and_frozen_parameters_have_plain_states() -> None:
    theirs = plain_params({"first": (3, 2), "second": (2,)}) | plain_params({"half": (5,)}, torch.bfloat16)
    mine = {name: nn.Parameter(param.detach().clone()) for name, param in theirs.items()}
    pairs = [(list(theirs.values()), torch.optim.Adam), (list(mine.values()), OSS)]
    made = []
    for params, cls in pairs:
        params[0].requires_grad_(False)
        named = [("first", params[0]), ("half", params[2])]
        kwargs = {"optim": torch.optim.Adam} if cls is OSS else {}
        made.append(cls([{"params": named, "lr": 0.1}], lr=0.01, **kwargs))
    for step in range(4):
        for optimizer, (params, _) in zip(made, pairs, strict=True):
            if step == 1:
                optimizer.add_param_group({"params": [("second", params[1])]})
            params[0].requires_grad_(step == 2)
            train(optimizer, [p for p in params if step or p is not params[1]], [step])
        plain, ours = made
        assert_equal(ours.state_dict(all_ranks=True), plain.state_dict(), f"step {step}")
        assert_equal(dict(enumerate(pairs[1][0])), dict(enumerate(pairs[0][0])), f"weights, step {step}")
    fresh = OSS([{"params": list(p)} for p in ([mine["first"], mine["half"]], [mine["second"]])], torch.optim.Adam)
    fresh.load_state_dict(made[0].state_dict())
    assert_equal([g["lr"] for g in fresh.param_groups], [0.1, 0.01], "rates")
    saved, its = made[0].state_dict()["state"], fresh.state_dict(all_ranks=True)["state"]
    assert_equal(its, saved, "loaded")


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    params, plain = plain_side("adamw")
    train(plain, params.values(), range(2))
    good = plain.state_dict()
    _, ours, _ = our_side("adamw", False)
    ours.load_state_dict(good)
    before = ours.state_dict(all_ranks=True)

    def refused(bad: Any, text: str) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            ours.load_state_dict(bad)
        assert text in str(caught.value), caught.value
        assert_equal(ours.state_dict(all_ranks=True), before, text)

    bad = copy.deepcopy(good)
    bad["param_groups"].append({**bad["param_groups"][0], "params": []})
    refused(bad, "has 2 parameter groups, the optimizer 1")
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["params"].pop()
    del bad["state"][6]
    refused(bad, "group 0 has 6 parameters in the state dict, and 7 in the optimizer")
    bad = copy.deepcopy(good)
    bad["state"][6]["exp_avg"] = torch.zeros(2, 2)
    refused(bad, "'exp_avg' of 'parameter 6 of group 0' has shape (2, 2), expected (5, 13) or a number")
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["momentum"] = bad["param_groups"][0].pop("betas")
    refused(bad, "has the option 'momentum', which this one does not know, and no 'betas'")
    bad = copy.deepcopy(good)
    bad["state"][99] = {}
    refused(bad, "a state of parameter 99, which is in none of its groups")
    from_file = "Load the saved file on every rank, or call consolidate_state_dict(recipient_rank=-1)"
    refused(None, f"got NoneType. {from_file}")
    with pytest.raises((TypeError, ValueError), match=r"got NoneType") as caught:
        ours.load_state_dict(None if group_of().rank else good)
    assert isinstance(caught.value, TypeError) == bool(group_of().rank)
    other = copy.deepcopy(good)
    other["state"][0]["step"] += group_of().rank
    with pytest.raises(ContractError, match=r"the ranks differ in the state dict given to OSS.*parameter 0"):
        ours.load_state_dict(other)
    assert_equal(ours.state_dict(all_ranks=True), before)
    with pytest.raises(ContractError, match=r"rank 0: recipient_rank=0; rank 1: recipient_rank=1"):
        ours.consolidate_state_dict(group_of().rank)
    with pytest.raises(ValueError, match=r"0 to 1, or -1 for all of them, got 2"):
        ours.consolidate_state_dict(2)
    state = ours.optim.state[ours.local_params[0]]
    if group_of().rank:
        state["rows"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"\.rows has shape \(2,\), .*elementwise=False\)\) \(on rank 1\)"):
        ours.consolidate_state_dict()
    state.pop("rows", None)
    state["step"] += group_of().rank
    with pytest.raises(ValueError, match=r"parameter 0 of group 0\.step differs between the ranks: .*step together"):
        ours.consolidate_state_dict()
    if group_of().rank:
        del ours.optim.state[ours.local_params[0]]
    with pytest.raises(ValueError, match=r"parameter 0 of group 0\.step is there on rank 0, but not on rank 1"):
        ours.consolidate_state_dict()


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made inside and still there, and the most of them at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if not tensor.is_meta and storage._cdata not in before and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return made

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


@pytest.mark.ranks(2)
def test_the_state_goes_to_the_host_bucket_by_bucket() -> None:
    """The most elements that are put together on the recipient's device at a time."""
    from scale_core.state import full_optim_state as gathering

    largest = 0
    original = gathering.all_to_all

    def watched(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        largest = max(largest, output.numel())
        return original(output, *args, **kwargs)

    gathering.all_to_all = watched
    for name, sharded in (("adamw", False), ("adamw", True), ("lamb", True), ("muon", False)):
        params, ours, _ = our_side(name, sharded) if name in OPTIMIZERS else our_side("lamb", False)
        train(ours, params.values(), range(1))
        ours.consolidate_state_dict()
    recipient, other = gather_values(largest)
    assert recipient <= max(66, BUCKET_NUMEL) and other == 0  # The largest tensor has 66 elements.


@pytest.mark.ranks(2)
def test_the_peak_is_the_state_and_one_bucket() -> None:
    """What consolidating, and loading twice, take at most, in bytes; of four matrices with 8 KB each."""
    matrix, small = 64 * 32 * 4, 500
    whole = 4 * 2 * matrix
    params = [nn.Parameter(torch.ones(64, 32)) for _ in range(4)]
    optimizer = OSS(params, torch.optim.Adam, options=OSSOptions(bucket_numel=64 * 32))
    train(optimizer, params, range(1))
    with Live() as gathering:
        optimizer.consolidate_state_dict()
    state = optimizer.state_dict(all_ranks=True)
    fresh = OSS([nn.Parameter(torch.ones(64, 32)) for _ in range(4)], torch.optim.Adam)
    with Live() as loading:
        fresh.load_state_dict(state)
    with Live() as again:
        fresh.load_state_dict(state)
    (recipient, *loads), (other, *others) = gather_values((gathering.peak, loading.peak, again.peak))
    assert whole + matrix <= recipient <= whole + 1.5 * matrix + small  # a bucket, and this rank's shard of it
    assert 0.5 * matrix <= other <= 0.5 * matrix + small
    for load in (*loads, *others):
        assert whole / 2 <= load <= whole / 2 + small


def test_flat_parameters_say_how_their_state_is_gathered() -> None:
    params = plain_params()
    shards = Shards(params, Group(), flatten=True)
    optimizer = OSS(shards.params.values(), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"full_optim_state_dict\(model, optimizer\.optim\)"):
        optimizer.consolidate_state_dict()


@pytest.mark.simulation
@pytest.mark.parametrize("rank", range(3))
def test_simulated_ranks_share_what_this_one_does_not_hold(rank: int) -> None:
    with simulate(rank=rank, world_size=3):
        shards = Shards(plain_params())
        optimizer = OSS(shards.params.items(), torch.optim.AdamW, lr=0.1)
        places = [place for bucket in optimizer.in_place_buckets for place in bucket.placements]
        assert [place.name for place in places] == list(shards.params) and group_of().size == 3
        for place in places:
            shard = shard_of(place.param)
            assert shard is not None and place.local_range == (shard.start, shard.stop), place.name
            assert len(place.ranges) == 3
            assert place.ranges[0].start == 0 and place.ranges[-1].stop == shard.numel, place.name
            assert all(before.stop == after.start for before, after in pairwise(place.ranges)), place.name
