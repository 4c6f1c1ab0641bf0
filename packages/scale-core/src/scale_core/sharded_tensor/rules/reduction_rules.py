"""The arguments of torch's reductions, the one of `reductions` for each, and functions composed of these."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.errors import ShardedTensorError
from scale_core.shard import Shard
from scale_core.sharded_tensor import reductions
from scale_core.sharded_tensor.elements import same_elements
from scale_core.sharded_tensor.full_tensor import gather_shard
from scale_core.sharded_tensor.reductions import Sharded
from scale_core.sharded_tensor.rules.arguments import (
    Rule,
    full_shape,
    full_value,
    largest_sharded,
    operand,
    record_of,
    refuse,
    refuse_call,
    renamed,
    title_of,
)
from scale_core.sharded_tensor.rules.elementwise import on_elements
from scale_core.sharded_tensor.tensor import is_sharded
from scale_core.tree import tensors_in


def _numbers(args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Leading dimensions that are given one by one, as in `x.sum(0, 1)`, as one; and the rest."""
    leading = []
    for value in args:
        if not isinstance(value, int) or isinstance(value, bool):
            break
        leading.append(value)
    if len(leading) < 2:
        return (), list(args)
    return tuple(leading), list(args[len(leading) :])


def _dims(dim: Any) -> tuple[int, ...] | None:
    if dim is None:
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _reduction(bound: Callable[..., Any]) -> Rule:
    """A rule from a function with torch's arguments after the tensor; other arguments raise."""

    def rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = renamed(kwargs, axis="dim", keepdims="keepdim")
        tensor = args[0] if args else arguments.pop("input", arguments.pop("self", None))
        if not is_sharded(tensor) or any(map(is_sharded, tensors_in((args[1:], arguments)))):
            refuse_call(func, args, kwargs)
        if arguments.pop("out", None) is not None:
            refuse(func, record_of(tensor), "out= is not supported")
        dims, other_args = _numbers(args[1:])
        if any(isinstance(value, Tensor) for value in other_args):
            return on_elements(func, args, kwargs)
        name = title_of(func)
        sharded = Sharded(tensor, record_of(tensor))
        if not sharded.shard.numel:
            return func(tensor.new_empty(sharded.shard.shape), *args[1:], **kwargs)
        try:
            return bound(sharded, *([dims] if dims else []), *other_args, what=name, **arguments)
        except TypeError as error:
            raise ShardedTensorError(
                f"{name} of {sharded.shard.title}: these arguments are not supported on a divided tensor ({error}). "
                "Write tensor.full_tensor() on all ranks first"
            ) from error

    return rule


def _sum(x: Sharded, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, what: str) -> Tensor:
    kind = dtype or (torch.int64 if not (x.local.is_floating_point() or x.local.is_complex()) else x.local.dtype)
    return reductions.reduce(reductions.sum_of(reductions.wide(kind)), x, _dims(dim), keepdim, what).to(kind)


def _nansum(x: Sharded, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, what: str) -> Tensor:
    without_nan = torch.where(x.local.isnan(), torch.zeros_like(x.local), x.local)
    return _sum(x._replace(local=without_nan), dim, keepdim, dtype, what=what)


def _mean(x: Sharded, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, what: str) -> Tensor:
    return reductions.mean(x, _dims(dim), keepdim, dtype, what)


def _amax(x: Sharded, dim: Any = (), keepdim: bool = False, *, what: str) -> Tensor:
    return reductions.reduce(reductions.largest_of(x.local.dtype), x, _dims(dim) or None, keepdim, what)


def _amin(x: Sharded, dim: Any = (), keepdim: bool = False, *, what: str) -> Tensor:
    return reductions.reduce(reductions.smallest_of(x.local.dtype), x, _dims(dim) or None, keepdim, what)


def _max(x: Sharded, *, what: str) -> Tensor:
    return _amax(x, what=what)


def _min(x: Sharded, *, what: str) -> Tensor:
    return _amin(x, what=what)


def _aminmax(x: Sharded, *, dim: Any = None, keepdim: bool = False, what: str) -> Any:
    return torch.return_types.aminmax((_amin(x, dim, keepdim, what=what), _amax(x, dim, keepdim, what=what)))


def _any(x: Sharded, dim: Any = None, keepdim: bool = False, *, what: str) -> Tensor:
    result = reductions.reduce(reductions.ANY, x._replace(local=x.local != 0), _dims(dim), keepdim, what)
    return result.to(torch.uint8) if x.local.dtype is torch.uint8 else result


