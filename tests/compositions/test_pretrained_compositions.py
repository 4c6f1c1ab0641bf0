"""Weights of transformers, in and out of models that several techniques hold together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from scale_core.testing import run_ranks
from scale_fsdp import ShardOptions, fully_shard, fully_shard_modules, no_split_policy
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, split
from scale_snapshot import load_pretrained, save_pretrained
from scale_snapshot.format.safetensors_io import read_entries
from scale_snapshot.format.stored_file import opened
from scale_tp import parallelize

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=3, num_experts_per_tok=1))


def stages_of_units(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    stages = split(model, ["model.layers.1"])
    pipe = DistributedPipe(stages, chunks=2, process_group=mesh["pipe"])
    for index, stage in pipe.stages.items():
        pipe.stages[index] = fully_shard(stage, mesh=mesh["data"], options=ShardOptions(init=False))
    return pipe


def units_of_parts(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize(model, process_group=mesh["tensor"].get_group())
    return fully_shard_modules(model, no_split_policy(model), mesh=mesh["data"], options=ShardOptions(init=False))


def sharded_optimizer(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]  # of transformers
    return ShardedDataParallel(model, OSS(model.parameters(), torch.optim.SGD, lr=0.1))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "pipe and fsdp, llama": (llama, stages_of_units),
    "pipe and fsdp, mixtral": (mixtral, stages_of_units),
    "tp and fsdp, llama": (llama, units_of_parts),
    "oss, mixtral": (mixtral, sharded_optimizer),
}


def load_and_save(folder: str) -> None:
    for name, (build, wrap) in CASES.items():
        with torch.device("meta"):
            model = build()
        model = wrap(model)
        load_pretrained(model, f"{folder}/{name}")
        save_pretrained(model, f"{folder}/{name} again", max_shard_size="4KB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    for name, (build, _) in CASES.items():
        torch.manual_seed(3)
        model: Any = build()
        model.save_pretrained(path / name, max_shard_size="4KB")
    run_ranks(load_and_save, 4, str(path))
    return path


def stored(folder: Path) -> dict[str, bytes]:
    """Each tensor's bytes."""
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        with opened(file) as reading:
            for entry, begin in read_entries(reading):
                found[entry.name] = data[begin : begin + entry.num_bytes]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_model_on_two_axes_publishes_what_was_published(folder: Path, name: str) -> None:
    assert stored(folder / f"{name} again") == stored(folder / name)
    kind: Any = MixtralForCausalLM if "mixtral" in name else LlamaForCausalLM
    models = [kind.from_pretrained(f"{folder}/{each}") for each in (name, f"{name} again")]
    assert all(torch.equal(one, other) for one, other in zip(*(each.parameters() for each in models), strict=True))
