"""Adam's second moments as ranks have them: each some part, of which all together have the mean of each parameter.

What a rank has may be a piece of a parameter, or all of it as others do. Where ranks with other data have it alike,
each reads its part of it only if parts are added up anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_adascale.preconditioning import base_of, divisors, second_moments
from scale_core import compat
from scale_core.collectives import all_reduce
from scale_core.group import Group
from scale_core.host_transport import torch_group
from scale_core.pending import Pending
from scale_core.shard import Held, shard_of


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
