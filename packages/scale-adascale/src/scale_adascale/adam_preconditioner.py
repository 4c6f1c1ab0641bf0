"""Adam's divisors of gradients, so that noise is measured in the steps that it takes, and not in raw gradients.

SGD steps along the gradient, Adam along the gradient over the root of its mean square. A direction of large gradients
that Adam makes small steps in must not count as much as it does for SGD: so every gradient, local and averaged, is
divided by sqrt(v) + eps before its square is taken (as AdaptDL does for its AdamScale, with Pollux, arXiv 2008.12260).

v is the mean of the second moments over a full tensor here, one number for each: then it is a few numbers that ranks
exchange, and the gain is the same under every sharding. It is taken from the last step, so that all gradients of a step
are measured in the same way.
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
from scale_core.device.streams import tensor_on
from scale_core.shard import Placement, shard_of

_ADAPTIVE = (Adam, AdamW)
_RESCALING = re.compile("ada|lamb|lars|lion|muon|novograd|prop|shampoo|sophia")


def base_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: of a wrapper, for example OSS, the one it steps with."""
    inner = getattr(optimizer, "optim", None)
    return base_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether its steps hardly depend on the length of a gradient, as with Adam and AdamW."""
    return isinstance(base_optimizer(optimizer), _ADAPTIVE)


def is_rescaling(optimizer: Optimizer) -> bool:
    """Whether, by its name, it divides gradients by something that is not known here, unlike SGD."""
    names = (base.__name__.lower() for base in type(base_optimizer(optimizer)).__mro__)
    return not is_adaptive(optimizer) and any(_RESCALING.search(name) for name in names)


def second_moments(
    optimizer: Optimizer,
    holders: Sequence[Tensor],
    groups: Sequence[dict[str, Any]],
    parts: Sequence[tuple[int, int]],
) -> Tensor:
    """Sums of the bias-corrected second moments of k `holders`, [k], fp64; 0 where there is no state.

    `parts` has the number of the part of each that is summed up, and how many parts there are.
    """
    device = holders[0].device if holders else torch.device("cpu")
    moments = torch.zeros(len(holders), dtype=torch.float64, device=device)
    indices, sums, steps = list[int](), list[Tensor](), list[tuple[Any, Any]]()
    for index, (holder, group) in enumerate(zip(holders, groups, strict=True)):
        state = optimizer.state.get(holder, {})
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if moment is not None:
            moment = part_of(moment, *parts[index])
            # torch adds in pairs, which is right to some units of fp32; to add in fp64 takes ten times as long.
            sums.append(moment.sum(dtype=torch.promote_types(moment.dtype, torch.float32)).to(device))
            steps.append((group["betas"][1], state["step"]))
            indices.append(index)
    if not indices:
        return moments
    betas, counts = (_as_vector(column, device) for column in zip(*steps, strict=True))
    means = torch.stack(sums).double() / (1 - betas**counts)
    return moments.index_copy(0, torch.tensor(indices).to(device, non_blocking=True), means)


def _as_vector(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, or scalar tensors on any devices, as one vector on this one, fp64."""
    if any(isinstance(number, Tensor) and number.device.type != "cpu" for number in numbers):
        return torch.stack([torch.as_tensor(number, dtype=torch.float64).to(device) for number in numbers])
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64).to(device, non_blocking=True)


def divisors(means: Tensor, epsilons: Tensor) -> Tensor:
    """The factors of squared gradients, 1 / (sqrt(v) + eps)^2, [k]; 0 where v is not known yet."""
    return torch.where(means > 0, (means.sqrt() + epsilons) ** -2, 0.0)


class MomentShard(NamedTuple):
    """This rank's second moments of one parameter."""

    param: Tensor
    state: Tensor  # the tensor that the optimizer steps on: the same, or a piece of it
    share: float  # 1 over how many ranks with other data have the same of it, as in `NormWeights`


class SecondMoments:
    """The mean second moment of each parameter of an optimizer over all ranks.

    A rank has a piece of a parameter's moments, or all of them as others do. Where ranks with other data have them
    equally, each reads its part only if parts are added up anyway. The methods may be called for Adam and AdamW alone.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shards: Sequence[MomentShard],
        data: Group,
        splits: Collection[tuple[int, ...]],  # the ranks of groups over which parameters of the model are split
        device: torch.device,
    ) -> None:
        self._optimizer, self._data, self._device = optimizer, data, device
        self._states = [shard.state for shard in shards]
        self._is_alike = [math.isclose(shard.share * data.size, 1.0) for shard in shards]
        self._split = dict[Group, list[int]]()
        of_full, of_parts = list[float](), list[float]()
        for index, (param, _, share) in enumerate(shards):
            shard = shard_of(param)
            of_each = float(shard is None or shard.counted) / max(1, param.numel() if shard is None else shard.numel)
            of_full.append(of_each * share)
            of_parts.append(of_each if self._is_alike[index] else of_each * share)
            for axis in () if shard is None else shard.axes:
                if axis.placement is Placement.SHARD and axis.group.ranks in splits:
                    self._split.setdefault(axis.group, []).append(index)
        if all(self._is_alike):  # Every rank has all of them, and adds up nothing.
            of_full = [weight * data.size for weight in of_full]
        self._full_weights, self._part_weights = (
            tensor_on(device, weights_of_group, torch.float64) for weights_of_group in (of_full, of_parts)
        )

    def local_means(self) -> Tensor:
        """This rank's summand of the means, [k], fp64, if the summands of all ranks with other data are added up."""
        part = self._data.rank, self._data.size
        return self._sums([part if is_equal else (0, 1) for is_equal in self._is_alike]) * self._part_weights

    def divisors(self) -> Tensor:
        """The factors of each parameter's squared gradients, [k], fp64, equal on all ranks; all call it together."""
        means = self._sums([(0, 1)] * len(self._is_alike)) * self._full_weights
        if self._data.size > 1 and not all(self._is_alike):
            means = self._all_reduce(means, self._data)
        for group, indices in self._split.items():
            index = tensor_on(self._device, indices)
            means[index] = self._all_reduce(means[index], group)
        return self.divisors_of(means)

    def divisors_of(self, means: Tensor) -> Tensor:
        """The same, of means that were added up elsewhere, [k], fp64."""
        epsilons = torch.tensor([group["eps"] for group in self._groups], dtype=torch.float64)
        return divisors(means, epsilons.to(means.device, non_blocking=True))

    @property
    def _groups(self) -> list[dict[str, object]]:
        return [group for group in self._optimizer.param_groups for _ in group["params"]]

    def _sums(self, parts: Sequence[tuple[int, int]]) -> Tensor:
        return second_moments(base_optimizer(self._optimizer), self._states, self._groups, parts).to(self._device)

    def _all_reduce(self, vector: Tensor, group: Group) -> Tensor:
        vector = vector.to(compat.control_device(torch_group(group), vector.device))
        return all_reduce(vector, group).wait().to(self._device)
