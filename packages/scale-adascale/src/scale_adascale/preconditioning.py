"""What Adam divides gradients by, so that noise is measured in the steps that it takes, and not in raw gradients.

SGD steps along the gradient, Adam along the gradient over the root of its mean square. A direction of large gradients
that Adam makes small steps in must not count as much as it does for SGD: so every gradient, local and averaged, is
divided by sqrt(v) + eps before its square is taken (as AdaptDL does for its AdamScale, with Pollux, arXiv 2008.12260).

v is the mean of the second moments over a whole tensor here, one number for each: then it is a few numbers that ranks
tell each other, whoever has which elements, and the gain is the same under every sharding. It is that of the last step,
so that all gradients of a step are measured alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from scale_adascale.squares import part_of

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
