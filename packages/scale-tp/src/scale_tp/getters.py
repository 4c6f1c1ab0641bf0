"""What FairScale's and Megatron's code asks of the axes: their groups, this rank's place, how many there are.

Each getter says what `initialize_model_parallel` has made; in a world of one rank, that rank alone.
On several ranks that have not been divided, each is a ValueError that says so.
"""

from __future__ import annotations

import torch.distributed as dist

from scale_tp.groups import REPLICAS, axis_group


def get_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that divide the layers with this one; None where torch.distributed is not initialised."""
    return _process_group("model")


def get_model_parallel_world_size() -> int:
    """How many ranks divide a layer."""
    return axis_group("model").size


def get_model_parallel_rank() -> int:
    """This rank's place among those that divide a layer."""
    return axis_group("model").rank


def get_model_parallel_src_rank() -> int:
    """The global rank of the first of them."""
    return axis_group("model").ranks[0]


def get_model_parallel_ranks() -> list[int]:
    """The global ranks of all of them."""
    return list(axis_group("model").ranks)


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that hold the same part of the model as this one; None where torch.distributed is not initialised."""
    return _process_group("data")


def get_data_parallel_world_size() -> int:
    """How many replicas there are."""
    return axis_group("data").size


def get_data_parallel_rank() -> int:
    """Which replica this rank belongs to."""
    return axis_group("data").rank


def get_data_parallel_ranks() -> list[int]:
    """The global ranks that hold the same part of the model."""
    return list(axis_group("data").ranks)


def get_data_context_parallel_group() -> dist.ProcessGroup | None:
    """The ranks of all replicas and all parts of their sequences; None where torch.distributed is not initialised.

    They have the same part of the model, and each has a share of its gradients: what computes with replicas, such as
    `fully_shard` and DistributedDataParallel, is given this group where sequences are divided.
    """
    return _process_group(REPLICAS)


def get_data_context_parallel_world_size() -> int:
    """How many ranks hold the same part of the model, whatever their part of a sequence."""
    return axis_group(REPLICAS).size


def get_data_context_parallel_rank() -> int:
    """This rank's place among them."""
    return axis_group(REPLICAS).rank


def get_data_context_parallel_ranks() -> list[int]:
    """The global ranks of all of them."""
    return list(axis_group(REPLICAS).ranks)


def get_pipeline_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that are the stages of this rank's pipeline; None where torch.distributed is not initialised."""
    return _process_group("pipeline")


def get_pipeline_parallel_world_size() -> int:
    """How many stages there are."""
    return axis_group("pipeline").size


def get_pipeline_parallel_rank() -> int:
    """Which stage this rank is."""
    return axis_group("pipeline").rank


def get_pipeline_parallel_ranks() -> list[int]:
    """The global ranks of the stages, in their order."""
    return list(axis_group("pipeline").ranks)


def get_context_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that divide a sequence with this one; None where torch.distributed is not initialised."""
    return _process_group("context")


def get_context_parallel_world_size() -> int:
    """How many ranks divide a sequence."""
    return axis_group("context").size


def get_context_parallel_rank() -> int:
    """This rank's place among those that divide a sequence."""
    return axis_group("context").rank


def get_context_parallel_ranks() -> list[int]:
    """The global ranks that divide a sequence."""
    return list(axis_group("context").ranks)


def _process_group(name: str) -> dist.ProcessGroup | None:
    group = axis_group(name)
    if group.process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group.process_group
