"""Process groups of tensor, context, pipeline and data parallelism (`initialize_model_parallel`), and their getters.

A layer takes `process_group=`; its default is the model axis of `initialize_model_parallel`. A program that runs as
one process needs no group: there no layer is divided, and each getter describes this rank.

    >>> from scale_tp import megatron
    >>> megatron.get_tensor_model_parallel_world_size(), megatron.get_data_parallel_ranks()
    (1, [0])
    >>> megatron.get_tensor_model_parallel_group() is None
    True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from scale_core.arguments import checked_arguments
from scale_core.comm.fork import forked_error
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.mesh import NewGroups, ParallelDims, new_group_along, rank_groups
from scale_core.comm.work import limit_of
from scale_core.compat import process_groups
from scale_tp.split import check_size

# The ranks are arange(world).reshape(data, pipeline, context, model), so those that divide a layer are next to each
# other, as on one machine.
_AXES = ("data", "pipeline", "context", "model")

_axes: dict[str, Group] = {}  # this rank's groups, once the ranks are divided


class _MadeHere:
    """Whether `initialize_model_parallel` has made a group, which `destroy_model_parallel` destroys then."""

    value = False


DATA_CONTEXT = "data and context"
"""The data and the context axis together: all ranks with the same part of the model."""

_AXIS_OF_DIMS = {"model": "tp", "context": "cp", "pipeline": "pp", "data": "batch", DATA_CONTEXT: "loss"}


@checked_arguments
def initialize_model_parallel(
    tensor_model_parallel_size: int | ParallelDims,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    cp_backend: str | None = None,
    ddp_backend: str | None = None,
    limit_seconds: float | None = None,
) -> None:
    """Divides all ranks into groups along four axes. All ranks call it, once.

    The remaining factor of the world is the data axis: `world / (model * pipeline * context)` replicas.

    Args:
        tensor_model_parallel_size: Between how many ranks each layer is divided. A `scale_core.ParallelDims` says all
            sizes and has the groups already: leave the other arguments out.
        pipeline_model_parallel_size: Between how many stages the layers are.
        context_parallel_size: Between how many ranks each sequence is.
        model_parallel_backend: Transport of the groups that divide layers; None is the transport of the default group.
        pipeline_backend: Transport between stages.
        cp_backend: Transport of the groups that divide sequences.
        ddp_backend: Transport between replicas.
        limit_seconds: How long an operation of these groups may take; None is as long as one of the default group.

    Raises:
        TypeError: A size is not an integer.
        ValueError: The sizes don't divide the number of ranks; or other arguments are given with a ParallelDims.
        RuntimeError: It was called before.

    Examples:
        >>> import scale_tp.megatron
        >>> scale_tp.initialize_model_parallel(1)  # 2 on 8 ranks: 4 replicas of 2 ranks
        >>> scale_tp.megatron.get_data_parallel_world_size()
        1
        >>> scale_tp.destroy_model_parallel()

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    if _axes:
        raise RuntimeError(
            f"the ranks are divided already ({_described()}): call scale_tp.destroy_model_parallel() before"
        )
    if isinstance(tensor_model_parallel_size, ParallelDims):
        others = (pipeline_model_parallel_size, context_parallel_size)
        options = (model_parallel_backend, pipeline_backend, cp_backend, ddp_backend, limit_seconds)
        if others != (1, 1) or any(option is not None for option in options):
            raise ValueError(
                "initialize_model_parallel: a ParallelDims has all sizes and groups already: leave the other "
                "arguments out, and write the sizes as ParallelDims(tp=, pp=, cp=)"
            )
        _axes.update({name: group_of(tensor_model_parallel_size, axis) for name, axis in _AXIS_OF_DIMS.items()})
        return
    everybody = group_of()
    if everybody.state.is_of_parent:
        raise forked_error()
    sizes = _sizes(
        everybody.size,
        model=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        context=context_parallel_size,
    )
    timeout = None if limit_seconds is None else timedelta(seconds=limit_of(None, limit_seconds))
    backends = {"model": model_parallel_backend, "context": cp_backend, "pipeline": pipeline_backend}
    backends |= {"data": ddp_backend, DATA_CONTEXT: ddp_backend}
    # Axes may have groups of the same ranks, as those of one rank alone: these are made once.
    made: NewGroups = {}
    groups = {
        name: _own_group(rank_groups(sizes, *name.split(" and ")), backend, timeout, made)
        for name, backend in backends.items()
    }
    _axes.update(groups)
    for group in groups.values():
        if group.process_group is not None:
            group.state.get_or_create(_MadeHere).value = True


def set_axis_group(axis: str, process_group: dist.ProcessGroup | None) -> None:
    """Takes the group along one axis from the program, which has made it; sends nothing.

    The result of `initialize_model_parallel` stays if the ranks that divide layers stay. Axes that no one has set
    raise when they are asked for.

    Args:
        axis: "data", "pipeline", "context" or "model".
        process_group: The group; None forgets the group of the axis, and for "model" of all axes.
    """
    group = None if process_group is None else group_of(process_group)
    if axis == "model" and (group is None or "model" not in _axes or group.ranks != _axes["model"].ranks):
        _axes.clear()
    if group is None:
        _axes.pop(axis, None)
    else:
        _axes[axis] = group


