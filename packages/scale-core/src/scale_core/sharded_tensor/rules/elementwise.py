"""Functions that compute each element by itself: they run on this rank's elements, and their results are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.shard import Shard
from scale_core.sharded_tensor import reductions
from scale_core.sharded_tensor.elements import local_part, same_elements
from scale_core.sharded_tensor.full_tensor import gather_shard
from scale_core.sharded_tensor.rules import pointwise
from scale_core.sharded_tensor.rules.arguments import (
    Rule,
    call_on_local,
    full_value,
    largest_sharded,
    marked,
    operand,
    record_of,
    refuse,
    refuse_call,
)
from scale_core.sharded_tensor.tensor import is_sharded
from scale_core.tree import tensors_in


def on_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that is elementwise in its result; for other functions it raises."""
    tensors = list(tensors_in((args, kwargs)))
    if not any(map(is_sharded, tensors)):
        refuse_call(func, args, kwargs)
    largest = largest_sharded(tensors)
    shard = record_of(largest)
    scalars = {
        id(tensor)
        for tensor in tensors
        if shard.numel != 1 and (record_of(tensor).numel if is_sharded(tensor) else tensor.numel()) == 1
    }
    if not pointwise.is_pointwise(func, args, kwargs, scalars):
        refuse(func, shard)
    name = getattr(func, "__name__", "")
    written = [kwargs["out"]] if isinstance(kwargs.get("out"), Tensor) else list(kwargs.get("out") or ())
    if _is_in_place(name):
        written.append(args[0])
    if shard.numel == 1 and any(not is_sharded(target) for target in written):
        return _on_full_values(func, args, kwargs)
    if any(_is_full_parameter(target, largest) for target in written):
        return _on_full_tensors(func, args, kwargs)
    for target in written:
        check_target(func, target, largest)

    def local(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if any(value is target for target in written) else operand(func, value, shard, largest)
        if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            return type(value)(map(local, value))
        return value

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    return marked(result, shard)


def _on_full_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of tensors of one element, computed on all ranks."""

    def full(value: Any) -> Any:
        return full_value(value).reshape(record_of(value).shape) if is_sharded(value) else value

    return func(*map(full, args), **{key: full(value) for key, value in kwargs.items()})


def _is_full_parameter(target: Tensor, largest: Tensor) -> bool:
    """Whether a result like `largest` is written to a parameter that each rank has in full, as with its gradient."""
    return isinstance(target, nn.Parameter) and not is_sharded(target) and target.shape == record_of(largest).shape


def _on_full_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function whose sharded arguments are gathered first; all ranks call it together."""

    def full(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(full, value))
        return gather_shard(value.detach(), record_of(value)) if is_sharded(value) else value

    return func(*map(full, args), **{key: full(value) for key, value in kwargs.items()})


def check_target(func: Callable[..., Any], target: Tensor, largest: Tensor) -> None:
    """Checks that a sharded result can be written to a tensor: to one with the same elements.

    A plain tensor of the full shape that nothing else refers to, as a state made by `torch.zeros(param.shape)`, becomes
    one.
    """
    shard = record_of(largest)
    if is_sharded(target):
        if not same_elements(record_of(target), shard):
            refuse(func, shard, "its result has elements on other ranks than the tensor that it is written to")
        return
    can_become_sharded = type(target) is Tensor and not target.requires_grad and compat.is_unshared(target)
    if not can_become_sharded or tuple(target.shape) != tuple(shard.shape):
        refuse(
            func,
            shard,
            f"its result is divided, and the tensor {list(target.shape)} that it is written to is not. Make that by "
            "torch.zeros_like(tensor)",
        )
    target.data = local_part(target.detach(), shard).reshape(largest.shape).clone()
    marked(target, shard)


def _is_in_place(name: str) -> bool:
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.endswith("__")


def on_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise function of lists of tensors."""
    lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
    largest_by_row = [largest_sharded(row) if any(map(is_sharded, row)) else None for row in zip(*lists, strict=True)]
    shards = [None if largest is None else record_of(largest) for largest in largest_by_row]
    if func.__name__.endswith("_"):
        rows = list(zip(args[0], largest_by_row, strict=True))
        if any(largest is not None and _is_full_parameter(target, largest) for target, largest in rows):
            return _on_full_tensors(func, args, kwargs)
        for target, largest in rows:
            if largest is not None:
                check_target(func, target, largest)

    def local(value: Any) -> Any:
        if _is_tensor_list(value):
            return [
                tensor if largest is None or shard is None else operand(func, tensor, shard, largest)
                for tensor, largest, shard in zip(value, largest_by_row, shards, strict=True)
            ]
        return full_value(value) if is_sharded(value) else value

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if result is None or not isinstance(result, list | tuple):
        return result
    if func.__name__.endswith("_"):
        return args[0]
    return [part if shard is None else marked(part, shard) for part, shard in zip(result, shards, strict=True)]


def _is_tensor_list(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(part, Tensor) for part in value)


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A scaler's division of gradients: all ranks find the same infinities."""
    grads, found_inf, *options = args
    result = func(grads, found_inf, *options, **kwargs)
    for shard in _one_per_group(grads):
        found_inf.copy_(reductions.reduce_over_ranks(found_inf, shard, lambda values: values.amax(0), "unscale"))
    return result


def _one_per_group(tensors: Sequence[Tensor]) -> list[Shard]:
    shards: dict[tuple[Group, ...], Shard] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            shard = record_of(tensor)
            shards.setdefault(shard.divided_groups, shard)
    return list(shards.values())


# Copies, conversions, and tensors of the same layout.


def _same_layout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_sharded(args[0]):
        refuse_call(func, args, kwargs)
    return marked(func(*args, **kwargs), record_of(args[0]))


def _copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], kwargs.pop("src", kwargs.pop("other", args[1] if len(args) > 1 else None))
    if is_sharded(source) and _is_full_parameter(target, source):
        return _on_full_tensors(func, (target, source, *args[2:]), kwargs)
    if not is_sharded(target):
        check_target(func, target, source)
    return func(target, operand(func, source, record_of(target), target), *args[2:], **kwargs)


def _gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`: gradients of sharded tensors are sharded like them."""
    inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
    result = func(*args, **kwargs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(
        marked(grad, record_of(tensor)) if is_sharded(tensor) and grad is not None else grad
        for tensor, grad in zip(inputs, result, strict=True)
    )


def _new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of values that are given; values of a sharded tensor raise."""
    if any(map(is_sharded, tensors_in((args[1:], kwargs)))):
        refuse_call(func, args[1:], kwargs)
    return func(*args, **kwargs)


RULES: dict[str, Rule] = {
    "new_tensor": _new_tensor,
    **dict.fromkeys(
        (
            *(
                "detach_",
                "clone",
                "alias",
                "contiguous",
                "positive",
                "pin_memory",
                "cpu",
                "cuda",
                "to",
                "type",
            ),
            *("float", "double", "half", "bfloat16", "int", "long", "bool"),
            *("zeros_like", "ones_like", "empty_like", "full_like"),
        ),
        _same_layout,
    ),
    "copy_": _copy,
    # A plain tensor in a shape that is given.
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), call_on_local),
    "grad": _gradients,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), call_on_local),
}
