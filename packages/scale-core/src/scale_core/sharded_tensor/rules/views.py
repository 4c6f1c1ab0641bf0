"""Views of sharded tensors that are sharded: other shapes of the same elements, slices of the first dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scale_core.shard import Shard
from scale_core.sharded_tensor.chunks import sizes_of
from scale_core.sharded_tensor.elements import local_shape, reshaped, sliced
from scale_core.sharded_tensor.rules.arguments import (
    Rule,
    full_shape,
    marked,
    operand,
    record_of,
    refuse,
    refuse_call,
    renamed,
)
from scale_core.sharded_tensor.tensor import is_sharded
from scale_core.tree import tensors_in


def _as_other(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view_as`, `reshape_as`, `expand_as` and `type_as`."""
    tensor: Tensor = args[0]
    other: Tensor = kwargs["other"] if "other" in kwargs else args[1]
    if func.__name__ == "type_as":
        result = tensor.to(other.dtype)
        return marked(result, record_of(tensor)) if is_sharded(tensor) else result
    like = torch.empty(full_shape(other), device="meta")
    if not is_sharded(tensor):
        return func(tensor, like)
    return _expand(func, (tensor, like), {})


def _reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the same elements in another shape."""
    tensor = args[0]
    shape_args = kwargs.get("shape", kwargs.get("size", args[1:]))
    if kwargs.get("dtype") is not None or (args[1:] and isinstance(args[1], torch.dtype)):
        refuse(func, record_of(tensor), "a view in another dtype is not supported")
    if len(shape_args) == 1 and isinstance(shape_args[0], Sequence):
        shape_args = shape_args[0]
    return _viewed(func, tensor, _resolved(tuple(shape_args), record_of(tensor)))


def _resolved(shape: tuple[Any, ...], shard: Shard) -> tuple[int, ...]:
    """A shape without -1; the shape is checked by torch itself."""
    return tuple(torch.empty(shard.shape, device="meta").reshape(shape).shape)


def _viewed(func: Callable[..., Any], tensor: Tensor, shape: tuple[int, ...]) -> Any:
    shard = record_of(tensor)
    view = reshaped(shard, shape)
    if view is None:
        refuse(func, shard, "this rank's elements are not one contiguous range of the full tensor")
    if view is shard:
        return marked(tensor.view_as(tensor), shard)
    return marked(tensor.reshape(_local_sizes(view)), view)


def _local_sizes(shard: Shard) -> tuple[int, ...]:
    """The shape of this rank's elements."""
    sizes = sizes_of(shard.ranges) if shard.ranges else local_shape(shard.shape, shard.start, shard.stop)
    return sizes if math.prod(sizes) == shard.stop - shard.start else (shard.stop - shard.start,)


def _as_real(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`view_as_real`, which torch's optimizers call: a last dimension of two indices, which is never cut."""

    def bound(input: Tensor) -> Tensor:
        return input

    tensor = bound(*args, **renamed(kwargs, self="input"))
    shard = record_of(tensor)
    ranges = (*shard.ranges, ((0, 2),)) if shard.ranges else ()
    real = replace(shard, shape=(*shard.shape, 2), start=2 * shard.start, stop=2 * shard.stop, ranges=ranges)
    return marked(func(tensor).reshape(_local_sizes(real)), real)


def _by_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view that inserts or drops dimensions of one index, or joins some."""
    meta = torch.empty(record_of(args[0]).shape, device="meta")
    return _viewed(func, args[0], tuple(func(meta, *args[1:], **kwargs).shape))


def _expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    meta = torch.empty(record_of(args[0]).shape, device="meta")
    shape = tuple(func(meta, *args[1:], **kwargs).shape)
    if math.prod(shape) != record_of(args[0]).numel:
        refuse(func, record_of(args[0]))
    return _viewed(func, args[0], shape)


def _rows(func: Callable[..., Any], tensor: Tensor, first: int, last: int) -> Any:
    shard = record_of(tensor)
    part = sliced(shard, first, last)
    if part is None:
        refuse(func, shard, "this rank's elements are not one contiguous range of the full tensor")
    record, begin, end = part
    flat = tensor.reshape(-1)[begin:end]
    return marked(flat.view(local_shape(record.shape, record.start, record.stop)), record)


def _narrow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def bound(input: Tensor, dim: int, start: Any, length: int) -> tuple[Tensor, int, Any, int]:
        return input, dim, start, length

    tensor, dim, start, length = bound(*args, **renamed(kwargs, self="input"))
    if not isinstance(start, int) or dim % len(record_of(tensor).shape) != 0:
        refuse(func, record_of(tensor))
    size = record_of(tensor).shape[0]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise IndexError(f"narrow: start {start} and length {length} exceed the dimension of {size}")
    return _rows(func, tensor, start, start + length)


def _get_item(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    if not is_sharded(tensor):
        refuse_call(func, args, kwargs)
    shard = record_of(tensor)
    indices: list[Any] = list(index) if isinstance(index, tuple) else [index]
    while indices and _takes_all(indices[-1]):
        indices.pop()
    if not indices:
        return marked(tensor.view_as(tensor), shard)
    first: Any = indices[0]
    if len(indices) > 1 or not shard.shape or type(first) not in (int, slice):
        refuse(func, shard)
    size = shard.shape[0]
    if isinstance(first, slice):
        begin, end, step = first.indices(size)
        if step != 1:
            refuse(func, shard)
        return _rows(func, tensor, begin, max(begin, end))
    if not -size <= first < size:
        raise IndexError(f"index {first} is out of bounds for dimension 0 with size {size}")
    return _viewed(func, _rows(func, tensor, first % size, first % size + 1), shard.shape[1:])


def _takes_all(index: Any) -> bool:
    return index is Ellipsis or (type(index) is slice and index == slice(None))


def _set_item(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index, value = args
    if not is_sharded(tensor):
        refuse_call(func, args, kwargs)
    shard = record_of(tensor)
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
    if is_mask and full_shape(index) == tuple(shard.shape) and (not isinstance(value, Tensor) or value.numel() == 1):
        tensor[operand(func, index, shard, tensor)] = value
        return None
    view = _get_item(torch.Tensor.__getitem__, (tensor, index), {})
    source = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
    view.copy_(operand(func, source, record_of(view), view))
    return None


def _chunks(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`split`, `chunk` and `unbind` along the first dimension."""
    tensor = args[0]
    if any(map(is_sharded, tensors_in((args[1:], kwargs)))):
        refuse_call(func, args, kwargs)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if func.__name__ == "unbind":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    shard = record_of(tensor)
    if not shard.shape or dim % len(shard.shape) != 0:
        refuse(func, shard)
    meta = torch.empty(shard.shape, device="meta")
    pieces, begin = [], 0
    for piece in func(meta, *args[1:], **kwargs):
        if func.__name__ == "unbind":
            pieces.append(_get_item(torch.Tensor.__getitem__, (tensor, begin), {}))
            begin += 1
        else:
            pieces.append(_rows(func, tensor, begin, begin + piece.shape[0]))
            begin += piece.shape[0]
    return tuple(pieces)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view_as", "reshape_as", "expand_as", "type_as"), _as_other),
    **dict.fromkeys(("view", "reshape"), _reshape),
    **dict.fromkeys(("flatten", "unflatten", "squeeze", "unsqueeze", "ravel", "atleast_1d", "atleast_2d"), _by_meta),
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    "view_as_real": _as_real,
    "narrow": _narrow,
    "__getitem__": _get_item,
    "__setitem__": _set_item,
    **dict.fromkeys(("split", "chunk", "unbind", "split_with_sizes", "tensor_split"), _chunks),
}
