"""Experts of a Mixtral beside attention that scale-tp divides, or whose sequences it divides, on four ranks.

Three clipped steps equal one process: losses, norms, full weights, and a snapshot that one process reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import scale_tp
from scale_core import clip_grad_norm_
from scale_core.comm.group import Group
from scale_core.snapshot import load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.state_dict import target_state_dict
from scale_core.testing import preload, run_ranks
from scale_fsdp import fully_shard
from scale_moe import average_replicated_gradients, parallelize_experts

transformers = pytest.importorskip("transformers")
preload("transformers.models.mixtral.modeling_mixtral")

WORDS, LENGTH, CLIP = 19, 8, 0.5
ATTENTION = {"model.layers.*.self_attn.[qkv]_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def mixtral() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def batch_of(rows: slice) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[rows], "labels": ids[rows]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], **context: Any) -> Trained:
    found = Trained([], [], {})
    for _ in range(3):
        optimizer.zero_grad()
        if context:
            with scale_tp.context_parallel(context["mesh"]):
                loss = model(**batch).loss
                loss.backward()
        else:
            loss = model(**batch).loss
            loss.backward()
        found.norms.append(clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found.losses.append(mean.item())
    found.state.update({name: value.clone() for name, value in model.state_dict().items()})
    return found


def attention_and_experts_divided(mesh: DeviceMesh, folder: str, *, sharded: bool) -> Trained:
    model = mixtral()
    parallelize_experts(model, mesh)
    scale_tp.parallelize(model, ATTENTION, mesh["tensor"])
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, Group())
            fully_shard(layer, mesh["expert"])
        fully_shard(model, mesh["expert"])
    else:
        average_replicated_gradients(model, mesh["expert"])
    optimizer, row = optimizer_of(model), mesh["expert"].get_local_rank()
    found = train(model, optimizer, batch_of(slice(2 * row, 2 * row + 2)))
    save_snapshot(folder, 3, sharded_state_dict(model, optimizer))
    return found


def sequences_and_experts_divided() -> Trained:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model = parallelize_experts(mixtral())
    average_replicated_gradients(model)
    row = mesh["data"].get_local_rank()
    whole = batch_of(slice(2 * row, 2 * row + 2))
    part = scale_tp.get_batch_on_this_cp_rank(whole, mesh["context"], loss_process_group=dist.group.WORLD)
    return train(model, optimizer_of(model), part, mesh=mesh["context"])


def a_divided_sequence_is_refused(mesh: DeviceMesh) -> None:
    model = mixtral()
    parallelize_experts(model, mesh)
    with pytest.raises(ValueError, match=r"sequence_parallel=True: 'model.layers.0.mlp.gate' .* is not divided"):
        scale_tp.parallelize(model, ATTENTION, mesh["tensor"], sequence_parallel=True)


def all_ways(folder: str) -> dict[str, Trained]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
    found = {
        "divided": attention_and_experts_divided(mesh, f"{folder}/divided", sharded=False),
        "sharded": attention_and_experts_divided(mesh, f"{folder}/sharded", sharded=True),
        "sequences": sequences_and_experts_divided(),
    }
    a_divided_sequence_is_refused(mesh)
    return found


@pytest.mark.composition("scale-moe", "scale-tp")
@pytest.mark.composition("scale-moe", "scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-moe", "context parallel")
def test_a_mixtral_trains_as_one_process_does(tmp_path: Any) -> None:
    model = mixtral()
    expected = train(model, optimizer_of(model), batch_of(slice(4)))
    for name, found in run_ranks(all_ways, 4, str(tmp_path))[0].items():
        assert found.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert found.norms == pytest.approx(expected.norms, rel=1e-5), name
        assert found.state.keys() == expected.state.keys()
        for key, value in expected.state.items():
            torch.testing.assert_close(found.state[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    for name in ("divided", "sharded"):
        alone = mixtral()
        fresh = optimizer_of(alone)
        read = load_snapshot(str(tmp_path / name), partial(target_state_dict, alone, fresh), Group())
        load_sharded_state_dict(read.state, alone, fresh, copy=False)
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(value, expected.state[key], rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
