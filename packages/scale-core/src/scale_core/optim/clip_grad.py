"""The norm of sharded gradients, and clipping by it.

Each element of each parameter counts once. `shard_of` says how a mesh axis holds a parameter: over an axis that shards
it the norms of the pieces are combined, over one that replicates it they are not. Reduced gradients that are in another
tensor are found by `reduced_gradient_of`. The parameters of a pipeline's stages are on one rank
each: the norms of its ranks are combined.

The result is right to about one unit in the last place of fp32 at any size, and hardly depends on how the gradients are
cut. `torch.nn.utils.clip_grad_norm_` adds all squares of a tensor in fp32: on CPU that costs it 170 units at a million
elements and 4,700 at ten million.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import all_reduce, exchange
from scale_core.comm.group import Group, check_initialized
from scale_core.device.streams import tensor_on
from scale_core.dtensor import is_dtensor, local_gradient, sharding_groups
from scale_core.shard import Placement, Stages, names_of_stages, on_local_tensors, shard_of, stages_of
from scale_core.sharded_tensor.replicated_parameter import reduced_gradient_of

# This many squares can be added in fp32 before the error of the sum reaches the error of its last rounding.
_PIECE = 256


class MeasuredGradient(NamedTuple):
    """One gradient in a norm."""

    param: Tensor  # The parameter, as its model lists it
    # The tensor whose mark says who holds which elements of the gradient: the parameter, or a piece of it.
    holder: Tensor
    grad: Tensor | None  # The elements of this rank; None counts as zeros


def _gradient_holders(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns, for each parameter, the tensor whose `grad` is its averaged gradient: mostly itself."""
    reduced = map(reduced_gradient_of, params)
    return [p if gradient is None else gradient.holder() for p, gradient in zip(params, reduced, strict=True)]


@on_local_tensors
def measured_gradients(params: Sequence[Tensor]) -> list[MeasuredGradient]:
    """Returns the gradients of these parameters, for a norm."""
    holders = _gradient_holders(params)
    return [MeasuredGradient(param, holder, holder.grad) for param, holder in zip(params, holders, strict=True)]


@checked_arguments
@torch.no_grad()
def grad_norm(params: Iterable[Tensor], norm_type: float = 2.0, limit_seconds: float | None = None) -> Tensor:
    """Returns the p-norm of all gradients together, as one number that is equal on all ranks.

    All ranks that share one of the parameters call it together, with the same parameters in the same order. Ranks of a
    pipeline call it with the parameters of their stages; a rank may have none. Norms are combined in fp64.

    Args:
        params: Parameters, full or local shards (`shard_of` tells), or one such; one without a gradient counts as
            zeros.
        norm_type: p > 0; `math.inf` is the largest magnitude.
        limit_seconds: How long to wait for a rank. None is the limit of its group.

    Returns:
        Scalar, fp32, or fp64 where all parameters that train are, on any rank; on the device of the gradients.

    Raises:
        TransferError: A rank did not take part.
        ValueError: `norm_type` is not above 0, a gradient is still a partial sum over a mesh axis, or `params` is an
            iterator that has been used up.

    Examples:
        >>> import torch
        >>> from scale_core import grad_norm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> grad_norm(model.parameters())
        tensor(5.)

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    check_initialized()
    return norm_of(measured_gradients(_listed(params)), norm_type, limit_seconds)


@on_local_tensors
def norm_of(
    gradients: Sequence[MeasuredGradient],
    norm_type: float = 2.0,
    limit_seconds: float | None = None,
    stages: Sequence[Stages] | None = None,
) -> Tensor:
    """Returns the norm of gradients as `grad_norm` does."""
    if not norm_type > 0:
        raise ValueError(f"expected norm_type > 0 or math.inf, got {norm_type}")
    tensors = (tensor for gradient in gradients for tensor in (gradient.grad, gradient.holder) if tensor is not None)
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    remaining = list(gradients)
    total, width = torch.zeros((), dtype=torch.float64, device=device), _NormDtype.NONE
    by_ranks: dict[Group, tuple[Tensor, _NormDtype]] = {}
    for model in stages_of(gradient.param for gradient in gradients) if stages is None else stages:
        names, copies = set(names_of_stages(model)), set(model.counted_elsewhere())
        counted = [gradient for gradient in remaining if gradient.param in names - copies]
        widest = _norm_dtype([gradient for gradient in remaining if gradient.param in names])
        remaining = [gradient for gradient in remaining if gradient.param not in names]
        share = _over_shards(counted, norm_type, device, limit_seconds)
        before, wide = by_ranks.get(model.group, (torch.zeros_like(total), _NormDtype.NONE))
        by_ranks[model.group] = _combined(before, share, norm_type), max(wide, widest)
    for group, (share, widest) in by_ranks.items():  # Once for each group: a rank without parameters knows no more.
        share, widest = _over_stages(share, widest, norm_type, group, limit_seconds)
        total, width = _combined(total, share, norm_type), max(width, widest)
    total = _combined(total, _over_shards(remaining, norm_type, device, limit_seconds), norm_type)
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    return total if max(width, _norm_dtype(remaining)) is _NormDtype.ALL_DOUBLE else total.to(torch.float32)


@checked_arguments
@torch.no_grad()
def clip_grad_norm_(
    params: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, limit_seconds: float | None = None
) -> Tensor:
    """Scales all gradients in place so that their norm is at most `max_norm`; returns the norm before.

    The factor is torch's, so that the result is torch's too. `max_norm` is 0 or more, and `math.inf` only measures; the
    rest, and the errors, are as in `grad_norm`.

    Raises:
        ValueError: Also for `max_norm` below 0 or NaN, or where there are no parameters.

    Examples:
        >>> import torch
        >>> from scale_core import clip_grad_norm_
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
        >>> clip_grad_norm_(model.parameters(), max_norm=1.0)  # over all meshes, each element once
        tensor(5.)
        >>> model.weight.grad.norm().round(decimals=3)
        tensor(1.)

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    check_max_norm(max_norm)
    check_initialized()
    listed = _listed(params)
    stages = stages_of(listed)
    if not listed and not stages:
        raise ValueError(
            "clip_grad_norm_: expected parameters, got an empty list, and nothing would be clipped: pass "
            "model.parameters(), or leave the call out where nothing trains"
        )
    return clip(measured_gradients(listed), max_norm, norm_type, limit_seconds, stages)


