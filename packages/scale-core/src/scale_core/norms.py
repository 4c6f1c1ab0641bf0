"""The norm of gradients that no rank holds alone, and clipping by it.

Each element of each parameter counts once, whoever holds it. Who holds what is known from `shard_of`: over a mesh
axis that shards a parameter the norms of the pieces are combined, over one that replicates it they are not.

The result is right to about one unit in the last place of fp32 at any size, and hardly depends on how the gradients
are cut. `torch.nn.utils.clip_grad_norm_` adds all squares of a tensor in fp32: on CPU that costs it 170 units at a
million elements and 4,700 at ten million.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from scale_core.collectives import all_reduce
from scale_core.group import Group
from scale_core.shard import Held, shard_of

# So many squares can be added in fp32 before the error of the sum is that of its last rounding.
_PIECE = 256


@torch.no_grad()
def grad_norm(params: Iterable[Tensor], norm_type: float = 2.0, limit_seconds: float | None = None) -> Tensor:
    """Returns the p-norm of all gradients together, as one number that is equal on all ranks.

    All ranks of every group that shards one of the parameters must call it together, with the same parameters in the
    same order. Gradients are measured in fp32 at least, and their norms combined in fp64.

    Args:
        params: Parameters, whole or local shards (`shard_of` tells), or one such; one without a gradient counts as
            zeros.
        norm_type: p > 0; `math.inf` is the largest magnitude.
        limit_seconds: How long to wait for another rank; None is its group's own limit.

    Returns:
        Scalar, fp32 (fp64 where all gradients are), on the device of the gradients.

    Raises:
        TransferError: Another rank did not take part.
        ValueError: `norm_type` is not above 0, or a gradient is still a partial sum over a mesh axis.
    """
    if not norm_type > 0:
        raise ValueError(f"expected norm_type > 0 or math.inf, got {norm_type}")
    params = [params] if isinstance(params, Tensor) else list(params)
    # By who shares them. The order is that of the parameters, which is the same on all ranks; an order by the ranks
    # in a group would not be, where an axis is the first of one group's and the last of another's.
    classes: dict[tuple[Group, ...], list[Tensor]] = {}
    for param in params:
        members = classes.setdefault(_sharing_groups(param), [])
        if param.grad is not None and _counts(param):
            # Of a complex number its magnitude counts, as in torch.
            members.append(param.grad.abs() if param.grad.is_complex() else param.grad)
    grads = [grad for members in classes.values() for grad in members]
    device = next((tensor.device for tensor in (*grads, *params)), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, members in classes.items():
        share = _share(members, norm_type, device)
        for group in groups:
            share = _over_group(share, norm_type, group, limit_seconds)
        total = torch.maximum(total, share) if math.isinf(norm_type) else total + share
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    wide = bool(grads) and all(grad.dtype == torch.float64 for grad in grads)
    return total if wide else total.to(torch.float32)


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, limit_seconds: float | None = None
) -> Tensor:
    """Scales all gradients in place so that their norm is at most `max_norm`; returns the norm before.

    The factor is torch's, so that the result is torch's too.

    Args:
        params: As in `grad_norm`.
        max_norm: The largest norm allowed; 0 or more, `math.inf` only measures.
        norm_type: As in `grad_norm`.
        limit_seconds: As in `grad_norm`.

    Raises:
        TransferError: As in `grad_norm`.
        ValueError: As in `grad_norm` and `check_max_norm`.
    """
    check_max_norm(max_norm)
    params = [params] if isinstance(params, Tensor) else list(params)
    norm = grad_norm(params, norm_type, limit_seconds)
    if math.isinf(max_norm):
        return norm  # Nothing to scale, and no gradient is touched for it.
    scale_gradients(params, clip_factor(norm, max_norm))
    return norm


def scale_gradients(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies what the parameters have in `grad` by a scalar, in place.

    Args:
        params: Those without a gradient are left out.
        factor: Scalar; its own dtype is computed in, since half precision would round it first.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.grad.numel():
            alike.setdefault((param.grad.dtype, param.grad.device), []).append(param.grad)
    for (_, device), grads in alike.items():
        torch._foreach_mul_(grads, factor.to(device))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What torch multiplies gradients of this norm by, min(1, max_norm / (norm + 1e-6)); scalar, 1 without a bound."""
    return torch.ones_like(norm) if math.isinf(max_norm) else torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def check_max_norm(max_norm: float) -> None:
    """Refuses a bound that no norm can keep, before anything is measured or sent.

    Raises:
        ValueError: `max_norm` is below 0, which would turn all gradients round, or not a number.
    """
    if not max_norm >= 0:
        raise ValueError(
            f"expected max_norm of at least 0, got {max_norm}, by which every gradient would be turned round or lost: "
            "pass the largest norm allowed, or math.inf to measure the norm only"
        )


def _sharing_groups(param: Tensor) -> tuple[Group, ...]:
    """The groups between which the elements of a parameter are divided."""
    shard = shard_of(param)
    if shard is None:
        return ()
    for axis in shard.axes:
        if axis.held is Held.PARTIAL:
            raise ValueError(
                f"the gradient of {shard.title} is a partial sum over ranks {list(axis.group.ranks)}: "
                "reduce it before its norm is taken"
            )
    return tuple(axis.group for axis in shard.axes if axis.held is Held.SHARD and axis.group.size > 1)


def _counts(param: Tensor) -> bool:
    """Whether this rank is the one that speaks for the elements it holds."""
    shard = shard_of(param)
    return shard is None or shard.counted


def _share(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over all elements, or their largest magnitude; scalar, fp64."""
    short: dict[torch.device, list[Tensor]] = {}
    norms = []
    for grad in grads:
        if grad.numel() > _PIECE:
            norms += _norms_of_pieces(grad, norm_type)
        elif grad.numel():
            short.setdefault(grad.device, []).append(grad)
    norms += [torch.stack(torch._foreach_norm(alike, norm_type, torch.float64)) for alike in short.values()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.cat([norm.to(device) for norm in norms]).to(torch.float64)
    return joined.max() if math.isinf(norm_type) else (joined**norm_type).sum()


def _norms_of_pieces(grad: Tensor, norm_type: float) -> list[Tensor]:
    """The norms of pieces of a long gradient that are short enough to be added up in fp32; each tensor is 1-D."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.detach().reshape(-1)
    rest = flat.numel() % _PIECE
    # Where there are many gradients, what is done to each of them counts; most have no rest.
    pieces = [flat[:-rest].view(-1, _PIECE), flat[-rest:].view(1, -1)] if rest else [flat.view(-1, _PIECE)]
    return [torch.linalg.vector_norm(piece, norm_type, dim=1, dtype=dtype) for piece in pieces]


def _over_group(share: Tensor, norm_type: float, group: Group, limit_seconds: float | None) -> Tensor:
    if not math.isinf(norm_type):
        return all_reduce(share, group).wait(limit_seconds)
    # No maximum of a transport is sure to keep a NaN, and one that only some ranks see must reach them all.
    largest = torch.stack([share.nan_to_num(nan=0.0, posinf=math.inf), share.isnan().to(share.dtype)])
    all_reduce(largest, group, op="max").wait(limit_seconds)
    return torch.where(largest[1] > 0, math.nan, largest[0])
