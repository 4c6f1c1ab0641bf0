"""A state that does not fit changes nothing, and says what does not; what may fit in the end is left to the module."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_cases import TOKENS, Awkward, Layout
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from scale_check.exact import assert_equal
from scale_core.errors import ContractError, ScaleDistributedError
from scale_fsdp import FullyShardedDataParallel, ShardOptions, fully_shard

CHANGES = {
    'Missing key(s) in state_dict: "body.2.weight".': lambda state: state.pop("body.2.weight"),
    'Unexpected key(s) in state_dict: "extra".': lambda state: state.update(extra=torch.ones(1)),
    "size mismatch for body.2.weight: expected the full shape (5, 6), got (6, 5)": lambda state: state.update(
        {"body.2.weight": torch.ones(6, 5)}
    ),
    "size mismatch for count: expected the full shape (2,), got (3,)": lambda state: state.update(count=torch.ones(3)),
    "'body.2.weight': expected a tensor of shape (5, 6), got str": lambda state: state.update(
        {"body.2.weight": "text"}
    ),
}


@pytest.mark.ranks(1, 2)
def test_a_state_that_does_not_fit_is_refused_or_loaded_loosely() -> None:
    for flatten in (False, True):
        model = Layout(wrapping="units", flatten=flatten).shard(Awkward(0))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for message, change in CHANGES.items():
            state = Awkward(1).state_dict()
            change(state)
            with pytest.raises(RuntimeError, match="nothing was loaded") as caught:
                model.load_state_dict(state)
            assert message in str(caught.value), caught.value
            assert_equal(model, before, message)
        state = {**Awkward(1).state_dict(), "extra": torch.ones(1)}
        del state["scale"]
        result = model.load_state_dict(state, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["scale"], ["extra"])
        assert_equal(model, {**Awkward(1).state_dict(), "scale": before["scale"]}, "loose")
        with pytest.raises(RuntimeError, match="size mismatch for scale"):
            model.load_state_dict({"scale": torch.ones(2)}, strict=False)


def test_a_module_that_changes_its_state_is_not_judged_before() -> None:
    class Renaming(nn.Linear):
        """A module that still reads what its older version wrote."""

        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
            if prefix + "old" in state_dict:
                state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = nn.Sequential(fully_shard(Renaming(2, 2, bias=False)))
    model.load_state_dict({"0.old": torch.full((2, 2), 7.0)})
    assert torch.equal(model.state_dict()["0.weight"], torch.full((2, 2), 7.0))
    hooked = fully_shard(nn.Linear(2, 2, bias=False))
    hooked.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(weight=state.pop("old")))
    hooked.load_state_dict({"old": torch.full((2, 2), 7.0)})
    assert torch.equal(hooked.state_dict()["weight"], torch.full((2, 2), 7.0))


def test_an_old_batch_norm_may_lack_its_counter() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3))
    state = plain.state_dict()
    del state["0.num_batches_tracked"]
    state._metadata["0"]["version"] = 1
    fully_shard(nn.Sequential(nn.BatchNorm1d(3))).load_state_dict(state)


@pytest.mark.fault(64)
def test_parameters_in_use_are_not_loaded() -> None:
    model = fully_shard(Awkward())
    with model.summon_full_params(), pytest.raises(RuntimeError, match=r"load_state_dict: .* in use, .* between steps"):
        model.load_state_dict(Awkward(1).state_dict())
    model.unshard()
    with pytest.raises(RuntimeError, match="gathered by hand"):
        model.load_state_dict(Awkward(1).state_dict())
    model.reshard()
    model(TOKENS)
    model.load_state_dict(Awkward(1).state_dict())
    assert torch.equal(model.state_dict()["scale"], Awkward(1).scale)


def test_what_one_rank_alone_has_saved_is_no_full_state() -> None:
    model = FullyShardedDataParallel(Awkward())
    with pytest.raises(ValueError, match=r"one rank alone: call load_local_state_dict\(state_dict\), or consolidate"):
        model.load_state_dict(model.local_state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_a_state_of_dtensors_is_loaded_as_full_tensors(flat: bool) -> None:
    """As programs for FSDP2 make it. With an odd number of rows, our shards differ from the DTensors' shards."""
    mesh = init_device_mesh("cpu", (2,))
    for rows in (3, 4):
        options = ShardOptions(flatten_parameters=flat)
        model = fully_shard(nn.Sequential(nn.Linear(2, rows), nn.BatchNorm1d(rows)), options=options)
        expected = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
        state = dict(expected)
        for name in [name for name in state if "weight" in name or "bias" in name]:
            placement = Shard(0) if "weight" in name else Replicate()
            state[name] = nn.Parameter(distribute_tensor(state[name], mesh, [placement]))
        params = list(model.parameters())
        for assign in (False, True):
            model.load_state_dict({name: torch.zeros_like(value) for name, value in expected.items()})
            model.load_state_dict(state, assign=assign)
            assert_equal(dict(model.state_dict()), expected)
            assert model.state_dict()["0.weight"].full_tensor().sum() == 4 * rows
        assert all(param is old for param, old in zip(model.parameters(), params, strict=True)), "shards were replaced"
        model(torch.ones(2, 2)).sum().backward()


ON_RANK_1 = {
    "wrong shape": (lambda state: state.update({"0.weight": torch.ones(4, 2)}), "size mismatch for 0.weight"),
    "missing": (lambda state: state.pop("0.weight"), 'Missing key.* "0.weight"'),
    "unexpected": (lambda state: state.update(extra=torch.ones(1)), 'Unexpected key.* "extra"'),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ON_RANK_1)
