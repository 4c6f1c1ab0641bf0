"""What Adam divides gradients by, so that noise is measured in the steps that it takes, and not in raw gradients.

SGD steps along the gradient, Adam along the gradient over the root of its mean square. A direction of large gradients
that Adam makes small steps in must not count as much as it does for SGD: so every gradient, local and averaged, is
divided by sqrt(v) + eps before its square is taken (as AdaptDL does for its AdamScale, with Pollux, arXiv 2008.12260).

v is the mean of the second moments over a whole tensor here, one number for each: then it is a few numbers that ranks
tell each other, whoever has which elements, and the gain is the same under every sharding. It is that of the last step,
so that all gradients of a step are measured alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from scale_adascale.squared_norms import part_of
from scale_core import compat
from scale_core.comm.collectives import all_reduce, torch_group
from scale_core.comm.group import Group
from scale_core.comm.work import Pending
from scale_core.shard import Held, shard_of

_ADAPTIVE = (Adam, AdamW)
_RESCALING = re.compile("ada|lamb|lars|lion|muon|novograd|prop|shampoo|sophia")


def base_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: of a wrapper such as OSS, the one it steps with."""
    inner = getattr(optimizer, "optim", None)
    return base_of(inner) if isinstance(inner, Optimizer) else optimizer


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether its steps hardly depend on the length of a gradient, as those of Adam and AdamW."""
    return isinstance(base_of(optimizer), _ADAPTIVE)


def is_rescaling(optimizer: Optimizer) -> bool:
    """Whether, by its name, it divides gradients by something of which nothing is known here, unlike SGD."""
    names = (each.__name__.lower() for each in type(base_of(optimizer)).__mro__)
    return not is_adaptive(optimizer) and any(_RESCALING.search(name) for name in names)


def second_moments(
    optimizer: Optimizer,
    holders: Sequence[Tensor],
    groups: Sequence[dict[str, Any]],
    parts: Sequence[tuple[int, int]],
) -> Tensor:
    """Returns, for each parameter, the sum of what this rank has of its second moments, without the bias of the start.

    Args:
        optimizer: Adam or AdamW, which has the state.
        holders: What it steps on, for each of k parameters.
        groups: The parameter group of each.
        parts: Of each the number of the part to be summed up and how many parts there are.

    Returns:
        [k], fp64; 0 where there is no state.
    """
    device = holders[0].device if holders else torch.device("cpu")
    found = torch.zeros(len(holders), dtype=torch.float64, device=device)
    numbers, sums, steps = list[int](), list[Tensor](), list[tuple[Any, Any]]()
    for number, (holder, group) in enumerate(zip(holders, groups, strict=True)):
        state = optimizer.state.get(holder, {})
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if moment is not None:
            moment = part_of(moment, *parts[number])
            # torch adds in pairs, which is right to some units of fp32; to add in fp64 takes ten times as long.
            sums.append(moment.sum(dtype=torch.promote_types(moment.dtype, torch.float32)).to(device))
            steps.append((group["betas"][1], state["step"]))
            numbers.append(number)
    if not numbers:
        return found
    index = torch.tensor(numbers).to(device, non_blocking=True)
    betas, counts = (_as_vector(each, device) for each in zip(*steps, strict=True))
    return found.index_copy(0, index, torch.stack(sums).double() / (1 - betas**counts))


def _as_vector(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, or scalar tensors on any devices, as one vector on this one, fp64."""
    if any(isinstance(each, Tensor) and each.device.type != "cpu" for each in numbers):
        return torch.stack([torch.as_tensor(each, dtype=torch.float64).to(device) for each in numbers])
    return torch.tensor([float(each) for each in numbers], dtype=torch.float64).to(device, non_blocking=True)


def divisors(means: Tensor, epsilons: Tensor) -> Tensor:
    """Returns what squares of gradients are multiplied by, 1 / (sqrt(v) + eps)^2; 0 where v is not known yet.

    Args:
        means: [k] v, the mean second moment of each parameter.
        epsilons: [k].
    """
    return torch.where(means > 0, (means.sqrt() + epsilons) ** -2, 0.0)


