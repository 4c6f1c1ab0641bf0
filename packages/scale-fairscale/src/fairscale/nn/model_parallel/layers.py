"""Layers divided between ranks: `scale_tp`'s layers, but with this rank's shard as state dict, as in FairScale.

A program that saves `model.state_dict()` on each rank so writes the files that it wrote before, such as Llama's
`consolidated.00.pth`. Full tensors load, too.
"""

from __future__ import annotations

from torch import Tensor

import scale_tp
from fairscale.nn.model_parallel.initialize import get_model_parallel_rank, get_model_parallel_world_size
from fairscale.nn.model_parallel.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from fairscale.nn.model_parallel.utils import VocabUtility, divide_and_check_no_remainder
from scale_core.comm.group import Group
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.layers.base import ParallelModule, ParamSharding
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.split import Split
from scale_tp.weight_init import Initializer, init_shard

__all__ = [  # Functions, too: programs import them from here, as FairScale's file had them.
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabUtility",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "gather_from_model_parallel_region",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]


def _initialize_affine_weight(
    weight: Tensor,
    out_features: int,
    in_features: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Initializer,
    stride: int = 1,
    return_master_weight: bool = False,
) -> Tensor | None:
    """Fills this rank's shard of a weight [out_features, in_features] as the whole would be; returns that if asked."""
    shape, ranks = (out_features, in_features), tensor_parallel_group()
    split = Split.strided(shape[partition_dim], ranks.size, stride)
    part = local_tensor(weight)
    return init_shard(part, shape, partition_dim, split, ranks.rank, init_method, keep_full=return_master_weight)


class _LocalStateDict(ParallelModule):
    """A layer whose `state_dict()` has this rank's shard; torch's checkpoint functions get what scale_tp gives them.

    A class derived from it may call `nn.Module.__init__` alone and fill itself, as layers of adapters do. Then its
    parameters are plain ones, as in FairScale.
    """

    _saves_whole = False
    group = Group()
    shardings: dict[str, ParamSharding] = {}  # noqa: RUF012  # replaced by the constructor, never filled

    def extra_repr(self) -> str:
        return super().extra_repr() if self.shardings else ""


class ColumnParallelLinear(_LocalStateDict, scale_tp.ColumnParallelLinear):
    """`scale_tp.ColumnParallelLinear`: a linear layer divided by its output features."""

    _output_size: int | None = None

    @property
    def output_size_per_partition(self) -> int:
        """Output features of this rank; may be set."""
        return super().output_size_per_partition if self._output_size is None else self._output_size

    @output_size_per_partition.setter
    def output_size_per_partition(self, size: int) -> None:
        self._output_size = size


class RowParallelLinear(_LocalStateDict, scale_tp.RowParallelLinear):
    """`scale_tp.RowParallelLinear`: a linear layer divided by its input features."""

    _input_size: int | None = None

    @property
    def input_size_per_partition(self) -> int:
        """Input features of this rank; may be set."""
        return super().input_size_per_partition if self._input_size is None else self._input_size

    @input_size_per_partition.setter
    def input_size_per_partition(self, size: int) -> None:
        self._input_size = size


class VocabParallelEmbedding(_LocalStateDict, scale_tp.VocabParallelEmbedding):
    """`scale_tp.VocabParallelEmbedding`: an embedding divided by words."""


class ParallelEmbedding(_LocalStateDict, scale_tp.ParallelEmbedding):
    """`scale_tp.ParallelEmbedding`: an embedding divided by features."""