def destroy_model_parallel() -> None:
    """Destroys the groups of `initialize_model_parallel`, with their connections; all ranks call it.

    Layers that were built for them can't compute any more. Without groups it does nothing.

    Examples:
        >>> import scale_tp.megatron
        >>> scale_tp.initialize_model_parallel(1)
        >>> scale_tp.destroy_model_parallel()
        >>> scale_tp.megatron.model_parallel_is_initialized()
        False

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    groups = [group.process_group for group in _axes.values() if group.state.get_or_create(_MadeHere).value]
    _axes.clear()
    for group in groups:
        # Those of a default group that is gone already went with it.
        if group is not None and group in process_groups():
            dist.destroy_process_group(group)


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` has divided the ranks.

    Examples:
        >>> import scale_tp.megatron
        >>> scale_tp.megatron.model_parallel_is_initialized()
        False

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return bool(_axes)


def tensor_parallel_group(process_group: GroupLike = None) -> Group:
    """Returns the ranks between which a layer is divided."""
    return group_of(process_group, "tp") if process_group is not None else axis_group("model")


def context_parallel_group(process_group: GroupLike = None) -> Group:
    """Returns the ranks that divide a sequence."""
    if process_group is None and _axes and "context" not in _axes:
        return Group()  # Only other axes were set: no sequence is divided.
    return group_of(process_group, "cp") if process_group is not None else axis_group("context")


def axis_group(name: str) -> Group:
    """Returns this rank's group along an axis: "data", "pipeline", "context", "model" or `DATA_CONTEXT`."""
    if name in _axes:
        return _axes[name]
    if _axes:
        raise RuntimeError(
            f"the ranks along the {name} axis are not known: the program has set only the groups of "
            f"{', '.join(_axes)}. Call initialize_model_parallel() in place of setting groups, or pass process_group="
        )
    world = group_of()
    if world.size > 1:
        sizes = f"1, context_parallel_size={world.size}" if name == "context" else f"{world.size}"
        raise ValueError(
            f"{world.size} ranks have not been divided yet along the {name} axis: pass process_group=, or call "
            f"scale_tp.initialize_model_parallel({sizes}), or with fewer, which divide {world.size}"
        )
    return Group()


def _sizes(world: int, **inner: int) -> dict[str, int]:
    """Returns the sizes of all axes; the data axis is the remaining factor of the world."""
    for name, size in inner.items():
        check_size(f"the {name} parallel size", size, 1)
    product = math.prod(inner.values())
    if world % product:
        factors = [f"{size} ({name})" for name, size in inner.items() if size > 1]
        described = " x ".join(factors) + (f" = {product}" if len(factors) > 1 else "")
        hint = (
            "start as many processes with torchrun --nproc-per-node, and call torch.distributed.init_process_group()"
            if world < product
            else "choose sizes whose product divides the number of ranks"
        )
        raise ValueError(f"expected {described} to divide the number of ranks, got {world} ranks: {hint}")
    return {name: inner.get(name, world // product) for name in _AXES}


def _own_group(
    groups: Sequence[Sequence[int]], backend: str | None, timeout: timedelta | None, made: NewGroups
) -> Group:
    """Makes the groups of one axis and returns this rank's."""
    if not (dist.is_available() and dist.is_initialized()):
        return Group()
    return group_of(new_group_along(groups, made, backend=backend, timeout=timeout))


def _described() -> str:
    return ", ".join(f"{name} {_axes[name].size}" for name in _AXES if name in _axes)


# Megatron's getters. In a world of one rank that was not divided they describe that rank; on several ranks that have
# not been divided, each raises a ValueError.


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that divide the layers with this one; None where torch.distributed is not initialized."""
    return _process_group("model")


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks divide a layer."""
    return axis_group("model").size


def get_tensor_model_parallel_rank() -> int:
    """This rank's index among those that divide a layer."""
    return axis_group("model").rank


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first rank that divides the layers with this one."""
    return axis_group("model").ranks[0]


def get_tensor_model_parallel_ranks() -> list[int]:
    """The global ranks that divide the layers with this one."""
    return list(axis_group("model").ranks)


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that hold the same part of the model as this one; None where torch.distributed is not initialized."""
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
    """The ranks of all replicas and all parts of their sequences; None where torch.distributed is not initialized.

    They have the same part of the model, and each has a share of its gradients. Pass this group to `fully_shard` or
    DistributedDataParallel if sequences are divided.
    """
    return _process_group(DATA_CONTEXT)


def get_data_context_parallel_world_size() -> int:
    """How many ranks hold the same part of the model, whatever their part of a sequence."""
    return axis_group(DATA_CONTEXT).size


def get_pipeline_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that are the stages of this rank's pipeline; None where torch.distributed is not initialized."""
    return _process_group("pipeline")


def get_pipeline_model_parallel_world_size() -> int:
    """How many stages there are."""
    return axis_group("pipeline").size


def get_pipeline_model_parallel_rank() -> int:
    """Which stage this rank is."""
    return axis_group("pipeline").rank


def get_pipeline_model_parallel_ranks() -> list[int]:
    """The global ranks of the stages, in their order."""
    return list(axis_group("pipeline").ranks)


def get_context_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that divide a sequence with this one; None where torch.distributed is not initialized."""
    return _process_group("context")


def get_context_parallel_world_size() -> int:
    """How many ranks divide a sequence."""
    return axis_group("context").size


def get_context_parallel_rank() -> int:
    """This rank's index among those that divide a sequence."""
    return axis_group("context").rank


def get_context_parallel_ranks() -> list[int]:
    """The global ranks that divide a sequence."""
    return list(axis_group("context").ranks)


def _process_group(name: str) -> dist.ProcessGroup | None:
    group = axis_group(name)
    if group.process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group.process_group
