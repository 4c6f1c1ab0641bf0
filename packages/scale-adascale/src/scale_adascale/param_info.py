"""Who has what of an optimizer's parameters, looked up once and kept until there are others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import Part, SecondMoments
from scale_adascale.gradient_checks import fingerprint
from scale_adascale.squared_norms import Tally
from scale_core.autograd_hooks import are_local_grads_reported
from scale_core.comm.group import Group
from scale_core.shard import Axis, Held, shard_of, title_of

# How often a number counts that a rank measures of a parameter, so that each element of each gradient counts once.
#
# The ranks of a training have two directions: along one they have other data (data parallelism, fully sharded or not),
# along the other other parts of the model (tensor and pipeline parallelism). A sum over all of them, of what each has,
# is right if what several ranks have alike is divided by their number.
#
#     parameter of                    own gradient    averaged gradient
#     DDP over D ranks                1               1 / D              the average is on every rank
#     FSDP over D ranks               1               1                  each has another piece of it
#     FSDP over F, replicas of D/F    1               F / D
#     tensor parallel, split over T   1               as above           each has other elements of both
#     tensor parallel, replicated     1 / T           as above, / T
#     the same, not said of it        1 / T           as above, / T              where others say that T ranks share it
#     a copy of what others have      0               0                          `Shard.counted` is False
#     a stage of a pipeline           1               as above           no other stage has it


class Weights(NamedTuple):
    """What to multiply squares with, before they are summed over all ranks.

    Attributes:
        local: Those of this rank's own gradient.
        share: And those of what it has of the averaged gradient with this, too: 1 over how many ranks with other data
            have the same.
    """

    local: float
    share: float

    @property
    def total(self) -> float:
        """Those of what this rank has of the averaged gradient."""
        return self.local * self.share


def weights_of(param: Tensor, holder: Tensor, data: Group, model: Group, splits: Iterable[Group] = ()) -> Weights:
    """Returns how much the squares of one parameter's gradients count.

    Args:
        param: The parameter, or what `parameters()` shows of it; `shard_of` tells who has the rest.
        holder: What has its averaged gradient: the parameter itself, or a piece of it.
        data: The ranks that have other data.
        model: The ranks that have other parts of the model, for the same data.
        splits: The groups over which parameters of the model are split; one that says nothing of them is alike there.

    Raises:
        ValueError: It is divided among ranks that are in neither group, or among ranks with other data though nobody
            puts it together for a forward; or it is a partial sum.
    """
    _check_gathered(param, data)
    shard, share = shard_of(param), 1.0 / data.size
    local = 1.0 if shard is None or shard.counted else 0.0
    split = False
    for axis in _axes(param):
        if _is_along(axis.group, model):
            split = True
            local /= axis.group.size if axis.held is Held.REPLICATE else 1
        elif not _is_along(axis.group, data):
            raise ValueError(
                f"{title_of(param)} is shared by the ranks {list(axis.group.ranks)}, which AdaScale knows neither as "
                f"ranks with other data, {list(data.ranks)}, nor as ranks with other parts of the model, "
                f"{list(model.ranks)}: pass AdaScale(..., process_group=the data parallel ranks, "
                "model_parallel_group=those of tensor and pipeline parallelism)"
            )
    if not split:
        local /= math.prod(group.size for group in splits)
    for axis in _axes(holder):
        share *= axis.group.size if axis.held is Held.SHARD and _is_along(axis.group, data) else 1
    return Weights(local, share)


def _check_gathered(param: Tensor, data: Group) -> None:
    """Ranks with other data may divide a parameter only if they put it together: otherwise they divide the model."""
    over = [axis.group for axis in _axes(param) if axis.held is Held.SHARD and _is_along(axis.group, data)]
    if len(over) < 2 and (not over or are_local_grads_reported(param)):
        return
    ranks = " and over ".join(str(list(group.ranks)) for group in over)
    raise ValueError(
        f"{title_of(param)} is divided over the ranks {ranks} by a layer that computes with its piece, as tensor "
        f"parallel ones do, but AdaScale takes all of {list(data.ranks)} for ranks with other data, and would measure "
        "too small a gain: pass AdaScale(..., process_group=the data parallel ranks), for tensor parallelism alone "
        "a group of this rank only"
    )


def splits_of(params: Iterable[Tensor], data: Group) -> dict[tuple[int, ...], Group]:
    """Returns the groups over which parameters are split or copied, beside that of other data, by their ranks."""
    axes = (axis for param in params for axis in _axes(param))
    return {axis.group.ranks: axis.group for axis in axes if not _is_along(axis.group, data)}


def _axes(param: Tensor) -> list[Axis]:
    shard = shard_of(param)
    axes = [] if shard is None else [axis for axis in shard.axes if axis.group.size > 1]
    for axis in axes:
        if axis.held is Held.PARTIAL:
            raise ValueError(
                f"{title_of(param)} is a partial sum over the ranks {list(axis.group.ranks)}, so no rank knows its "
                "gradient: reduce it in the backward pass, as scale-tp's layers do"
            )
    return axes


def _is_along(group: Group, other: Group) -> bool:
    return set(group.ranks) <= set(other.ranks)


_LARGE, _OF_A_CALL = 1 << 17, 1 << 14
"""Elements of a gradient from which on it takes longer to read it than to call what reads it, and those of a call."""


@dataclass(frozen=True)
class Plan:
    """Who has what of the k parameters of an optimizer, group by group.

    Attributes:
        made_for: See `identity_of`.
        params: The parameters.
        holders: What has the averaged gradient of each: the parameter itself, or this rank's piece of it.
        is_shared: Of each, whether all ranks with other data have the same averaged gradient.
        portions: Of the averaged gradient of each, which part of how many this rank reads; None if another reads it.
        device: Where squares are added up.
        index: [k] the number of the group of each, int64.
        local_weights: [k] fp64, how often the squares of own gradients count.
        total_weights: [k] fp64, and those of averaged ones, of which shared ones are measured part by part.
        fingerprint: See `agreement.fingerprint`.
        moments: The second moments of Adam; of other optimizers nothing may be asked.
        totals: By device, what squares of averaged gradients are added up in.
    """

    made_for: tuple[Any, ...]
    params: list[Tensor]
    holders: list[Tensor]
    is_shared: list[bool]
    portions: list[tuple[int, int] | None]
    device: torch.device
    index: Tensor
    local_weights: Tensor
    total_weights: Tensor
    fingerprint: int
    moments: SecondMoments
    totals: dict[torch.device, Tally] = field(default_factory=dict)


def identity_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Returns what plans differ by: the parameters by identity and group, and whether others reduce gradients."""
    return (_is_given_reduced(optimizer), *(tuple(map(id, group["params"])) for group in optimizer.param_groups))


