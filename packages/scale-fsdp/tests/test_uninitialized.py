"""Models that wait for a checkpoint on the meta device, and what is said where something got no values."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from shard_arguments import shard_arguments
from test_meta_init import Rotary, layers, on_meta
from torch import nn

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import ShardOptions, fully_shard, fully_shard_modules, name_policy
from scale_snapshot import load_snapshot, save_snapshot


def deferred(build=layers, **kwargs) -> nn.Module:
    return fully_shard_modules(on_meta(build), name_policy("0"), **shard_arguments(init=False, **kwargs))


def equal(model: nn.Module, plain: nn.Module) -> bool:
    x = torch.ones(2, 3)
    return torch.equal(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("flatten", [False, True])
def test_a_full_checkpoint_goes_straight_into_a_model_on_meta(flatten):
    plain = layers()
    model = deferred(flatten_parameters=flatten)
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"'1.weight' of the root unit is on the meta device.*to_empty\(device="):
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="on the meta device and have no memory yet"):
        model.load_state_dict(plain.state_dict())
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.to_empty(device="cpu") is model
    with pytest.raises(RuntimeError, match=r"nothing was written to '1.weight' of the root unit.*load a checkpoint"):
        model(torch.ones(2, 3))
    model.load_state_dict(plain.state_dict())
    assert equal(model, plain)


def test_what_a_checkpoint_lacks_is_no_number():
    model = deferred().to_empty(device="cpu")
    state = layers().state_dict()
    del state["0.bias"]
    model.load_state_dict(state, strict=False)
    assert model(torch.ones(2, 3)).isnan().all()


def test_a_buffer_that_is_not_saved_must_be_written_first():
    plain = nn.Sequential(Rotary())
    model = deferred(lambda: nn.Sequential(Rotary())).to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"the buffer '0.inv_freq' has had no values since it was on the"):
        model(torch.ones(2, 3))
    model[0].inv_freq.copy_(plain[0].inv_freq)
    with pytest.raises(RuntimeError, match=r"the buffer '0.mask' has had no values"):
        model(torch.ones(2, 3))
    model[0].mask = plain[0].mask
    assert equal(model, plain)


def test_a_model_on_meta_neither_gives_nor_takes_a_state():
    model, full = deferred(), fully_shard(layers())
    for call in (lambda: sharded_state_dict(model), lambda: load_sharded_state_dict(sharded_state_dict(full), model)):
        with pytest.raises(ValueError, match=r"0.weight is on the meta device.*model.to_empty\(device=...\) before"):
            call()


@pytest.mark.ranks(2)
def test_a_sharded_checkpoint_goes_straight_into_a_model_on_meta(tmp_path):
    directory = str(tmp_path)
    torch.manual_seed(group_of().rank)
    model = fully_shard_modules(layers(), name_policy("0"))
    state = model.state_dict()
    save_snapshot(f"{directory}/ours", 1, sharded_state_dict(model))
    dcp.save(sharded_state_dict(model), checkpoint_id=f"{directory}/torch")

    def by_snapshot(empty: nn.Module) -> None:
        load_snapshot(f"{directory}/ours", lambda saved: target_state_dict(empty, None, saved))

    def by_torch(empty: nn.Module) -> None:
        dcp.load(sharded_state_dict(empty), checkpoint_id=f"{directory}/torch")

    for load in (by_snapshot, by_torch):
        empty = fully_shard(on_meta(layers), options=ShardOptions(init=False)).to_empty(device="cpu")
        load(empty)
        empty(torch.ones(2, 3))  # batch norm counts
        loaded = empty.state_dict()
        weights = [{name: each[name] for name in state if name[0] != "1"} for each in (loaded, state)]
        assert_equal(*weights, load.__name__)
