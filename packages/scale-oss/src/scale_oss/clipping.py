"""Clipping by one norm of all gradients, of which each rank has, or measures, its own part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from scale_core.events import Event
from scale_core.norms import check_max_norm, clip_factor, grad_norm

if TYPE_CHECKING:  # optimizer.py stands on this file.
    from scale_oss.optimizer import OSS


def clip_together(
    optimizers: Sequence[OSS],
    max_norm: float,
    norm_type: float = 2.0,
    filter_params_fn: Callable[[Iterator[nn.Parameter]], Iterable[nn.Parameter]] | None = None,
) -> Tensor:
    """Scales the gradients of several optimizers by one norm: see `OSS.clip_grad_norm`."""
    check_max_norm(max_norm)
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    wanted = {id(param) for param in (params if filter_params_fn is None else filter_params_fn(iter(params)))}
    if wanted.isdisjoint(map(id, params)):
        raise ValueError(
            "clip_grad_norm: filter_params_fn returned none of the optimizer's parameters, and nothing would be "
            "clipped: have it return some of those that it is given, each once, such as a list of them"
        )
    chosen: list[tuple[nn.Parameter, nn.Parameter]] = []  # whose gradient is measured, and whose is scaled
    for optimizer in optimizers:
        optimizer.take_gradients()
        reduced = optimizer.gets_reduced_gradients
        # Of whole gradients all is scaled, so that every rank sees the same ones.
        chosen += [(piece, piece if reduced else p) for p, piece in optimizer.measured() if id(p) in wanted]
    contract = optimizers[0].contract
    with contract.waiting(Event("gradient norm", "")):
        norm = grad_norm([piece for piece, _ in chosen], norm_type, contract.limit_seconds)
    if math.isinf(max_norm):
        return norm
    factor = clip_factor(norm, max_norm)
    for _, scaled in chosen:
        if scaled.grad is not None:
            scaled.grad.mul_(factor.to(scaled.grad.device))
    return norm
