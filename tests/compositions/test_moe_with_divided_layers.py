"""Experts of a Mixtral beside attention that scale-tp divides, or whose sequences it divides, on four ranks.

Three clipped steps equal one process: losses, norms, full weights, and a snapshot that one process reads.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trainings import assert_parity, recorded, train

import scale_tp
from scale_check.recording import Recording
from scale_core import clip_grad_norm_
from scale_core.comm.group import Group
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.state_dict import target_state_dict
from scale_core.testing import preload
from scale_fsdp import fully_shard
from scale_moe import average_replicated_gradients, parallelize_experts
from scale_snapshot import load_snapshot, save_snapshot

transformers = pytest.importorskip("transformers")
preload("transformers.models.mixtral.modeling_mixtral")

WORDS, LENGTH, CLIP = 19, 8, 0.5
ATTENTION = {"model.layers.*.self_attn.[qkv]_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}


def mixtral() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def batch_of(rows: slice) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[rows], "labels": ids[rows]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def train_on(
    model: nn.Module, batch: dict[str, Tensor], folder: Path | None = None, mesh: DeviceMesh | None = None
) -> Recording:
    """Three clipped steps, within a context of divided sequences if there is a mesh; saves a snapshot in a folder."""
    optimizer = optimizer_of(model)

    def loss_of(model: Any, step: int) -> Tensor:
        if mesh is None:
            return model(**batch).loss
        with scale_tp.context_parallel(mesh):
            loss: Tensor = model(**batch).loss
            loss.backward()
        return loss.detach()

    clip = partial(clip_grad_norm_, list(model.parameters()), CLIP)
    trained = train(model, optimizer, loss_of, range(3), clip=clip, state=model.state_dict)
    if folder:
        save_snapshot(folder, 3, sharded_state_dict(model, optimizer))
    return trained


def assert_as_one_process(trained: Recording, folder: Path | None = None) -> None:
    """Compares with one process, which also reads the snapshot of a folder."""
    model = mixtral()
    assert_parity(train_on(model, batch_of(slice(4))), by_rank(trained), rel=1e-5)
    if folder is not None:
        alone = mixtral()
        fresh = optimizer_of(alone)
        read = load_snapshot(folder, partial(target_state_dict, alone, fresh), Group())
        load_sharded_state_dict(read.state, alone, fresh, copy=False)
        assert_parity(recorded([0.0], model.state_dict()), [recorded([0.0], alone.state_dict())], rel=1e-5)


def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))


@pytest.mark.composition("scale-moe", "scale-tp")
@pytest.mark.composition("scale-moe", "scale-tp", "scale-fsdp")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.ranks(4, in_turn=True)
def test_divided_attention_and_experts_train_as_one_process(sharded: bool, tmp_path: Path) -> None:
    mesh, model = two_axes(), mixtral()
    parallelize_experts(model, mesh)
    scale_tp.parallelize(model, ATTENTION, mesh["tensor"])
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, Group())
            fully_shard(layer, mesh["expert"])
        fully_shard(model, mesh["expert"])
    else:
        average_replicated_gradients(model, mesh["expert"])
    row = mesh["expert"].get_local_rank()
    assert_as_one_process(train_on(model, batch_of(slice(2 * row, 2 * row + 2)), tmp_path), tmp_path)


@pytest.mark.composition("scale-moe", "context parallel")
@pytest.mark.ranks(4, in_turn=True)
def test_divided_sequences_and_experts_train_as_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model = parallelize_experts(mixtral())
    average_replicated_gradients(model)
    row = mesh["data"].get_local_rank()
    batch = batch_of(slice(2 * row, 2 * row + 2))
    part = scale_tp.get_batch_on_this_cp_rank(batch, mesh["context"], loss_process_group=dist.group.WORLD)
    assert_as_one_process(train_on(model, part, mesh=mesh["context"]))


@pytest.mark.ranks(4)
def test_experts_of_a_divided_sequence_are_refused() -> None:
    mesh, model = two_axes(), mixtral()
    parallelize_experts(model, mesh)
    with pytest.raises(ValueError, match=r"sequence_parallel=True: 'model.layers.0.mlp.gate' .* is not divided"):
        scale_tp.parallelize(model, ATTENTION, mesh["tensor"], sequence_parallel=True)
