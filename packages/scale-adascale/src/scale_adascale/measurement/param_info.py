"""The part of an optimizer's parameters that each rank holds, and how often its measurements count.

The ranks of a training have two directions: along one they have other data (data parallelism, fully sharded or not),
along the other other parts of the model (tensor and pipeline parallelism). A sum over all of them, of each rank's part,
is right if a part that several ranks have is divided by their number.

    parameter of                    own gradient    averaged gradient
    DDP over D ranks                1               1 / D              the average is on every rank
    FSDP over D ranks               1               1                  each has another piece of it
    FSDP over F, replicas of D/F    1               F / D
    experts, divided over E ranks   1 per source    E / D              each of these E ranks has other experts
    the same, FSDP over the D/E     1 per source    1
    tensor parallel, split over T   1               as above           each has other elements of both
    tensor parallel, replicated     1 / T           as above, / T
    the same, without `Shard`       1 / T           as above, / T      where other parameters are split over T ranks
    a copy of other ranks' part      0               0                  `Shard.counted` is False
    a stage of a pipeline           1               as above           no other stage has it

The sources of an expert are the E ranks with whose tokens it computes: the gradient of each is measured by itself.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import MomentShard, SecondMoments
from scale_adascale.squared_norms import NormAccumulator
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.device.streams import tensor_on
from scale_core.hooks.gradients import lacks_autograd_hooks
from scale_core.hooks.microbatch_grads import pipeline_ranks
from scale_core.hooks.source_grads import source_group
from scale_core.shard import Axis, Placement, full_shape, on_local_tensors, shard_of, title_of


def all_params(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


# The groups of ranks.


def data_group_of(optimizer: Optimizer, given: GroupLike) -> Group:
    """The ranks with other data: as given, or all; this one alone where all are stages of one pipeline."""
    announced, data = pipeline_ranks(all_params(optimizer)), group_of(given, "loss")
    pipeline = Group() if announced is None else announced.ranks
    if pipeline.size == 1:
        return data
    if given is None and set(data.ranks) == set(pipeline.ranks):
        return Group()
    if len(set(data.ranks) & set(pipeline.ranks)) > 1:
        raise ValueError(
            f"expected process_group to be the ranks that have the same stages as this one, for other data, got "
            f"{list(data.ranks)}, of which some have other stages of the pipeline over {list(pipeline.ranks)}. Pass "
            "AdaScale(..., process_group=the ranks with replicas of this rank's stages, as mesh['replica'])"
        )
    return data


def model_group_of(optimizer: Optimizer, data: Group, given: GroupLike) -> Group:
    """The ranks with other parts of the model: as given, or those over which parameters are split, or of the pipeline.

    A rank of a pipeline whose stages have no parameters has none to measure, and is not among them.
    """
    if given is not None:
        return group_of(given, "pp", "tp")
    params = all_params(optimizer)
    model_groups = model_split_groups(params, data)
    announced = pipeline_ranks(params)
    if announced is not None and announced.with_parameters.size > 1:
        model_groups[announced.with_parameters.ranks] = announced.with_parameters
    if len(model_groups) > 1:
        raise ValueError(
            f"the model is divided over the ranks {' and '.join(str(list(ranks)) for ranks in model_groups)}, beside "
            f"those with other data, {list(data.ranks)}. Pass AdaScale(..., model_parallel_group=the group of all "
            "that have other parts of the model), and process_group for those with other data"
        )
    return next(iter(model_groups.values()), Group())


def model_split_groups(params: Iterable[Tensor], data: Group) -> dict[tuple[int, ...], Group]:
    """The groups over which parameters are split or copied, in addition to the data parallel one, by their ranks."""
    axes = (axis for param in params for axis in _axes(param))
    return {axis.group.ranks: axis.group for axis in axes if not _is_within(axis.group, data)}


# The weights of norms.


class NormWeights(NamedTuple):
    """The factors of squared norms, before they are summed over all ranks."""

    local: float  # of this rank's own gradient
    share: float  # 1 over how many ranks with other data have the same part of the averaged gradient

    @property
    def total(self) -> float:
        """Of this rank's part of the averaged gradient."""
        return self.local * self.share


