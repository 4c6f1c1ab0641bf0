"""base.py: what all layers have in common: parameters of which each rank has a part."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from with_options import with_options

from scale_core import ShardedGradScaler, clip_grad_norm_
from scale_core.comm.group import Group, group_of
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_snapshot import load_snapshot, save_snapshot
from scale_tp import ColumnParallelLinear, LayerOptions, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from scale_tp.layers.base import ParallelModule, ParamSharding
from scale_tp.split import Split, split_heads


class Net(nn.Module):
    """One of each layer; the head is the embedding, and there are fused and copied heads."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        kinds: Any = {"process_group": group}
        torch.manual_seed(0)
        self.embed = VocabParallelEmbedding(11, 6, **with_options(LayerOptions, **kinds))
        self.wide = ParallelEmbedding(5, 6, **kinds)
        self.fused = ColumnParallelLinear(
            6, 9, **with_options(LayerOptions, gather_output=False, split=_fused(group.size), **kinds)
        )
        self.mixed = RowParallelLinear(9, 6, **with_options(LayerOptions, split=_fused(group.size), **kinds))
        self.shared = ColumnParallelLinear(
            6, 1, **with_options(LayerOptions, split=split_heads(2, 1, group.size).key_value, **kinds)
        )
        self.norm = nn.LayerNorm(6)
        self.head = ColumnParallelLinear(6, 11, **with_options(LayerOptions, bias=False, **kinds))
        self.head.weight = self.embed.weight


def _fused(num_ranks: int) -> Split:
    return Split.stacked(*[Split.even(3, num_ranks)] * 3)


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ParallelModule):
            found |= {f"{path}.{name}": module.full_parameter(name) for name in module.shardings}
    return found


def with_steps(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        for param in model.parameters():
            param.grad = param.detach().sin() + step
        optimizer.step()
    return optimizer


def equal(found: nn.Module, expected: nn.Module) -> None:
    for name, value in whole_values(expected).items():
        assert torch.equal(whole_values(found)[name], value), name


def save_in_all_ways(folder: str) -> None:
    group = group_of()
    model = Net(group)
    optimizer = with_steps(model)
    # torch's functions know which part each rank has, or get full tensors.
    state, its_state = get_state_dict(model, optimizer)
    assert isinstance(state["mixed.weight"], LocalShard)
    dcp.save({"model": state, "optimizer": its_state}, checkpoint_id=f"{folder}/functions")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole_values(model).items():
        assert torch.equal(whole[name], value), name
    dcp.save({"model": model}, checkpoint_id=f"{folder}/module")
    save_snapshot(f"{folder}/snapshots", 1, sharded_state_dict(model, optimizer))
    asked = model.state_dict()  # By anybody else they are whole, too; with keep_vars they are this rank's shards.
    assert all(torch.equal(asked[name], value) for name, value in whole_values(model).items())
    assert model.state_dict(keep_vars=True)["mixed.weight"] is model.mixed.weight
    if group.rank == 0:
        torch.save({"whole": whole, "values": whole_values_of(model, whole)}, f"{folder}/whole.pt")
    dist.barrier()


def whole_values_of(model: nn.Module, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {name for path, m in model.named_modules() if isinstance(m, ParallelModule) for name in
             (f"{path}.{n}" for n in m.shardings)}  # fmt: skip
    return {name: whole[name] for name in names}


def load_in_all_ways(folder: str) -> None:
    group = group_of()
    saved = torch.load(f"{folder}/whole.pt")

    def check(model: nn.Module) -> None:
        found = whole_values(model) if group.size > 1 else dict(model.state_dict())
        for name, value in saved["values"].items():
            assert torch.equal(found[name], value), name

    def blank() -> tuple[Net, torch.optim.Optimizer]:
        model = Net(group)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = blank()
    with_steps(model)
    state, its_state = get_state_dict(model, optimizer)
    target = {"model": state, "optimizer": its_state}
    dcp.load(target, checkpoint_id=f"{folder}/functions")
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    check(model)
    model, _ = blank()
    dcp.load({"model": model}, checkpoint_id=f"{folder}/module")
    check(model)
    model, optimizer = blank()
    made = load_snapshot(f"{folder}/snapshots", lambda saved: target_state_dict(model, optimizer, saved))
    load_sharded_state_dict(made.state, model, optimizer, copy=False)
    check(model)
    for assign in (False, True):
        model, _ = blank()
        model.load_state_dict(saved["whole"], assign=assign)
        check(model)
        weight = local_tensor(model.mixed.weight)
        assert weight.untyped_storage().nbytes() == weight.numel() * 4, "the whole is not kept"
    model, _ = blank()
    set_model_state_dict(model, saved["whole"])
    check(model)


def test_parts_are_saved_and_loaded_at_another_number_of_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save_in_all_ways, 3, folder)
        run_ranks(load_in_all_ways, 2, folder)


@pytest.mark.ranks(2)
def test_optimizers_that_would_be_wrong_on_parts_are_refused() -> None:
    layer = RowParallelLinear(4, 3, process_group=group_of())
    layer(torch.ones(2, 4)).sum().backward()
    before = [param.detach().clone() for param in layer.parameters()]
    if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
        with pytest.raises(RuntimeError, match=r"Muon.step\(\): .* of a parameter of shape \(3, 4\).* OSS\("):
            torch.optim.Muon([layer.weight]).step()
    with pytest.raises(RuntimeError, match=r"LBFGS.step\(\): cat of a parameter of shape \(12,\)"):
        torch.optim.LBFGS(layer.parameters()).step(lambda: 0.0)
    assert all(torch.equal(param, old) for param, old in zip(layer.parameters(), before, strict=True))


@pytest.mark.fault(70)
@pytest.mark.ranks(2)
def test_an_infinity_on_one_rank_is_a_step_on_none() -> None:
    group = group_of()
    layer = RowParallelLinear(4, 3, process_group=group)
    before = [param.detach().clone() for param in layer.parameters()]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for scaler in (ShardedGradScaler(init_scale=2.0, device="cpu"), torch.amp.GradScaler("cpu", init_scale=2.0)):
        optimizer.zero_grad()
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        if group.rank == 1:
            layer.weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(param, old) for param, old in zip(layer.parameters(), before, strict=True))
        assert scaler.get_scale() == 1.0
    assert clip_grad_norm_(layer.parameters(), 1.0).isinf()


