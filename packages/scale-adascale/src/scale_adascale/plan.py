"""Who has what of an optimizer's parameters, looked up once and kept until there are others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.agreement import fingerprint
from scale_adascale.second_moments import Part, SecondMoments
from scale_adascale.sharing import splits_of, weights_of
from scale_adascale.tally import Tally
from scale_core.group import Group

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