def plan_of(optimizer: Optimizer, data: Group, model: Group) -> Plan:
    """Looks up who has what.

    Args:
        optimizer: What steps.
        data: The ranks that have other data.
        model: The ranks that have other parts of the model.

    Raises:
        ValueError: See `weights_of`.
    """
    groups = optimizer.param_groups
    params: list[Tensor] = [param for group in groups for param in group["params"]]
    measured: Any = getattr(optimizer, "measured", None)
    pieces = {} if measured is None else {id(param): piece for param, piece in measured()}
    states: list[Tensor] = [pieces.get(id(param), param) for param in params]
    holders = states if _is_given_reduced(optimizer) else params
    splits = splits_of(params, data)
    weights = [weights_of(*each, data, model, splits.values()) for each in zip(params, holders, strict=True)]
    is_shared = [data.size > 1 and math.isclose(each.share * data.size, 1.0) for each in weights]
    device = next((holder.device for holder in holders), torch.device("cpu"))
    totals = [each.local if shared else each.total for each, shared in zip(weights, is_shared, strict=True)]
    of_states = [
        known if state is holder else weights_of(param, state, data, model, splits.values())
        for param, state, holder, known in zip(params, states, holders, weights, strict=True)
    ]
    parts = [Part(param, state, known.share) for param, state, known in zip(params, states, of_states, strict=True)]
    return Plan(
        made_for=identity_of(optimizer),
        params=params,
        holders=holders,
        is_shared=is_shared,
        portions=_portions([holder.numel() for holder in holders], is_shared, data),
        device=device,
        index=torch.tensor([number for number, group in enumerate(groups) for _ in group["params"]], device=device),
        local_weights=torch.tensor([each.local for each in weights], dtype=torch.float64, device=device),
        total_weights=torch.tensor(totals, dtype=torch.float64, device=device),
        fingerprint=fingerprint(params),
        moments=SecondMoments(optimizer, parts, data, splits, device),
    )


def _portions(numels: list[int], is_shared: list[bool], data: Group) -> list[tuple[int, int] | None]:
    """What is shared all ranks read together: of large gradients each its part, and of the small ones each some."""
    portions: list[tuple[int, int] | None] = [(0, 1)] * len(numels)
    read = [0] * data.size
    for number in sorted(range(len(numels)), key=lambda number: (-numels[number], number)):
        if not is_shared[number]:
            continue
        if numels[number] >= _LARGE:
            portions[number] = (data.rank, data.size)
        else:
            reader = read.index(min(read))
            portions[number] = (0, 1) if reader == data.rank else None
            read[reader] += numels[number] + _OF_A_CALL
    return portions


def _is_given_reduced(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "gets_reduced_gradients", False))
