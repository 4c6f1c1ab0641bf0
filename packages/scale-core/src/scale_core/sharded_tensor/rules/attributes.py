"""Attributes of sharded tensors: sizes are the sizes of the full tensor; gradients and data are sharded as well."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.errors import ShardedTensorError
from scale_core.shard import ALIASES, Shard
from scale_core.sharded_tensor.rules.arguments import Rule, call_on_local, marked, operand, record_of, refuse
from scale_core.sharded_tensor.tensor import is_sharded

_SHARDED_ATTRIBUTES = frozenset({"grad", "real", "imag"})
_VIEWS = frozenset({"T", "mT", "H", "mH"})


def get_attribute(name: str) -> Rule:
    """The rule for reading an attribute."""
    if name == "data":
        return _detach
    if name in _OF_FULL:
        size: Callable[[Tensor, Shard], Any] = _OF_FULL[name]
        return lambda func, args, kwargs: size(args[0], record_of(args[0]))

    def get(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _VIEWS:
            refuse(name, record_of(args[0]))
        value = func(*args, **kwargs)
        if not isinstance(value, Tensor):
            return value
        if name not in _SHARDED_ATTRIBUTES:
            refuse(name, record_of(args[0]))
        return marked(value, record_of(args[0]))

    return get


def set_attribute(name: str) -> Rule:
    """The rule for setting an attribute."""

    def set_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, value = args
        if not is_sharded(tensor):
            refuse(f"{name} =", record_of(value), f"a plain tensor can't have a part of it as its {name}")
        if name not in ("data", "grad") or not isinstance(value, Tensor):
            return func(*args, **kwargs)
        shard = record_of(tensor)
        part = operand(f"{name} =", value, shard, tensor)
        if name == "grad":
            return func(tensor, part if is_sharded(value) else part.reshape(tensor.shape).clone())
        return _set_data(tensor, value, part)

    return set_


def _detach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`detach()`, and the attribute `data`: an alias of the same memory, which is noted for `_set_data`."""
    # A write to `data` counts in the version of the shard, by which a unit knows that its gathered parameters are
    # stale.
    tensor = args[0]
    alias = marked(tensor.detach(), record_of(tensor))
    aliases: list[weakref.ref[Tensor]] = vars(tensor).setdefault(ALIASES, [])
    aliases[:] = [ref for ref in aliases if ref() is not None] + [weakref.ref(alias)]
    return alias


def _set_data(tensor: Tensor, value: Tensor, part: Tensor) -> None:
    """Copies values into the memory of a shard, which stays a part of the buffer that its unit sends."""
    shard = record_of(tensor)
    if value.dtype != tensor.dtype or value.device != tensor.device:
        raise ShardedTensorError(
            f"data = of {shard.title}: expected {tensor.dtype} on {tensor.device}, got {value.dtype} on "
            f"{value.device}. Its memory is a part of a buffer that the unit sends. Convert or move the model, "
            "model.to(...), instead"
        )
    # An alias from before, as `backup = param.data`, keeps its values in memory of its own, as in torch.
    for ref in vars(tensor).pop(ALIASES, ()):
        if (alias := ref()) is not None and alias is not value:
            torch.Tensor.data.__set__(alias, alias.detach().clone())  # type: ignore[attr-defined]
    with torch.no_grad():
        tensor.detach().copy_(part.reshape(tensor.shape))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


_OF_FULL: dict[str, Callable[[Tensor, Shard], Any]] = {
    "shape": lambda _, shard: torch.Size(shard.shape),
    "ndim": lambda _, shard: len(shard.shape),
    "nbytes": lambda tensor, shard: shard.numel * tensor.itemsize,
    "dim": lambda _, shard: len(shard.shape),
    "ndimension": lambda _, shard: len(shard.shape),
    "numel": lambda _, shard: shard.numel,
    "nelement": lambda _, shard: shard.numel,
    "is_contiguous": lambda _, shard: True,
}


def _method_of_full(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _OF_FULL[func.__name__](args[0], record_of(args[0]))


def _size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = torch.Size(record_of(args[0]).shape)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return shape if dim is None else shape[dim]


def _stride(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    strides = _strides(record_of(args[0]).shape)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return strides if dim is None else strides[dim]


def _length(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    shape = record_of(args[0]).shape
    if not shape:
        raise TypeError("len() of a 0-d tensor")
    return shape[0]


def _register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook gets a gradient that knows that it is a part."""
    tensor, hook = args
    shard = record_of(tensor)

    @functools.wraps(hook)
    def on_sharded(grad: Tensor) -> Any:
        return hook(marked(grad, shard))

    return func(tensor, on_sharded)


def _can_share_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `module.to(...)` sets `data`; a gradient is replaced where its dtype or device changes."""
    tensor, value = args
    is_same_kind = tensor.dtype == value.dtype and tensor.device == value.device
    return bool(func(tensor, value)) and (is_same_kind or isinstance(tensor, nn.Parameter))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("dim", "ndimension", "numel", "nelement", "is_contiguous"), _method_of_full),
    "size": _size,
    "stride": _stride,
    "__len__": _length,
    "register_hook": _register_hook,
    "detach": _detach,
    "_has_compatible_shallow_copy_type": _can_share_data,
    **dict.fromkeys(
        (
            *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "is_pinned"),
            *("element_size", "get_device", "result_type", "can_cast", "_is_view", "is_same_size", "is_shared"),
            *("requires_grad_", "retain_grad", "register_post_accumulate_grad_hook", "backward", "has_names"),
            *("untyped_storage", "storage_offset", "_typed_storage", "record_stream", "is_set_to", "is_tensor"),
            "__format__",
        ),
        call_on_local,
    ),
}
