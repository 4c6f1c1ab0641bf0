"""Random values of sharded tensors: as one process draws them for the full tensor; each rank takes its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scale_core.sharded_tensor.elements import local_part
from scale_core.sharded_tensor.rules.arguments import (
    Rule,
    largest_sharded,
    marked,
    operand,
    record_of,
    refuse_call,
)
from scale_core.sharded_tensor.tensor import is_sharded
from scale_core.tree import tensors_in


def fill_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random values in place, and initializers: values of the full tensor are drawn, and this rank takes its part."""
    arguments = dict(kwargs)
    tensor = args[0] if args else arguments.pop("tensor", arguments.pop("input", None))
    others = list(tensors_in((args[1:], arguments)))
    if not is_sharded(tensor) or any(map(is_sharded, others)):
        refuse_call(func, args, kwargs)
    with torch.no_grad():
        full = torch.empty(record_of(tensor).shape, dtype=tensor.dtype, device=tensor.device)
        func(full, *args[1:], **arguments)
        tensor.copy_(local_part(full, record_of(tensor)).reshape(tensor.shape))
    return tensor


def _random_like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    shard = record_of(tensor)
    like = torch.empty(shard.shape, dtype=tensor.dtype, device=tensor.device)
    full = func(like, *args[1:], **kwargs)
    return marked(local_part(full, shard).reshape(tensor.shape).clone(), shard)


def _normal(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.normal(mean, std)` with one or both sharded."""

    def bound(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> tuple[Any, ...]:
        return mean, std, generator

    try:
        mean, std, generator = bound(*args, **kwargs)
    except TypeError:
        refuse_call(func, args, kwargs)
    like = largest_sharded([value for value in (mean, std) if isinstance(value, torch.Tensor)])
    shard = record_of(like)
    full = torch.empty(shard.shape, dtype=like.dtype, device=like.device).normal_(generator=generator)
    values = local_part(full, shard).reshape(like.shape)
    mean, std = (operand(func, v, shard, like) if isinstance(v, torch.Tensor) else v for v in (mean, std))
    return marked(values * std + mean, shard)


RULES: dict[str, Rule] = {
    "normal": _normal,
    **dict.fromkeys(
        ("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"),
        fill_in_place,
    ),
    **dict.fromkeys(("randn_like", "rand_like", "randint_like"), _random_like),
}