def test_a_tensor_of_another_shape_is_refused() -> None:
    layer = ColumnParallelLinear(4, 3, process_group=Group(1, 2, None, "fake", (0, 1)))
    wrong = {"weight": torch.zeros(5, 4), "bias": torch.zeros(3)}
    message = r"weight: expected the full tensor \(3, 4\), or the shard \(1, 4\) that rank 1 of 2 has, got \(5, 4\)"
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="size mismatch for weight") as caught:
        ColumnParallelLinear(4, 3).load_state_dict(wrong)
    assert "the part" not in str(caught.value)  # One rank has no parts; torch has said it all.


@pytest.mark.ranks(2)
def test_a_state_dict_gathers_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.ModuleDict({"first": ColumnParallelLinear(4, 4, bias=False, process_group=group_of())})
        model["second"] = nn.Identity()
        model["second"].weight = model["first"].weight
        state = model.state_dict()
        state["first.weight"].fill_(3)
        assert all(torch.all(value == 3) for value in model.state_dict().values())


def test_a_placement_says_what_each_rank_has() -> None:
    placement = ParamSharding((5, 3), 1, Split.even(3, 2))
    assert [placement.local_shape(rank) for rank in range(2)] == [(5, 2), (5, 1)]
    whole = torch.arange(15.0).view(5, 3)
    assert torch.equal(placement.local_part(whole, 1), whole[:, 2:])
    shard = placement.shard_spec(Group(1, 2, ranks=(0, 1)), "weight")
    assert (shard.name, shard.shape, shard.gathered) == ("weight", (5, 3), False)
    assert ParamSharding((4,)).local_shape(1) == (4,)
    assert ParamSharding((4,)).local_part(whole, 1) is whole


def test_a_layer_of_ones_own_gets_its_parts_and_their_values() -> None:
    class Scale(ParallelModule):
        """A parameter that is divided, with the values of the whole."""

        def __init__(self, group: Group) -> None:
            super().__init__(group)
            self.add_parameter(
                "scale", ParamSharding((5,), 0, Split.even(5, group.size)), device=None, dtype=torch.float64
            )
            self.init_parameter("scale", nn.init.normal_)

    torch.manual_seed(1)
    expected = torch.empty(5, dtype=torch.float64).normal_()
    torch.manual_seed(1)
    layer = Scale(Group(1, 2, ranks=(0, 1)))
    assert torch.equal(layer.scale.to_local(), expected[3:])
    assert shard_of(layer.scale).start == 3
