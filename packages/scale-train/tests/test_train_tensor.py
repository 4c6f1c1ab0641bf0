"""Tensor parallelism: the ranks that the options put next to each other, and blocks that some of them divide."""

from __future__ import annotations

import pytest
import torch
from rank_values import by_rank

from scale_core import ParallelDims
from scale_core.comm.group import group_of
from scale_core.shard import full_shape
from scale_core.sharded_tensor.tensor import local_tensor
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.options import ParallelOptions
from scale_train.training.parallel.parallelize_gpt import parallel_dims, parallelize_blocks

CONFIG = ModelConfig(layers=2, width=12, heads=3)


def test_context_ranks_are_next_to_those_that_divide_layers() -> None:
    alone = parallel_dims(ParallelOptions(parallel="fsdp", context_parallel=2), 4)
    assert (alone.ranks("fsdp"), alone.ranks("cp"), alone.ranks("batch")) == (
        [[0, 1, 2, 3]],
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
    )
    with_layers = parallel_dims(ParallelOptions(parallel="fsdp", context_parallel=2, tensor_parallel=2), 4)
    assert with_layers.ranks("cp") == with_layers.ranks("fsdp") == [[0, 2], [1, 3]]
    assert (with_layers.ranks("tp"), with_layers.size("batch")) == ([[0, 1], [2, 3]], 1)


def test_pipelines_take_their_number_of_stages_from_the_schedule() -> None:
    options = ParallelOptions(parallel="pipe", stages=2, tensor_parallel=2, expert_parallel=2)
    assert parallel_dims(options, 8) == ParallelDims(pp=2, tp=2, ep=2, world_size=8)


@pytest.mark.ranks(4)
def test_neighbors_divide_layers_and_the_others_see_other_data() -> None:
    dims = ParallelDims(tp=2)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    shapes = [tuple(param.shape) for param in model.parameters()]
    tokens = torch.arange(10).view(2, 5)
    expected = model(tokens)
    parallelize_blocks(model, dims, sequence_parallel=True, overlap_pieces=2)
    assert [tuple(full_shape(param)) for param in model.parameters()] == shapes
    torch.testing.assert_close(model(tokens), expected)
    # One token is a sequence of which a rank has nothing; so is the first step of a text that is generated.
    torch.testing.assert_close(model(tokens[:, :1]), expected[:, :1])
    data, tensor = group_of(dims, "fsdp"), group_of(dims, "tp")
    of_ranks = by_rank((data.ranks, tensor.ranks, [tuple(local_tensor(model.blocks[0].attention.qkv.weight).shape)]))
    assert [data for data, _, _ in of_ranks] == [(0, 2), (1, 3)] * 2
    assert [tensor for _, tensor, _ in of_ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [shapes for _, _, shapes in of_ranks] == [[(24, 12)], [(12, 12)]] * 2  # two heads of three, and one


def test_on_one_rank_a_model_stays_as_it_is() -> None:
    model = GPT(CONFIG)
    before = [type(module) for module in model.modules()]
    parallelize_blocks(model, ParallelDims(world_size=1), sequence_parallel=False)
    assert [type(module) for module in model.modules()] == before