@torch.no_grad()
def clip(
    gradients: Sequence[MeasuredGradient],
    max_norm: float,
    norm_type: float = 2.0,
    limit_seconds: float | None = None,
    stages: Sequence[Stages] | None = None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips as `clip_grad_norm_` does, the gradients of `norm_of`; with `error_if_nonfinite` as in `check_finite`."""
    check_max_norm(max_norm)
    norm = norm_of(gradients, norm_type, limit_seconds, stages)
    if error_if_nonfinite:
        check_finite(norm, norm_type)
    if math.isinf(max_norm):
        return norm  # Nothing to scale, and no gradient is touched for it.
    scale_gradients([gradient.holder for gradient in gradients], clip_factor(norm, max_norm))
    return norm


@on_local_tensors
def scale_gradients(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies the `grad` of the parameters by a scalar, in place."""
    holders_by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.grad.numel():
            (grad,) = compat.inner_tensors(param.grad) if is_dtensor(param.grad) else [param.grad]
            holders_by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for (_, device), grads in holders_by_kind.items():
        torch._foreach_mul_(grads, factor.to(device))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """torch's factor for gradients of this norm, min(1, max_norm / (norm + 1e-6)); scalar, 1 without a bound."""
    return torch.ones_like(norm) if math.isinf(max_norm) else torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def check_max_norm(max_norm: float) -> None:
    """Refuses a negative or NaN bound, before anything is measured or sent."""
    if not max_norm >= 0:
        raise ValueError(
            f"expected max_norm of at least 0, got {max_norm}, because it would flip or lose every gradient: pass the "
            "largest norm allowed, or math.inf to measure the norm only"
        )


def check_finite(norm: Tensor, norm_type: float) -> None:
    """Refuses to clip by a norm that is inf or NaN, on all ranks, because the norm is equal on all."""
    (value,) = compat.values_of(norm.reshape(1), simulated=[1.0])
    if not math.isfinite(value):
        raise RuntimeError(
            f"the norm of order {float(norm_type)} of the gradients on all ranks is {value}, so they can't be clipped: "
            "skip the step, or pass error_if_nonfinite=False to scale them all the same"
        )


def is_shared(param: Tensor) -> bool:
    """Whether other ranks have gradients of the norm that this one belongs to."""
    return bool(_sharing_groups(param))


def _sharing_groups(param: Tensor) -> tuple[Group, ...]:
    """The groups between which a parameter is sharded, and the group of ranks that have other experts in its place."""
    shard = shard_of(param)
    if shard is None:
        return ()
    for axis in shard.axes:
        if axis.placement is Placement.PARTIAL:
            raise ValueError(
                f"the gradient of {shard.title} is a partial sum over ranks {list(axis.group.ranks)}: "
                "reduce it before its norm is taken"
            )
    groups = [axis.group for axis in shard.axes if axis.placement is Placement.SHARD and axis.group.size > 1]
    return tuple(groups if shard.counted_over is None else [*groups, shard.counted_over])


def _listed(params: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    listed = list(params)
    if not listed and iter(params) is params:
        if stages := stages_of(()):
            warn_if_used_up(params, stages)
            return listed
        raise ValueError(
            "expected parameters, got an iterator that has been used up, or has none: write params = "
            "list(model.parameters()) where they are needed twice, or pass model.parameters() again"
        )
    return listed


def warn_if_used_up(params: object, stages: Iterable[Stages]) -> None:
    """Warns of an iterator that gave none of the parameters that train here: it may be used up."""
    if isinstance(params, Iterator) and any(p.requires_grad for model in stages for p in names_of_stages(model)):
        warnings.warn(
            "this rank takes part in the norm of its pipeline with no parameters, since the iterator that was given "
            "had none: pass a list where this rank's stages have none of them; write params = "
            "list(pipe.parameters()) where they are needed twice",
            stacklevel=5,
        )


def _over_shards(
    gradients: Sequence[MeasuredGradient], norm_type: float, device: torch.device, limit_seconds: float | None
) -> Tensor:
    """The sum of |g|^p over all elements on all ranks that share a parameter, or their largest magnitude."""
    # By who shares them. The order of the parameters is the same on all ranks. An order by the ranks in a group would
    # not be, where an axis is the first of one group's and the last of another's.
    classes: dict[tuple[Group, ...], list[Tensor]] = {}
    for _, holder, grad in gradients:
        groups = sharding_groups(holder) if is_dtensor(holder) else _sharing_groups(holder)
        members, shard = classes.setdefault(groups, []), shard_of(holder)
        if is_dtensor(grad):  # Of the user's own tensor parallelism, together with shards.
            grad = local_gradient(grad, cast(Any, holder).placements)
        if grad is not None and (shard is None or shard.counted):
            # Of a complex number its magnitude counts, as in torch.
            members.append(grad.abs() if grad.is_complex() else grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, members in classes.items():
        share = _power_sum(members, norm_type, device)
        for group in groups:
            share = _over_group(share, norm_type, group, limit_seconds)
        total = _combined(total, share, norm_type)
    return total


class _NormDtype(IntEnum):
    """The dtype of a norm's result; of two the wider one holds for both."""

    NONE = 0  # There are none.
    ALL_DOUBLE = 1
    NARROWER = 2


def _norm_dtype(gradients: Sequence[MeasuredGradient]) -> _NormDtype:
    """The result's dtype by the parameters, equal on all ranks, not by gradients, which one rank may lack."""
    dtypes = {
        gradient.holder.dtype for gradient in gradients if gradient.param.requires_grad or gradient.grad is not None
    }
    if not dtypes:
        return _NormDtype.NONE
    return _NormDtype.ALL_DOUBLE if dtypes <= {torch.float64, torch.complex128} else _NormDtype.NARROWER


def _over_stages(
    share: Tensor, width: _NormDtype, norm_type: float, group: Group, limit_seconds: float | None
) -> tuple[Tensor, _NormDtype]:
    """The shares of all ranks of a pipeline, sent as numbers, since they may compute on different devices."""
    (local_share,) = compat.values_of(share.reshape(1), simulated=[1.0])
    (bits,) = struct.unpack("<q", struct.pack("<d", local_share))
    rows = exchange([bits, width], group, limit_seconds=limit_seconds)
    values = [struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in rows]
    shares = tensor_on(share.device, values, torch.float64)
    joined = shares.max() if math.isinf(norm_type) else shares.sum()
    return joined, _NormDtype(max(row[1] for row in rows))


def _combined(total: Tensor, share: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(total, share) if math.isinf(norm_type) else total + share


def _power_sum(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over all elements, or their largest magnitude; scalar, fp64."""
    short: dict[torch.device, list[Tensor]] = {}
    norms = []
    for grad in grads:
        if grad.numel() > _PIECE:
            norms += _norms_of_pieces(grad, norm_type)
        elif grad.numel():
            short.setdefault(grad.device, []).append(grad)
    norms += [torch.stack(torch._foreach_norm(tensors, norm_type, torch.float64)) for tensors in short.values()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.cat([norm.to(device) for norm in norms]).to(torch.float64)
    return joined.max() if math.isinf(norm_type) else (joined**norm_type).sum()


def _norms_of_pieces(grad: Tensor, norm_type: float) -> list[Tensor]:
    """The norms of pieces of a long 1-D gradient that are short enough to be added up in fp32."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.detach().reshape(-1)
    remainder = flat.numel() % _PIECE
    # Where there are many gradients, the work for each of them counts; most have no rest.
    pieces = (
        [flat[:-remainder].view(-1, _PIECE), flat[-remainder:].view(1, -1)] if remainder else [flat.view(-1, _PIECE)]
    )
    return [torch.linalg.vector_norm(piece, norm_type, dim=1, dtype=dtype) for piece in pieces]


def _over_group(share: Tensor, norm_type: float, group: Group, limit_seconds: float | None) -> Tensor:
    if not math.isinf(norm_type):
        return all_reduce(share, group).wait(limit_seconds)
    # No maximum of a transport is sure to keep a NaN, and one that only some ranks see must reach them all.
    largest = torch.stack([share.nan_to_num(nan=0.0, posinf=math.inf), share.isnan().to(share.dtype)])
    all_reduce(largest, group, op="max").wait(limit_seconds)
    return torch.where(largest[1] > 0, math.nan, largest[0])