def test_a_state_that_fits_all_ranks_but_one_is_refused_on_all(case: str) -> None:
    """As DTensors, which all ranks gather together, and as full tensors, which each rank has for itself."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    change, message = ON_RANK_1[case]
    for as_dtensors, flat in itertools.product((False, True), repeat=2):
        model = fully_shard(nn.Sequential(nn.Linear(2, 3)), options=ShardOptions(flatten_parameters=flat))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = {name: value + 1 for name, value in before.items()}
        if as_dtensors:
            state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
        if rank == 1:
            change(state)
        with pytest.raises(RuntimeError, match=message) as caught:
            model.load_state_dict(state)
        assert ("(on rank 1)" in str(caught.value)) == (rank == 0)
        assert_equal(dict(model.state_dict()), before, "nothing was loaded")


@pytest.mark.ranks(2)
def test_ranks_that_have_other_dtensors_are_refused_on_all() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for outer in (False, True):
        model = fully_shard(nn.Linear(2, 3))
        model = nn.Sequential(model) if outer else model
        prefix = "0." if outer else ""
        state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model.state_dict().items()}
        if dist.get_rank() == 1:
            del state[prefix + "weight"]
        with pytest.raises(ContractError, match=f"'{prefix}weight'.*load a state dict with the same DTensors on all"):
            model.load_state_dict(state, strict=False)


@pytest.mark.ranks(2)
def test_a_module_around_units_refuses_on_all_ranks_what_one_has() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    model = nn.Sequential(fully_shard(nn.Linear(2, 3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: distribute_tensor(value + 1, mesh, [Shard(0)]) for name, value in before.items()}
    if rank == 1:
        state["0.bias"] = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.bias: expected the full shape \(3,\)"):
        model.load_state_dict(state)
    assert_equal(dict(model.state_dict()), before)


@pytest.mark.ranks(2)
def test_a_mistake_that_all_ranks_have_is_listed_once() -> None:
    """As where a checkpoint of another model is loaded: the message must not grow with the number of ranks."""
    model = nn.Sequential(fully_shard(nn.Linear(2, 3)))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias") as caught:
        model.load_state_dict({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(4)})
    assert str(caught.value).count("0.bias") == 1 and "on rank" not in str(caught.value)


@pytest.mark.ranks(2)
def test_a_hook_of_one_rank_does_not_part_the_ranks() -> None:
    """With foreign hooks units are compared one by one: by all ranks, also if rank 0 only prints in its hook."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 3)), nn.Linear(3, 2)))
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    called = []
    if dist.get_rank() == 0:
        model.register_load_state_dict_pre_hook(lambda *arguments: called.append(1))
    model.load_state_dict(state)
    assert_equal(dict(model.state_dict()), state)
    model(torch.ones(2, 2)).sum().backward()
    assert len(called) == (dist.get_rank() == 0)


@pytest.mark.ranks(2)
def test_one_rank_that_loads_alone_is_named() -> None:
    """In plain PyTorch this is right before DistributedDataParallel; here the other shards would keep their values."""
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ScaleDistributedError, match="rank 0: load_state_dict of the root unit; rank 1: "):
        if dist.get_rank() == 0:
            model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        model(torch.ones(1, 2)).sum().backward()


def assigned(model: nn.Module) -> dict[str, Tensor]:
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert_equal(dict(model.state_dict()), state)
    return state


@pytest.mark.parametrize("outer", [False, True])
def test_assign_copies_all_tensors_of_a_unit_alike(outer: bool) -> None:
    """Also buffers of modules that have no parameters, and parameters that are not sharded."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2), nn.BatchNorm1d(2))
    ignored = plain[2].weight, plain[2].bias
    model = fully_shard(plain, ignored_params=set(ignored))
    tensors = [*model.parameters(), *model.buffers()]
    state = assigned(nn.Sequential(model) if outer else model)
    assert all(map(operator.is_, [*model.parameters(), *model.buffers()], tensors))
    model(torch.ones(2, 2)).sum()  # Running averages change.
    assert all(bool((value == 2).all()) for value in state.values()), "the program's own tensors were changed"


def test_a_buffer_of_a_different_dtype_is_not_assigned() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)))
    for module, name in (
        (model, "1.running_mean"),
        (model[1], "running_mean"),
        (nn.Sequential(model), "0.1.running_mean"),
    ):
        with pytest.raises(RuntimeError, match=f"dtype mismatch for {name}"):
            module.load_state_dict({name: torch.ones(2).double()}, strict=False, assign=True)


def test_assign_gives_memory_to_buffers_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    fully_shard(model)
    model[1].to("meta")
    state = {**model[0].state_dict(prefix="0."), "1.running_mean": torch.ones(2), "1.running_var": torch.ones(2)}
    model.load_state_dict({**state, "1.num_batches_tracked": torch.tensor(3)}, assign=True)
    assert torch.equal(model[1].running_mean, torch.ones(2)) and int(model[1].num_batches_tracked) == 3


def test_values_of_a_different_dtype_are_not_assigned() -> None:
    model = nn.Sequential(fully_shard(nn.Linear(2, 2)))
    state = {name: value.double() for name, value in nn.Sequential(nn.Linear(2, 2)).state_dict().items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inner = {name.removeprefix("0."): value for name, value in state.items()}
    for module, values in ((model, state), (model[0], inner)):
        with pytest.raises(RuntimeError, match=r"dtype mismatch for .*weight: the model.s is torch.float32"):
            module.load_state_dict(values, assign=True)
    assert_equal(dict(model.state_dict()), before)
    model.load_state_dict(state)
