"""The common part of rules for torch's functions: sharded tensors among arguments, operands, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from scale_core.errors import ShardedTensorError
from scale_core.shard import Shard, shard_of
from scale_core.sharded_tensor import reductions
from scale_core.sharded_tensor.elements import same_elements
from scale_core.sharded_tensor.reductions import Sharded
from scale_core.sharded_tensor.tensor import is_sharded, mark_sharded
from scale_core.tree import tensors_in

Rule: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes a function of torch and its arguments; calls it, computes its result or raises."""


def record_of(tensor: Tensor) -> Shard:
    """The record of a sharded tensor."""
    shard = shard_of(tensor)
    if shard is None:
        raise ShardedTensorError(f"a plain tensor {list(tensor.shape)} in place of a sharded one is not supported here")
    return shard


def marked(value: Any, shard: Shard) -> Any:
    """Makes the plain tensors of a result sharded ones."""
    if type(value) is Tensor:
        return mark_sharded(value, shard)
    if isinstance(value, tuple | list):
        parts = [marked(part, shard) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def title_of(func: Callable[..., Any] | str) -> str:
    """The name of a function, or of an attribute, in errors."""
    return func if isinstance(func, str) else getattr(func, "__name__", str(func)).strip("_")


def renamed(kwargs: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The keyword arguments under the names that another form of the function has for them."""
    return {names.get(key, key): value for key, value in kwargs.items()}


def call_on_local(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A rule: calls the function on this rank's elements, and returns its result unchanged."""
    return func(*args, **kwargs)


def refuse(func: Callable[..., Any] | str, shard: Shard, why: str = "") -> NoReturn:
    """Raises the error of a function that needs elements of other ranks."""
    ranks = " and ".join(str(list(group.ranks)) for group in shard.divided_groups)
    why = why or "it needs elements that other ranks have"
    raise ShardedTensorError(
        f"{title_of(func)} of {shard.title} {list(shard.shape)}: {why}. The tensor is divided between the ranks "
        f"{ranks}. Write tensor.full_tensor() on all of these ranks for the full tensor, or tensor.to_local() for this "
        "rank's elements. In an optimizer, build OSS(model.parameters(), optim=...), which gives each full tensor to "
        "one rank for the step"
    )


def refuse_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """A rule: refuses a call for its first sharded tensor."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if is_sharded(tensor)]
    if not tensors:
        raise ShardedTensorError(
            f"{title_of(func)}: not supported on sharded tensors: write full_tensor() or to_local() first"
        )
    refuse(func, record_of(tensors[0]))


def operand(func: Callable[..., Any] | str, value: Tensor, shard: Shard, like: Tensor) -> Tensor:
    """Returns the elements of `value` that belong to this rank's elements of `shard`, in the shape of `like`."""
    if is_sharded(value):
        other = record_of(value)
        if same_elements(other, shard):
            return value if value.shape == like.shape else value.view(like.shape)
        if other.numel == 1 and shard.numel > 1:
            return full_value(value)
        refuse(func, shard, f"{other.title} {list(other.shape)} is divided in other places")
    if value.numel() == 1 and value.dim() <= len(shard.shape) and shard.numel != 1:
        return reductions.part_of(value, shard, torch.Size(()), title_of(func))
    try:
        fits = torch.broadcast_shapes(value.shape, shard.shape) == torch.Size(shard.shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ShardedTensorError(
            f"{title_of(func)}: a tensor {list(value.shape)} does not fit {shard.title} {list(shard.shape)}, of which "
            "this rank has a part. Make the tensor by torch.zeros_like(param), or in the full shape, param.shape"
        )
    return reductions.part_of(value, shard, like.shape, title_of(func))


def full_value(tensor: Tensor) -> Tensor:
    """The full tensor of one that has a single element, on all ranks."""
    shard = record_of(tensor)
    result = reductions.reduce(reductions.sum_of(None), Sharded(tensor, shard), None, False, "the value")
    return result.to(tensor.dtype)


def largest_sharded(tensors: Sequence[Tensor]) -> Tensor:
    """The sharded tensor that the result is divided like: the largest."""
    return max((tensor for tensor in tensors if is_sharded(tensor)), key=lambda tensor: record_of(tensor).numel)


def full_shape(tensor: Tensor) -> Sequence[int]:
    """The shape of the full tensor."""
    return record_of(tensor).shape if is_sharded(tensor) else tensor.shape
