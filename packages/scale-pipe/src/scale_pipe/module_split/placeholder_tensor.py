"""Placeholder tensors: shape, dtype and device of a tensor of another stage, and no values.

Each stage runs the model's own forward. There, placeholders stand for the results of modules of earlier stages. The
forward may read their shapes, add them, reshape them, pass them to a dropout: all of that is done on the meta device,
which takes no memory, no time and no random numbers, and gives other placeholders. Where a placeholder is an argument
of the call at which the model is cut, the stage before has sent its values: it is resolved, and from then on it behaves
as those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scale_core.errors import ScaleError
from scale_core.tree import map_tensors, tensors_in

_ATOMS = frozenset((type(None), bool, int, float, str))
_READ_VALUES = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))
_FILLED_LIKE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)
"""Operators that take from a tensor its dtype, device and perhaps shape, and nothing else."""


class PlaceholderTensorError(ScaleError):
    """A stage needs values of a different stage that were not sent to it.

    See also: [what to do about a PlaceholderTensorError](../guides/troubleshooting.md#placeholdertensorerror).
    """


class PlaceholderTensor(Tensor):
    """A tensor that another stage holds.

    Args:
        meta: The same on the meta device, of any shape and dtype.
        origin: The maker of the values, for errors: "module 'wte' of stage 0".
        device: Where it would be.
        is_parameter: Whether it is in the place of a parameter or buffer, in all passes and not only in one.
    """

    meta: Tensor
    origin: str
    is_parameter: bool
    resolved: Tensor | None  # The tensor that was received in its place, if any.

    @staticmethod
    def __new__(cls, meta: Tensor, origin: str, device: torch.device | str, is_parameter: bool = False) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device(device),
        )
        wrapper.meta, wrapper.origin, wrapper.is_parameter, wrapper.resolved = meta, origin, is_parameter, None
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PlaceholderTensor({list(self.meta.shape)}, {self.meta.dtype}, from {self.origin})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PlaceholderTensor:
        return PlaceholderTensor(self.meta, self.origin, self.device, self.is_parameter)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func` on the values received in the meantime, above autograd, so that gradients flow."""
        args, kwargs = resolve((tuple(args), dict(kwargs or {})))
        if func in _READ_VALUES and (first := unresolved_placeholder(args)) is not None:
            raise _needs_values(f"Tensor.{func.__name__}", first)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator on the meta device; an error where its result or its effect depends on values."""
        kwargs = dict(kwargs or {})
        first = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, PlaceholderTensor))
        _check_needs_no_values(func, args, kwargs, first)
        device = torch.device(kwargs.get("device") or first.device)
        if func in _FILLED_LIKE:  # A mask, or a first state: its values are known.
            return func(first.meta, *args[1:], **{**kwargs, "device": device})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, to_meta, (args, kwargs))
        results = func(*meta_args, **meta_kwargs)
        if func._schema.is_mutable:  # It returns its written argument, which has no values to change.
            return args[0] if isinstance(results, Tensor) else results
        return pytree.tree_map_only(Tensor, lambda tensor: cls(tensor, first.origin, device), results)


def to_meta(tensor: Tensor) -> Tensor:
    """Returns a tensor on the meta device of the same shape, strides and dtype.

    Equal ones are one object, so that a message that names a hundred of them is short.
    """
    if isinstance(tensor, PlaceholderTensor):
        return tensor.meta
    if tensor.layout != torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _meta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(mode=False):  # It outlives the caller's mode.
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def resolve(tree: Any) -> Any:
    """Returns a tree with the received tensors in place of resolved placeholders."""
    return map_tensors(
        lambda t: t.resolved if isinstance(t, PlaceholderTensor) and t.resolved is not None else t,
        tree,
    )


def has_placeholder(tree: Any) -> bool:
    """Whether a tree has a placeholder, resolved or not. Quick for small trees, as the arguments of modules."""
    kind = type(tree)
    if kind is Tensor or kind in _ATOMS:
        return False
    if kind is tuple or kind is list:
        return any(map(has_placeholder, tree))
    if kind is dict:
        return any(map(has_placeholder, tree.values()))
    return any(isinstance(tensor, PlaceholderTensor) for tensor in tensors_in(tree))


def unresolved_placeholder(tree: Any) -> PlaceholderTensor | None:
    """Returns the first placeholder in a tree that is not resolved, if any."""
    placeholders = (tensor for tensor in tensors_in(tree) if isinstance(tensor, PlaceholderTensor))
    return next((tensor for tensor in placeholders if tensor.resolved is None), None)


def _needs_values(what: str, tensor: PlaceholderTensor) -> PlaceholderTensorError:
    return PlaceholderTensorError(
        f"{what} depends on the values of a tensor from {tensor.origin}, which are on another stage; cut the model "
        "elsewhere, or hand what is needed to the module at the cut as an argument"
    )


def _check_needs_no_values(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: PlaceholderTensor
) -> None:
    """Raises where shapes do not suffice: control flow on values, shapes by values, writing into a real tensor."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        raise _needs_values(func._schema.name, first)
    if torch.Tag.inplace_view in func.tags:
        raise PlaceholderTensorError(
            f"{func._schema.name} changes the shape of a tensor from {first.origin} in place; write x = x.reshape(...)"
        )
    if not func._schema.is_mutable:
        return
    arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {
        **kwargs
    }
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(arguments.get(argument.name)) if written else ():
            if not isinstance(tensor, PlaceholderTensor):
                raise PlaceholderTensorError(
                    f"{func._schema.name} would write the values of a tensor from {first.origin}, which are on another "
                    f"stage, into a tensor {list(tensor.shape)} of this one; write it out of place (torch.cat, "
                    "torch.where), or cut the model elsewhere"
                )