def _all(x: Sharded, dim: Any = None, keepdim: bool = False, *, what: str) -> Tensor:
    result = reductions.reduce(reductions.ALL, x._replace(local=x.local != 0), _dims(dim), keepdim, what)
    return result.to(torch.uint8) if x.local.dtype is torch.uint8 else result


def _count_nonzero(x: Sharded, dim: Any = None, *, what: str) -> Tensor:
    return _sum(x._replace(local=x.local != 0), dim, what=what)


def _vector_norm(
    x: Sharded, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, what: str
) -> Tensor:
    return reductions.norm(x, float(ord), _dims(dim), keepdim, dtype, what)


def _norm(
    x: Sharded, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None, *, what: str
) -> Tensor:
    if p == "nuc":
        raise TypeError("the nuclear norm needs the full matrix")
    return reductions.norm(x, 2.0 if p in ("fro", None) else float(p), _dims(dim), keepdim, dtype, what)


def _linalg_norm(
    x: Sharded, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, what: str
) -> Tensor:
    dims = _dims(dim)
    num_dims = len(dims) if dims is not None else len(x.shard.shape)
    if ord is not None and num_dims != 1 and not (ord == "fro" and num_dims == 2):
        raise TypeError(f"the matrix norm of order {ord} needs the full matrix")
    return reductions.norm(x, 2.0 if ord in ("fro", None) else float(ord), dims, keepdim, dtype, what)


def _matrix_norm(
    x: Sharded, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None, what: str
) -> Tensor:
    if ord != "fro":
        raise TypeError(f"the matrix norm of order {ord} needs the full matrix")
    return reductions.norm(x, 2.0, _dims(dim), keepdim, dtype, what)


