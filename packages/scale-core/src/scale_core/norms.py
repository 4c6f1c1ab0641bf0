"""The norm of gradients that no rank holds alone, and clipping by it.

Each element of each parameter counts once, whoever holds it. Who holds what is known from `shard_of`: over a mesh
axis that shards a parameter the norms of the pieces are combined, over one that replicates it they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from scale_core.collectives import all_reduce
from scale_core.group import Group
from scale_core.shard import Held, shard_of


@torch.no_grad()
def grad_norm(params: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the p-norm of all gradients together, as one number that is equal on all ranks.

    All ranks of every group that shards one of the parameters must call it together. Gradients of different dtypes
    are measured in fp32 at least.

    Args:
        params: Parameters, whole or local shards (`shard_of` tells); one without a gradient counts as zeros.
        norm_type: p > 0; `math.inf` is the largest magnitude.

    Returns:
        Scalar, fp32 (fp64 where all gradients are), on the device of the gradients.

    Raises:
        ValueError: `norm_type` is not above 0, or a gradient is still a partial sum over a mesh axis.
    """
    if not norm_type > 0:
        raise ValueError(f"expected norm_type > 0 or math.inf, got {norm_type}")
    classes: dict[tuple[Group, ...], list[Tensor]] = {}
    anywhere: Tensor | None = None
    for param in params:
        anywhere = param
        members = classes.setdefault(_sharing_groups(param), [])
        if param.grad is not None:
            members.append(param.grad)
    if anywhere is None:
        return torch.zeros(())
    device = anywhere.device if not any(classes.values()) else next(g for grads in classes.values() for g in grads).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups in sorted(classes, key=lambda groups: [group.ranks for group in groups]):
        share = _power_sum(classes[groups], norm_type, device)
        for group in groups:
            all_reduce(share, group, op="max" if math.isinf(norm_type) else "sum").wait()
        total = torch.maximum(total, share) if math.isinf(norm_type) else total + share
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    wide = all(grad.dtype == torch.float64 for grads in classes.values() for grad in grads) and any(classes.values())
    return total if wide else total.to(torch.float32)


@torch.no_grad()
def clip_grad_norm(params: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients in place so that their norm is at most `max_norm`; returns the norm before.

    The factor is torch's, min(1, max_norm / (norm + 1e-6)), so that the result is torch's too.

    Args:
        params: As in `grad_norm`.
        max_norm: The largest norm allowed.
        norm_type: As in `grad_norm`.

    Raises:
        ValueError: As in `grad_norm`.
    """
    params = list(params)
    norm = grad_norm(params, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.grad.numel():
            by_dtype.setdefault(param.grad.dtype, []).append(param.grad)
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, factor.to(dtype))
    return norm


def _sharing_groups(param: Tensor) -> tuple[Group, ...]:
    """The groups between which the elements of a parameter are divided."""
    shard = shard_of(param)
    if shard is None:
        return ()
    for axis in shard.axes:
        if axis.held is Held.PARTIAL:
            raise ValueError(
                f"the gradient of '{shard.name}' is a partial sum over ranks {list(axis.group.ranks)}: "
                "reduce it before its norm is taken"
            )
    return tuple(axis.group for axis in shard.axes if axis.held is Held.SHARD and axis.group.size > 1)


def _power_sum(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over all elements, or their largest magnitude; fp64, so that the sum over ranks is exact."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = [grad if grad.dtype in (torch.float32, torch.float64) else grad.float() for grad in grads]
    norms = torch.stack([norm.to(device, torch.float64) for norm in torch._foreach_norm(wide, norm_type)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
