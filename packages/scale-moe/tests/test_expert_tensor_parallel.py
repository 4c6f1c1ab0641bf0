"""Experts on a mesh of two axes: ranks of the second divide the hidden features of each expert, and share tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.mixtral.modeling_mixtral  # noqa: F401  # For the server that ranks are forked from
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from scale_core import clip_grad_norm_
from scale_core.comm.group import Group, GroupLike
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.state_dict import target_state_dict
from scale_moe import Balance, Experts, MoE, TokenChoice, average_replicated_gradients, parallelize_experts
from scale_moe.experts import ExpertSharding
from scale_moe.mesh_info import ExpertMesh, resolve_expert_mesh
from scale_moe.parallelize import ParallelExperts
from scale_snapshot import load_snapshot, save_snapshot

DIM, HIDDEN, EXPERTS, STEPS = 5, 7, 3, 3
RULE = TokenChoice(2, capacity_factor=1.0, drop_order="choice", normalize_kept=True)
Build = Callable[[GroupLike], nn.Module]


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("expert", "tensor"))


class Net(nn.Module):
    def __init__(self, process_group: GroupLike, *, gated: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: Any = {"gated": gated, "balance": Balance(0.1, 0.05), "dtype": torch.float64}
        if isinstance(process_group, Group):
            options["batch_process_group"] = process_group
        shared = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.moe = MoE(DIM, HIDDEN, EXPERTS, RULE, shared_expert=shared, process_group=process_group, **options)
        self.head = nn.Linear(DIM, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.moe(x))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    dropped: list[int]
    grads: list[Tensor]  # of inputs


def train(model: Net, optimizer: torch.optim.Optimizer, first: int = 0) -> Trained:
    """Three steps; twelve tokens are divided over the expert axis."""
    group, found = model.moe.group, Trained([], [], [], [])
    for step in range(first, STEPS):
        whole = torch.randn(12, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = whole.chunk(group.size)[group.rank].clone().requires_grad_()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None and model.moe.dropped is not None
        told = torch.stack([loss.detach(), model.moe.dropped.double()])
        if group.size > 1:
            dist.all_reduce(told, group=group.process_group)
        found.losses.append(told[0].item() / group.size)
        found.dropped.append(int(told[1]))
        found.grads.append(x.grad / group.size)
        found.norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    return found


def build(name: str, **options: Any) -> Any:
    """Parts of 16 hidden features are multiples of 16 bytes, which grouped products of transformers need."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "eos_token_id": None}
    config = AutoConfig.for_model(name, **sizes, **heads, num_local_experts=3, num_experts_per_tok=2, **options)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.ranks(4)
def test_experts_with_divided_features_train_as_one_process_does() -> None:
    for gated in (True, False):
        alone = Net(Group(), gated=gated)
        expected = train(alone, optimizer_of(alone))
        assert sum(expected.dropped) > 0
        for sizes in ((2, 2), (1, 4), (4, 1)) if gated else ((2, 2),):
            mesh = mesh_of(*sizes)
            model = Net(mesh, gated=gated)
            average_replicated_gradients(model, mesh["expert"])
            found = train(model, optimizer_of(model))
            assert found.losses == pytest.approx(expected.losses, rel=1e-10), sizes
            assert found.norms == pytest.approx(expected.norms, rel=1e-7), sizes
            assert found.dropped == expected.dropped
            for grad, whole in zip(found.grads, expected.grads, strict=True):
                torch.testing.assert_close(grad, whole.chunk(sizes[0])[model.moe.group.rank], rtol=1e-9, atol=1e-12)
            state = model.state_dict()
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=f"{sizes} {name}")


@pytest.mark.ranks(4)
def test_snapshots_load_on_meshes_of_other_shapes(tmp_path: Path) -> None:
    """Two steps on a mesh of 2 x 2, then one on 1 x 4, on 4 x 1, and on one process."""
    alone = Net(Group())
    expected = train(alone, optimizer_of(alone))
    mesh = mesh_of(2, 2)
    model = Net(mesh)
    average_replicated_gradients(model, mesh["expert"])
    optimizer = optimizer_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "STEPS", 2)
        train(model, optimizer)
    save_snapshot(tmp_path, 2, sharded_state_dict(model, optimizer))
    for group in (mesh_of(1, 4), mesh_of(4, 1), Group()):
        other = Net(group)
        if isinstance(group, DeviceMesh):
            average_replicated_gradients(other, group["expert"])
        fresh = optimizer_of(other)
        only: Any = (group,) if isinstance(group, Group) else ()
        read = load_snapshot(tmp_path, partial(target_state_dict, other, fresh), *only)
        load_sharded_state_dict(read.state, other, fresh, copy=False)
        assert train(other, fresh, 2).losses == pytest.approx(expected.losses[2:], rel=1e-9)
        state = other.state_dict()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.ranks(4)
