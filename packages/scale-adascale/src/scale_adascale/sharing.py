"""How often a number counts that a rank measures of a parameter, so that each element of each gradient counts once.

The ranks of a training have two directions: along one they have other data (data parallelism, fully sharded or not),
along the other other parts of the model (tensor and pipeline parallelism). A sum over all of them, of what each has,
is right if what several ranks have alike is divided by their number.

    parameter of                    own gradient    averaged gradient
    DDP over D ranks                1               1 / D              the average is on every rank
    FSDP over D ranks               1               1                  each has another piece of it
    FSDP over F, replicas of D/F    1               F / D
    tensor parallel, split over T   1               as above           each has other elements of both
    tensor parallel, replicated     1 / T           as above, / T
    the same, not said of it        1 / T           as above, / T              where others say that T ranks share them
    a copy of what others have      0               0                          `Shard.counted` is False
    a stage of a pipeline           1               as above           no other stage has it
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from scale_core.backward import are_local_grads_reported
from scale_core.group import Group
from scale_core.shard import Axis, Held, shard_of, title_of


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