def norm_weights(param: Tensor, holder: Tensor, data: Group, model: Group, splits: Iterable[Group] = ()) -> NormWeights:
    """The weights of one parameter, whose averaged gradient is in `holder`: itself, or a piece of it.

    One without a `Shard` is equal on the ranks of `splits`, over which other parameters of the model are split. Raises
    ValueError for one that is split over ranks in neither group, or over `data` by a tensor parallel layer.
    """
    _check_gathered(param, data)
    _check_sources(param, data)
    shard, share = shard_of(param), 1.0 / data.size
    local = 1.0 if shard is None or shard.counted else 0.0
    is_split = False
    for axis in _axes(param):
        if _is_within(axis.group, model):
            is_split = True
            local /= axis.group.size if axis.placement is Placement.REPLICATE else 1
        elif not _is_within(axis.group, data):
            raise ValueError(
                f"{title_of(param)} is shared by the ranks {list(axis.group.ranks)}, which AdaScale knows neither as "
                f"ranks with other data, {list(data.ranks)}, nor as ranks with other parts of the model, "
                f"{list(model.ranks)}. Pass AdaScale(..., process_group=the data parallel ranks, "
                "model_parallel_group=the ranks of tensor and pipeline parallelism)"
            )
    if not is_split:
        local /= math.prod(group.size for group in splits)
    for axis in _axes(holder):
        share *= axis.group.size if axis.placement is Placement.SHARD and _is_within(axis.group, data) else 1
    return NormWeights(local, share)


def _check_sources(param: Tensor, data: Group) -> None:
    group = source_group(param)
    if group is not None and not _is_within(group, data):
        raise ValueError(
            f"the gradient of {title_of(param)} is of the samples of the ranks {list(group.ranks)}, which divide "
            f"experts and have other data, and process_group has {list(data.ranks)}. Pass AdaScale(..., process_group="
            "the ranks of the data and expert axes together), or nothing where these are all ranks"
        )


def _check_gathered(param: Tensor, data: Group) -> None:
    # Ranks with other data may divide a parameter only if they put it together: otherwise they divide the model.
    over = [
        axis.group
        for axis in _axes(param)
        if axis.placement is Placement.SHARD and axis.num_sources == 1 and _is_within(axis.group, data)
    ]
    if len(over) < 2 and (not over or lacks_autograd_hooks(param)):
        return
    ranks = " and over ".join(str(list(group.ranks)) for group in over)
    raise ValueError(
        f"{title_of(param)} is divided over the ranks {ranks} by a layer that computes with its piece, as tensor "
        f"parallel ones do, but AdaScale takes all of {list(data.ranks)} for ranks with other data, and would measure "
        "too small a gain. Pass AdaScale(..., process_group=the data parallel ranks), for tensor parallelism alone "
        "a group of this rank only"
    )


def _axes(param: Tensor) -> list[Axis]:
    shard = shard_of(param)
    axes = [] if shard is None else [axis for axis in shard.axes if axis.group.size > 1]
    for axis in axes:
        if axis.placement is Placement.PARTIAL:
            raise ValueError(
                f"{title_of(param)} is a partial sum over the ranks {list(axis.group.ranks)}, so no rank knows its "
                "gradient. Reduce it in the backward pass, as scale-tp's layers do"
            )
        if 1 < axis.num_sources < axis.group.size:
            raise ValueError(
                f"{title_of(param)} is of experts whose hidden features are divided between ranks as well, over "
                f"{list(axis.group.ranks)}, and AdaScale measures experts that are each on one rank: give MoE or "
                'parallelize_experts a mesh of one dimension, mesh["expert"], or train without AdaScale'
            )
    return axes