# Adam's second moments as ranks have them: each some part, of which all together have the mean of each parameter.
#
# What a rank has may be a piece of a parameter, or all of it as others do. Where ranks with other data have it alike,
# each reads its part of it only if parts are added up anyway.


class Part(NamedTuple):
    """What this rank has of one parameter's second moments.

    Attributes:
        param: The parameter.
        state: What the optimizer steps on: the same, or a piece of it.
        share: 1 over how many ranks with other data have the same of it, as in `Weights`.
    """

    param: Tensor
    state: Tensor
    share: float


class SecondMoments:
    """The mean second moment of each parameter of an optimizer.

    Args:
        optimizer: Adam or AdamW, or what wraps it; of others nothing may be asked.
        parts: Of its k parameters, group by group.
        data: The ranks that have other data.
        splits: The ranks of groups over which parameters of the model are split.
        device: Where sums are to be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Sequence[Part],
        data: Group,
        splits: Collection[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._optimizer, self._data, self._device = optimizer, data, device
        self._states = [part.state for part in parts]
        self._is_alike = [math.isclose(part.share * data.size, 1.0) for part in parts]
        self._split = dict[Group, list[int]]()
        of_moments, of_parts = list[float](), list[float]()
        for number, (param, _, share) in enumerate(parts):
            shard = shard_of(param)
            of_each = float(shard is None or shard.counted) / max(1, param.numel() if shard is None else shard.numel)
            of_moments.append(of_each * share)
            of_parts.append(of_each if self._is_alike[number] else of_each * share)
            for axis in () if shard is None else shard.axes:
                if axis.held is Held.SHARD and axis.group.ranks in splits:
                    self._split.setdefault(axis.group, []).append(number)
        if all(self._is_alike):  # Every rank has all of them, and adds up nothing.
            of_moments = [each * data.size for each in of_moments]
        self._of_moments, self._of_parts = (
            torch.tensor(each, dtype=torch.float64, device=device) for each in (of_moments, of_parts)
        )

    def part(self) -> Tensor:
        """Returns what this rank adds to the means, [k], fp64, if those of all ranks with other data are added up."""
        rank, ranks = self._data.rank, self._data.size
        return self._sums([(rank, ranks) if alike else (0, 1) for alike in self._is_alike]) * self._of_parts

    def divisors(self) -> Tensor:
        """Returns what squares of each parameter's gradients are multiplied by, [k], fp64; all ranks call it together.

        It is equal on all ranks, also where these have other parts of the model.
        """
        means = self._sums([(0, 1)] * len(self._is_alike)) * self._of_moments
        if self._data.size > 1 and not all(self._is_alike):
            means = sum_over(means, self._data).wait().to(self._device)
        for group, numbers in self._split.items():
            index = torch.tensor(numbers, device=self._device)
            means[index] = sum_over(means[index], group).wait().to(self._device)
        return self.divisors_of(means)

    def divisors_of(self, means: Tensor) -> Tensor:
        """Returns the same, of means that were added up elsewhere, [k], fp64."""
        epsilons = torch.tensor([group["eps"] for group in self._groups], dtype=torch.float64)
        return divisors(means, epsilons.to(means.device, non_blocking=True))

    @property
    def _groups(self) -> list[dict[str, object]]:
        """The parameter group of each parameter."""
        return [group for group in self._optimizer.param_groups for _ in group["params"]]

    def _sums(self, parts: Sequence[tuple[int, int]]) -> Tensor:
        return second_moments(base_of(self._optimizer), self._states, self._groups, parts).to(self._device)


def sum_over(vector: Tensor, group: Group) -> Pending:
    """Starts to add up a small vector over a group, on a device from which its ranks can send."""
    return all_reduce(vector.to(compat.control_device(torch_group(group), vector.device)), group)