def _variance(root: bool, with_mean: bool) -> Callable[..., Any]:
    def variance(
        x: Sharded, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None, what: str
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if unbiased is not None and correction is not None:
            raise TypeError("unbiased and correction")
        correction = (1 if unbiased in (None, True) else 0) if correction is None else correction
        result, center = reductions.variance(x, _dims(dim) or None, keepdim, correction, what)
        result = reductions.power_of(result, 0.5) if root else result
        return (result, center) if with_mean else result

    return variance


def _item(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = record_of(args[0])
    if shard.numel != 1:
        refuse(func, shard, "it has more than one element")
    if args[0].is_meta:  # A trial without values.
        return {"__bool__": bool, "__int__": int, "__index__": int}.get(func.__name__, float)(1)
    return func(full_value(args[0]), *args[1:], **kwargs)


def _dot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def bind(input: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return input, tensor

    try:
        left, right = bind(*args, **renamed(kwargs, other="tensor"))
    except TypeError:
        refuse_call(func, args, kwargs)
    largest = largest_sharded([left, right])
    shard = record_of(largest)
    if len(shard.shape) != 1 or full_shape(left) != full_shape(right) or left.dtype != right.dtype:
        refuse(func, shard)
    parts = [operand(func, side, shard, largest) for side in (left, right)]
    product = (parts[0].conj() if func.__name__ == "vdot" else parts[0]) * parts[1]
    return _sum(Sharded(product, shard), what=title_of(func))


def _equal(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left: Tensor = args[0]
    right: Tensor = args[1] if len(args) > 1 else kwargs["other"]
    largest = largest_sharded([left, right])
    shard = record_of(largest)
    if tuple(full_shape(left)) != tuple(full_shape(right)):
        # A plain tensor for this rank's elements: another rank may find the full shape, and wait for this one.
        if is_sharded(left) is not is_sharded(right) and left.numel() == right.numel():
            refuse(func, shard, "the other tensor has as many elements as this rank's part")
        return False if func.__name__ == "equal" else refuse_call(func, args, kwargs)
    sides = [_full_if_cut_elsewhere(side, shard) for side in (left, right)]
    parts = [operand(func, side, shard, largest).expand(largest.shape) for side in sides]
    same = torch.tensor(func(*parts, *args[2:], **{key: value for key, value in kwargs.items() if key != "other"}))
    return bool(reductions.reduce_over_ranks(same, shard, lambda values: values.all(0), title_of(func)))


def _full_if_cut_elsewhere(tensor: Tensor, shard: Shard) -> Tensor:
    """The full tensor of one that the same ranks divide, in other places; any other tensor unchanged."""
    if not is_sharded(tensor) or tensor.is_meta:
        return tensor
    other = record_of(tensor)
    if same_elements(other, shard) or _ranks_of(other) != _ranks_of(shard):
        return tensor
    return gather_shard(tensor.detach(), other)


def _ranks_of(shard: Shard) -> list[tuple[int, ...]]:
    """The ranks of each axis that divides it."""
    return [group.ranks for group in shard.divided_groups]


def _foreach_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def bind(tensors: Sequence[Tensor], ord: Any = 2, dtype: Any = None) -> tuple[Sequence[Tensor], float, Any]:
        return tensors, float(ord), dtype

    tensors, order, dtype = bind(*args, **renamed(kwargs, self="tensors"))
    if order <= 0:
        refuse_call(func, args, kwargs)
    results: list[Any] = [None if is_sharded(tensor) else func([tensor], order, dtype=dtype)[0] for tensor in tensors]
    numbers = [number for number, result in enumerate(results) if result is None]
    shards = [record_of(tensors[number]) for number in numbers]
    is_inf = math.isinf(order)
    values = []
    for number, shard in zip(numbers, shards, strict=True):
        part = tensors[number].reshape(-1)
        part = part if shard.counted else part[:0]
        value = (
            torch.linalg.vector_norm(part, order, dtype=torch.float64)
            if len(part) or not is_inf
            else part.new_zeros(())
        )
        values.append(value.double() if is_inf else value**order)
    combine: reductions.Combine = (lambda stacked: stacked.amax(0)) if is_inf else (lambda stacked: stacked.sum(0))
    for number, value in zip(numbers, reductions.batched(values, shards, combine, title_of(func)), strict=True):
        kind = dtype or tensors[number].abs().dtype
        results[number] = (value if is_inf else value ** (1 / order)).to(kind)
    return results


def _foreach_max(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return [
        _amax(Sharded(tensor, record_of(tensor)), what="max") if is_sharded(tensor) else func([tensor])[0]
        for tensor in args[0]
    ]


# Functions that torch composes of others, which are sharded or reductions.


def _composed(formula: Callable[..., Any]) -> Rule:
    def rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            refuse_call(func, args, kwargs)
        try:
            arguments = inspect.signature(formula).bind(*args, **kwargs)
        except TypeError:
            refuse_call(func, args, kwargs)
        with torch._C._EnableTorchFunction():
            return formula(*arguments.args, **arguments.kwargs)

    return rule


def _normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    normalized: Tensor = input / input.norm(p, dim, keepdim=True).clamp_min(eps)
    return normalized


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    first, second = (torch.linalg.vector_norm(x, dim=dim).clamp_min(eps) for x in (x1, x2))
    similarity: Tensor = (x1 * x2).sum(dim) / (first * second)
    return similarity


def _softmax(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(dim, int):
        raise ShardedTensorError("softmax: expected the dimension of the sum, got none: write softmax(tensor, dim=-1)")
    input = input if dtype is None else input.to(dtype)
    exponentials = (input - input.detach().amax(dim, keepdim=True)).exp()
    result: Tensor = exponentials / exponentials.sum(dim, keepdim=True)
    return result


RULES: dict[str, Rule] = {
    **dict.fromkeys(("item", "__float__", "__int__", "__bool__", "__index__", "__complex__"), _item),
    **dict.fromkeys(("dot", "vdot", "inner"), _dot),
    **dict.fromkeys(("equal", "allclose"), _equal),
    "sum": _reduction(_sum),
    "nansum": _reduction(_nansum),
    "mean": _reduction(_mean),
    "amax": _reduction(_amax),
    "amin": _reduction(_amin),
    "max": _reduction(_max),
    "min": _reduction(_min),
    "aminmax": _reduction(_aminmax),
    "any": _reduction(_any),
    "all": _reduction(_all),
    "count_nonzero": _reduction(_count_nonzero),
    **dict.fromkeys(("linalg_vector_norm", "vector_norm"), _reduction(_vector_norm)),
    "norm": _reduction(_norm),
    "linalg_norm": _reduction(_linalg_norm),
    **dict.fromkeys(("linalg_matrix_norm", "matrix_norm"), _reduction(_matrix_norm)),
    "var": _reduction(_variance(False, False)),
    "std": _reduction(_variance(True, False)),
    "var_mean": _reduction(_variance(False, True)),
    "std_mean": _reduction(_variance(True, True)),
    "_foreach_norm": _foreach_norm,
    "_foreach_max": _foreach_max,
    "normalize": _composed(_normalize),
    "cosine_similarity": _composed(_cosine_similarity),
    "softmax": _composed(_softmax),
}