def _is_within(group: Group, other: Group) -> bool:
    return set(group.ranks) <= set(other.ranks)


# All of it for one optimizer.

# Elements of a gradient from which on it takes longer to read it than to call its reader, and those of a call.
_LARGE, _CALL_COST = 1 << 17, 1 << 14


@dataclass(frozen=True)
class ParamInfo:
    """Which part this rank has of the k parameters of an optimizer, group by group."""

    params: list[Tensor]
    holders: list[Tensor]  # of averaged gradients: the parameters, or this rank's pieces
    is_shared: list[bool]  # Do all ranks with other data have the same averaged gradient?
    portions: list[tuple[int, int] | None]  # the part of how many that this rank reads of it; None if another reads it
    device: torch.device  # where squares are added up
    group_index: Tensor  # [k] int64
    local_weights: Tensor  # [k] fp64, of own gradients
    total_weights: Tensor  # [k] fp64, of averaged gradients; shared ones are measured in portions
    fingerprint: int
    moments: SecondMoments  # of Adam; not to be used with other optimizers
    totals: dict[torch.device, NormAccumulator] = field(default_factory=dict)  # of averaged gradients


@on_local_tensors
def param_info_of(optimizer: Optimizer, data: Group, model: Group) -> ParamInfo:
    """Builds it; raises as `norm_weights` does."""
    groups, params = optimizer.param_groups, all_params(optimizer)
    grad_holders: Any = getattr(optimizer, "grad_holders", None)
    pieces = {} if grad_holders is None else {id(param): piece for param, piece in grad_holders()}
    states: list[Tensor] = [pieces.get(id(param), param) for param in params]
    holders = states if getattr(optimizer, "gets_reduced_gradients", False) else params
    splits = model_split_groups(params, data)
    weights = [
        norm_weights(*param_and_holder, data, model, splits.values())
        for param_and_holder in zip(params, holders, strict=True)
    ]
    is_shared = [data.size > 1 and math.isclose(weight.share * data.size, 1.0) for weight in weights]
    device = next((holder.device for holder in holders), torch.device("cpu"))
    totals = [weight.local if shared else weight.total for weight, shared in zip(weights, is_shared, strict=True)]
    moment_shards = [
        MomentShard(
            param,
            state,
            (weight if state is holder else norm_weights(param, state, data, model, splits.values())).share,
        )
        for param, state, holder, weight in zip(params, states, holders, weights, strict=True)
    ]
    return ParamInfo(
        params=params,
        holders=holders,
        is_shared=is_shared,
        portions=_portions([holder.numel() for holder in holders], is_shared, data),
        device=device,
        group_index=tensor_on(device, [index for index, group in enumerate(groups) for _ in group["params"]]),
        local_weights=tensor_on(device, [weight.local for weight in weights], torch.float64),
        total_weights=tensor_on(device, totals, torch.float64),
        fingerprint=fingerprint(params),
        moments=SecondMoments(optimizer, moment_shards, data, splits, device),
    )


def _portions(numels: list[int], is_shared: list[bool], data: Group) -> list[tuple[int, int] | None]:
    """Of large shared gradients each rank reads its part; the small ones are dealt out to the ranks."""
    portions: list[tuple[int, int] | None] = [(0, 1)] * len(numels)
    read = [0] * data.size
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        if not is_shared[index]:
            continue
        if numels[index] >= _LARGE:
            portions[index] = (data.rank, data.size)
        else:
            reader = read.index(min(read))
            portions[index] = (0, 1) if reader == data.rank else None
            read[reader] += numels[index] + _CALL_COST
    return portions


def fingerprint(params: Sequence[Tensor]) -> int:
    """16 bits that are equal where the full parameters have the same shapes in the same order."""
    return zlib.crc32(repr([tuple(full_shape(param)) for param in params]).encode()) & 0xFFFF
