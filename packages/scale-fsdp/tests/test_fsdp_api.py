"""api.py: what lives on the host, in every combination; on a CPU the numbers must be those of the plain model."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from fsdp_cases import Case, assert_cases_train_as_plain
from shard_arguments import shard_arguments
from torch import nn

from scale_core.comm.group import Group
from scale_fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadOptimizer,
    ShardOptions,
    fully_shard,
    shard_module,
    size_policy,
)
from scale_fsdp.api import DevicePlacement, UnitOptions, UnitPrecision, placement_of
from scale_fsdp.mesh_info import MeshInfo
from scale_fsdp.runtime.unit import unit_of

ALONE = MeshInfo(Group(), Group(), Group())
PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADED = [
    Case(
        placement=(("move_params_to_cpu", params), ("move_grads_to_cpu", grads)),
        precision=precision,
        accumulate=2,
        no_sync=precision == "fp16",
        steps=2,
    )
    for (params, grads), precision in zip(
        itertools.product((True, False), (True, False)), (*PRECISIONS, "fp32"), strict=True
    )
]


@pytest.mark.ranks(2)
def test_every_host_placement_trains_as_the_plain_model() -> None:
    assert_cases_train_as_plain(OFFLOADED)


@pytest.mark.parametrize("params, grads", list(itertools.product((True, False), (True, False, None))))
def test_shards_and_gradients_are_where_the_user_says(params: bool, grads: bool | None) -> None:
    meta, cpu = torch.device("meta"), torch.device("cpu")  # Any second device will do.
    devices = placement_of(params, params if grads is None else grads, meta, ALONE).devices_for(cpu)
    assert devices.compute == meta
    assert devices.shard == (cpu if params else meta)
    assert devices.reduced == (cpu if (params if grads is None else grads) else meta)


def test_without_a_word_all_of_it_is_where_the_parameters_are() -> None:
    assert placement_of(False, False, None, ALONE) == DevicePlacement()
    devices = DevicePlacement().devices_for(torch.device("cpu"))
    assert {devices.shard, devices.compute, devices.reduced} == {torch.device("cpu")}


def test_options_hold_what_the_arguments_say() -> None:
    def options_of(**arguments: Any) -> UnitOptions:
        unit = unit_of(fully_shard(nn.Linear(2, 2), **shard_arguments(**arguments)))
        assert unit is not None
        return unit.options

    options = options_of(mp_policy=MixedPrecisionPolicy(torch.bfloat16), limit_seconds=3.0, error_if_nonfinite=True)
    assert options.precision == UnitPrecision(param_dtype=torch.bfloat16)
    assert options.limit_seconds == 3.0 and options.error_if_nonfinite
    assert options_of() == UnitOptions(mesh_info=ALONE, precision=UnitPrecision(), placement=DevicePlacement())


def test_a_model_that_stays_on_the_host_by_mistake_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 moves it to the device of its mesh; here the mesh or the model says where it computes."""
    over_nccl = dataclasses.replace(Group(), backend="nccl")
    ranks = MeshInfo(Group(), Group(), over_nccl)
    monkeypatch.setattr(shard_module, "resolve_mesh_info", lambda mesh, params: ranks)
    with pytest.warns(UserWarning, match="Linear is on the CPU and computes there, but its ranks communicate by nccl"):
        fully_shard(nn.Linear(2, 2))
    fully_shard(nn.Linear(2, 2), options=ShardOptions(compute_device="cpu"))
    assert not DevicePlacement().stays_on_host([nn.Linear(2, 2)], MeshInfo(Group(), Group(), Group()))
    assert not DevicePlacement().stays_on_host([nn.Linear(2, 2, device="meta")], ranks)
    assert not DevicePlacement().stays_on_host([nn.ReLU()], ranks)


def test_a_forward_in_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would compare nothing, and read memory that was released."""
    model = fully_shard(nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        for name in ("is_initialized", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(RuntimeError, match="runs while a CUDA graph is captured"):
            model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("call", "given", "text"),
    [
        (fully_shard, {"reshard_after_forward": "yes"}, "reshard_after_forward: expected a bool, a number of ranks"),
        (fully_shard, {"reshard_after_forward": 2}, "1 ranks do not divide into groups of 2"),
        (fully_shard, {"mp_policy": "bf16"}, "mp_policy: expected a torch.distributed.fsdp.MixedPrecisionPolicy, got"),
        (fully_shard, {"offload_policy": True}, "expected a .*CPUOffloadPolicy or OffloadPolicy, got True"),
        (fully_shard, {"error_if_nonfinite": None}, "error_if_nonfinite: expected True or False, got None"),
        (fully_shard, {"sync_module_states": None}, "expected sync_module_states to be a bool, got None"),
        (fully_shard, {"limit_seconds": "60"}, r"expected limit_seconds to be a number or None, got '60' \(str\)"),
        (fully_shard, {"compute_device": "gpu"}, "expected compute_device to be a torch.device or its name"),
        (FullyShardedDataParallel, {"flatten_parameters": "false"}, "; write flatten_parameters=False"),
        (FullyShardedDataParallel, {"move_grads_to_cpu": "cpu"}, "_to_cpu: expected True or False, got 'cpu'"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(call: Any, given: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    values = {"reshard_after_forward": 2}, {"compute_device": "gpu"}  # of the right type
    with pytest.raises(ValueError if given in values else TypeError, match=text):
        call(model, **(given if call is FullyShardedDataParallel else shard_arguments(**given)))
    assert type(model) is nn.Sequential and not model._forward_pre_hooks and not model[0]._forward_pre_hooks
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_what_is_right_is_still_taken() -> None:
    given: Any
    for given in ({"flatten_parameters": 0}, {"limit_seconds": 60}, {"compute_device": torch.device("cpu")}):
        assert isinstance(fully_shard(nn.Linear(2, 2), **shard_arguments(**given)), FSDPModule)
    FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=None)  # type: ignore[arg-type]  # FSDP1's default.
    OffloadOptimizer(torch.optim.AdamW, (param for param in fully_shard(nn.Linear(2, 2)).parameters()))
    size_policy(1e8)
    for layer in fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)]):
        assert isinstance(layer, FSDPModule)
