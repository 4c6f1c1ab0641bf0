"""Whether a function of torch computes each element of its result from the same element of its arguments.

Nothing is listed: the function is run once on small tensors without memory, and the operators that it reaches say it by
their `torch.Tag.pointwise`. So `torch.where(mask, a, b)` is one and `torch.where(mask)` is not, and a function that
torch composes of such operators is one as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PROBE_SHAPES = ((3,), (2, 3, 2))  # A function that asks for matrices is no function of elements.
# They copy, make or hand on elements, without a look at any other.
_COPIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("alias", "clone", "copy", "copy_", "detach", "detach_", "_to_copy", "lift_fresh"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "fill", "fill_", "zero", "zero_", "scalar_tensor"),
    )
)


class _TensorArgument(NamedTuple):
    """A tensor among the arguments: whether it broadcasts, as one of a single element, and its dtype."""

    is_scalar: bool
    dtype: torch.dtype
    number: int  # Arguments that are the same object have the same number.


class _Operators(TorchDispatchMode):
    """Records the operators that a function reaches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def is_pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], scalars: set[int]) -> bool:
    """Whether a call computes each element by itself; tensors have one shape or, if in `scalars` by id, one element.

    The answer depends on the kinds of the arguments, and on those that are strings, flags or dtypes, not on numbers.
    """
    numbers: dict[int, int] = {}

    def kind(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(numbers))
            return _TensorArgument(id(value) in scalars, value.dtype, number)
        if isinstance(value, list | tuple):
            return (type(value), tuple(kind(part) for part in value))
        if isinstance(value, bool | str | None | torch.dtype | torch.device | torch.memory_format | torch.layout):
            return (type(value), value)
        return cast(Hashable, type(value))

    try:
        return _is_pointwise(func, tuple(map(kind, args)), tuple((key, kind(kwargs[key])) for key in sorted(kwargs)))
    except TypeError:  # An argument of a kind that can't be compared.
        return False


@functools.lru_cache(maxsize=4096)
def _is_pointwise(
    func: Callable[..., Any], args: tuple[Hashable, ...], kwargs: tuple[tuple[str, Hashable], ...]
) -> bool:
    return all(_is_pointwise_on(shape, func, args, kwargs) for shape in _PROBE_SHAPES)


def _is_pointwise_on(
    shape: tuple[int, ...],
    func: Callable[..., Any],
    args: tuple[Hashable, ...],
    kwargs: tuple[tuple[str, Hashable], ...],
) -> bool:
    """Whether a call with tensors of this shape reaches elementwise operators alone."""
    tensors: dict[int, Tensor] = {}

    def probe(kind: Any) -> Any:
        if isinstance(kind, _TensorArgument):
            size = () if kind.is_scalar else shape
            return tensors.setdefault(kind.number, torch.empty(size, dtype=kind.dtype, device="meta"))
        if isinstance(kind, type):
            return kind(1)
        dtype, value = kind
        return dtype(map(probe, value)) if dtype in (list, tuple) else value

    try:
        probes, named_probes = [probe(kind) for kind in args], {key: probe(kind) for key, kind in kwargs}
        with torch.no_grad(), _Operators() as record:
            result = func(*probes, **named_probes)
    except Exception:  # An unknown function does not count as one.
        return False
    results = [result] if isinstance(result, Tensor) else result
    if not isinstance(results, list | tuple) or not results:
        return False
    has_shape = all(isinstance(result, Tensor) and result.shape == shape for result in results)
    return has_shape and all(map(_computes_elements, record.operators))


def _computes_elements(operator: Any) -> bool:
    """Whether one overload of an operator of ATen computes each element by itself."""
    packet = operator.overloadpacket
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    if torch.Tag.pointwise in operator.tags or packet in _COPIES:
        return True
    # A few that work in place lack the tag, as masked_fill_: the ones that return a new tensor have it.
    name = packet.__name__
    returning = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = getattr(returning, operator._overloadname, None)
    return overload is not None and torch.Tag.pointwise in overload.tags


@functools.cache
def is_pointwise_list(name: str) -> bool:
    """Whether a function on lists, for example `_foreach_add_`, computes each element by itself."""
    # Their operators have no tags: those on one tensor have.
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_").removesuffix("_"), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    on_tensors = [
        overload
        for overload in overloads
        if overload._overloadname in ("default", "Tensor", "Scalar", "Tensor_Scalar", "self")
    ]
    on_tensors = [overload for overload in on_tensors if str(overload._schema.arguments[0].type) == "Tensor"]
    return bool(on_tensors) and all(map(_computes_elements, on_tensors))
