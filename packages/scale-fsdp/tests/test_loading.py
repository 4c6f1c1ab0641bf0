"""A state that does not fit changes nothing, and says what does not; what may fit in the end is left to the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_cases import TOKENS, Awkward, Layout
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scale_check.exact import assert_equal
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
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