def test_models_of_transformers_compute_the_same_divided() -> None:
    mesh = mesh_of(2, 2)
    for implementation in ("eager", "grouped_mm"):
        plain, model = build("mixtral"), build("mixtral")
        for each in (plain, model):
            each.set_experts_implementation(implementation)
        parallelize_experts(model, mesh)
        average_replicated_gradients(model, mesh["expert"])
        parts = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(1)).split(2)
        mine = parts[mesh["expert"].get_local_rank()]
        model(input_ids=mine, labels=mine).loss.backward()
        (sum(plain(input_ids=part, labels=part).loss for part in parts) / 2).backward()
        for key, param in model.named_parameters():
            grad, shard = plain.get_parameter(key).grad, shard_of(param)
            if shard is None:
                torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-6, msg=key)
            else:
                sharding = model.get_submodule(key.rpartition(".")[0]).shardings[key.rpartition(".")[2]]
                part = sharding.local_part(grad, dist.get_rank())
                torch.testing.assert_close(local_tensor(param.grad), part, rtol=1e-4, atol=1e-6, msg=key)
        whole = model.state_dict()
        assert all(torch.equal(whole[key], value) for key, value in plain.state_dict().items())
        model.load_state_dict({key: value + 1 for key, value in plain.state_dict().items()})
        whole = model.state_dict()
        assert all(torch.equal(whole[key], value + 1) for key, value in plain.state_dict().items())
        experts = next(module for module in model.modules() if isinstance(module, ParallelExperts))
        assert f"part {mesh['tensor'].get_local_rank()} of 2 of their features" in repr(experts)
    oss = build("gpt_oss", layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match=r"\(GptOssExperts\) has .* and is_concatenated=False, is_transposed=True"):
        parallelize_experts(oss, mesh)


@pytest.mark.ranks(4)
def test_differing_ranks_and_odd_meshes_are_refused() -> None:
    mesh = mesh_of(2, 2)
    model = Net(mesh)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(mesh["expert"].get_local_rank())).double()
    model(x)
    other = x.flip(0) if dist.get_rank() == 1 else x  # The same tokens in another order
    with pytest.raises(ValueError, match=r"MoE \d+: ranks that divide the hidden features .* must have the same"):
        model(other)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.moe.router.weight[0, 0] += 1e-6
    with pytest.raises(ValueError, match=r"(rank 3 of \[2, 3\] has|some on another row have) different ones"):
        model(x)
    with pytest.raises(ValueError, match=r"1 hidden features of an expert can't be divided between 2 ranks"):
        Experts(3, 4, 1, process_group=mesh)
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "expert", "tensor"))
    with pytest.raises(ValueError, match=r"one dimension \(expert\) or two .* such as mesh\['expert'"):
        MoE(4, 6, 3, process_group=cube)
    reordered = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("expert", "tensor"))
    with pytest.raises(ValueError, match=r"row-major order, got \[\[0, 2\], \[1, 3\]\]: build it by init_device_mesh"):
        MoE(4, 6, 3, process_group=reordered)


def test_each_element_belongs_to_exactly_one_rank() -> None:
    """Stacked matrices are each divided by themselves; three experts of seven features over a mesh of 2 x 3."""
    mesh = ExpertMesh(Group(0, 2), Group(0, 3), Group(0, 6))
    for shape, dim, stacked in (((3, 14, 2), 1, 2), ((3, 2, 7), 2, 1)):
        sharding, whole = ExpertSharding.over(mesh, shape, dim, stacked=stacked), torch.arange(84 // (3 - stacked))
        parts = [sharding.local_part(whole.view(shape), rank) for rank in range(6)]
        assert [tuple(part.shape) for part in parts] == [sharding.local_shape(rank) for rank in range(6)]
        assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, whole)
    first = ExpertSharding.over(mesh, (3, 14, 2), stacked=2)
    assert first.hidden_ranges == (((0, 3), (7, 10)), ((3, 5), (10, 12)), ((5, 7), (12, 14)))


def test_the_shape_of_a_mesh_has_its_second_axis_if_it_has_one() -> None:
    assert resolve_expert_mesh(Group()).shape == "1"
    assert ExpertMesh(Group(0, 2), Group(0, 3), Group(0, 6)).shape == "2 x 3"
