"""Tensor parallelism: ranks in two axes, and blocks that some of them divide."""

from __future__ import annotations

import torch

from scale_core.comm.group import Group, group_of
from scale_core.shard import full_shape
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_train.model import GPT, ModelConfig
from scale_train.training.parallelize import MeshAxes, mesh_axes, parallelize_blocks

CONFIG = ModelConfig(layers=2, width=12, heads=3)


def _context_ranks_are_next_to_those_that_divide_layers() -> None:
    rank = group_of().rank
    alone, beside_layers = (mesh_axes(group_of(), num_model, 2) for num_model in (1, 2))
    assert (alone.data.ranks, alone.context.ranks) == ((0, 1, 2, 3), (rank // 2 * 2, rank // 2 * 2 + 1))
    assert (alone.num_data, alone.data_rank) == (2, rank // 2)
    assert beside_layers.context.ranks == beside_layers.data.ranks == (rank % 2, rank % 2 + 2)
    assert (beside_layers.num_data, beside_layers.data_rank) == (1, 0)


def _axes_and_parts() -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]:
    _context_ranks_are_next_to_those_that_divide_layers()
    axes = mesh_axes(group_of(), 2)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    whole = [tuple(param.shape) for param in model.parameters()]
    tokens = torch.arange(10).view(2, 5)
    expected = model(tokens)
    parallelize_blocks(model, axes, sequence_parallel=True, overlap_pieces=2)
    assert [tuple(full_shape(param)) for param in model.parameters()] == whole
    torch.testing.assert_close(model(tokens), expected)
    # One token is a sequence of which a rank has nothing; so is the first step of a text that is generated.
    torch.testing.assert_close(model(tokens[:, :1]), expected[:, :1])
    return axes.data.ranks, axes.model.ranks, [tuple(local_tensor(model.blocks[0].attention.qkv.weight).shape)]


def test_neighbors_divide_layers_and_the_others_see_other_data() -> None:
    found = run_ranks(_axes_and_parts, 4)
    assert [data for data, _, _ in found] == [(0, 2), (1, 3)] * 2
    assert [tensor for _, tensor, _ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [shapes for _, _, shapes in found] == [[(24, 12)], [(12, 12)]] * 2  # two heads of three, and one


def test_without_the_other_axis_a_group_is_all_of_one() -> None:
    group = Group(1, 3, None, "fake", (0, 1, 2))
    assert mesh_axes(group, 1) == MeshAxes(group, Group())
    assert mesh_axes(group, 3) == MeshAxes(Group(), group)
    assert mesh_axes(group, 1, 3) == MeshAxes(group, Group(), group)


def test_on_one_rank_a_model_stays_as_it_is() -> None:
    model = GPT(CONFIG)
    before = [type(module) for module in model.modules()]
    parallelize_blocks(model, mesh_axes(Group(), 1), sequence_parallel=False)
    assert [type(module) for module in model.modules()] == before
