"""ranks.py: hybrid sharding, and what stays cut between few ranks after a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import Case, run_cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core.shard import Held, shard_of
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_fsdp.unit import units_in

HYBRID = [
    Case(replicas=2, clip=True, steps=3),
    Case(replicas=2, reshard=False, wrapping="deep", accumulate=2, steps=2),
    Case(replicas=2, precision="bf16, fp32 reduction", accumulate=2, no_sync=True, checkpointing="around", steps=2),
    Case(replicas=2, flatten=True, model="mlp", optimizer="sgd", steps=2),
    Case(replicas=2, placement=(("move_params_to_cpu", True),), accumulate=2, steps=2),
]
PARTS = [
    Case(reshard=2, clip=True, steps=3),
    Case(reshard=2, precision="bf16", wrapping="deep", checkpointing="around", accumulate=2, steps=2),
    Case(reshard=1, accumulate=2, no_sync=True, steps=2),
    Case(reshard=4, steps=2),
    Case(reshard=2, accumulate=2, no_sync=True, flatten=True, wrapping="leaves", steps=2),
]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def shards_of_a_mesh() -> tuple[list[int], list[tuple[Any, ...]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh)
    shard = shard_of(model.weight)
    assert shard is not None
    axes = [(axis.held, axis.group.ranks) for axis in shard.axes]
    return [shard.start, shard.stop], axes


def parts_of_a_forward() -> list[tuple[bool, int | None]]:
    """Whether the inner unit's full buffer is there, and how much of it stays: after its forward and its backward."""
    model = layers()
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model, reshard_after_forward=2)
    (buffer,) = units_in(model)[1].buffers
    seen = []
    for _ in range(2):
        loss = model(torch.ones(1, 4)).sum()
        seen.append(
            (bool(buffer.full.untyped_storage().nbytes()), None if buffer.part is None else buffer.part.numel())
        )
        loss.backward()
        seen.append(
            (bool(buffer.full.untyped_storage().nbytes()), None if buffer.part is None else buffer.part.numel())
        )
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert buffer.part is None
    return seen


def refusals() -> list[str]:
    messages = []
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    for kwargs in (
        {"reshard_after_forward": 3},
        {"reshard_after_forward": 0},
        {"reshard_after_forward": "yes"},
        {"process_group": mesh},
        {"move_params_to_cpu": "yes"},
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            fully_shard(layers(), **kwargs)
        messages.append(str(caught.value))
    return messages


def test_hybrid_sharding_equals_the_plain_model_to_the_bit() -> None:
    assert run_ranks(run_cases, 4, HYBRID) == [[]] * 4


def test_a_mesh_of_two_axes_is_cut_along_the_second_and_copied_along_the_first() -> None:
    results = run_ranks(shards_of_a_mesh, 4)
    assert [bounds for bounds, _ in results] == [[0, 8], [8, 16], [0, 8], [8, 16]]
    assert results[3][1] == [(Held.SHARD, (2, 3)), (Held.REPLICATE, (1, 3))]


def test_what_stays_cut_between_few_ranks_trains_as_the_plain_model_to_the_bit() -> None:
    assert run_ranks(run_cases, 4, PARTS) == [[]] * 4


def test_between_forward_and_backward_a_part_of_the_full_buffer_stays() -> None:
    half = (4 * 8 + 8) // 2
    for seen in run_ranks(parts_of_a_forward, 4):
        assert seen == [(False, half), (False, None)] * 2


def test_what_does_not_divide_or_is_no_mesh_for_this_is_refused() -> None:
    for messages in run_ranks(refusals, 2):
        assert "2 ranks do not divide into groups of 3: take one of 1, 2, or True" in messages[0]
        assert "groups of 0" in messages[1]
        assert "expected a bool or a number of ranks, got 'yes'" in messages[2]
        assert "got 3 dimensions ('a', 'b', 'c')" in messages[3]
        assert "move_params_to_cpu: expected True or False" in messages[4]


def test_one_of_several_ranks_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 ranks.*call scale_core.launch.init_distributed\(\)"):
        fully_shard(layers())
