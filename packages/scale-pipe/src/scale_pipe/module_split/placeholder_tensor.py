"""Tensors that are not here: shape, dtype and device of what another stage has computed, and no values.

Each stage runs the model's own forward. What modules of earlier stages return stands for itself there as an absent
tensor. The forward may ask it for its shape, add it, reshape it, hand it to a dropout: all of that is done on the meta
device, so that it takes no memory, no time and no random numbers, and gives other absent tensors. Where such a tensor
is an argument of the call at which the model is cut, the stage before has sent its values: it is resolved, and from
then on it behaves as those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scale_core.tree import map_tensors, tensors_in

_Device = torch.device | str | None
_ATOMS = frozenset((type(None), bool, int, float, str))
_READ_VALUES = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))
_FILLED_LIKE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)
"""What takes from a tensor its dtype, device and perhaps shape, and nothing else."""


class AbsentTensorError(RuntimeError):
    """Values are asked for that another stage has computed and nobody has sent."""


class Absent(Tensor):
    """A tensor that stands on another stage; make it with `absent`.

    Attributes:
        shape_only: The same on the meta device.
        origin: What has made the value, for errors: "module 'wte' of stage 0".
        resolved: The tensor that was received in its place; None as long as there is none.
    """

    shape_only: Tensor
    origin: str
    resolved: Tensor | None

    @staticmethod
    def __new__(cls, shape_only: Tensor, origin: str, device: torch.device) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape_only.shape,
            strides=shape_only.stride(),
            storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype,
            device=device,
        )
        made.shape_only, made.origin, made.resolved = shape_only, origin, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({list(self.shape_only.shape)}, {self.shape_only.dtype}, from {self.origin})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        return absent(self.shape_only, self.origin, self.device)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func` on what has been received in the meantime, above autograd, so that gradients flow."""
        args, kwargs = received((tuple(args), dict(kwargs or {})))
        if func in _READ_VALUES and (first := absent_in(args)) is not None:
            raise _needs_values(f"Tensor.{func.__name__}", first)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator on shapes alone.

        Raises:
            AbsentTensorError: Its result or its effect depends on values.
        """
        kwargs = dict(kwargs or {})
        first = next(tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, Absent))
        _check_needs_no_values(func, args, kwargs, first)
        device = torch.device(kwargs.get("device") or first.device)
        if func in _FILLED_LIKE:  # A mask, or a first state: its values are known.
            return func(first.shape_only, *args[1:], **{**kwargs, "device": device})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, shape_of, (args, kwargs))
        results = func(*meta_args, **meta_kwargs)
        if func._schema.is_mutable:  # What was written to is what is returned; it has no values to change.
            return args[0] if isinstance(results, Tensor) else results
        return pytree.tree_map_only(Tensor, lambda tensor: absent(tensor, first.origin, device), results)


def absent(shape_only: Tensor, origin: str, device: _Device) -> Absent:
    """Returns an absent tensor.

    Args:
        shape_only: Of any shape and dtype, on the meta device.
        origin: What has made the value, for errors.
        device: Where it would be.
    """
    return Absent(shape_only, origin, torch.device(device or "cpu"))


def shape_of(tensor: Tensor) -> Tensor:
    """Returns a tensor on the meta device of the same shape, strides and dtype: what is known of an absent one.

    Equal ones are one object, so that a message that names a hundred of them is short.

    Args:
        tensor: Any.
    """
    if isinstance(tensor, Absent):
        return tensor.shape_only
    if tensor.layout != torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@lru_cache(maxsize=4096)
def _shape(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(mode=False):  # It outlives the caller's mode.
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def received(tree: Any) -> Any:
    """Returns a tree in which what was received stands in the place of resolved tensors.

    Args:
        tree: Any nesting with tensors.
    """
    return map_tensors(_received, tree)


def _received(tensor: Tensor) -> Tensor:
    return tensor.resolved if isinstance(tensor, Absent) and tensor.resolved is not None else tensor


def holds_absent(tree: Any) -> bool:
    """Whether a tensor in a tree is absent, resolved or not. Quick where it holds few things, as calls of modules do.

    Args:
        tree: Any nesting with tensors.
    """
    kind = type(tree)
    if kind is Tensor or kind in _ATOMS:
        return False
    if kind is tuple or kind is list:
        return any(map(holds_absent, tree))
    if kind is dict:
        return any(map(holds_absent, tree.values()))
    return any(isinstance(tensor, Absent) for tensor in tensors_in(tree))


def absent_in(tree: Any) -> Absent | None:
    """Returns the first tensor in a tree that is absent and not resolved; None where all are there.

    Args:
        tree: Any nesting with tensors.
    """
    for tensor in tensors_in(tree):
        if isinstance(tensor, Absent) and tensor.resolved is None:
            return tensor
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _needs_values(what: str, tensor: Absent) -> AbsentTensorError:
    return AbsentTensorError(
        f"{what} depends on the values of a tensor from {tensor.origin}, which are on another stage; cut the model "
        "elsewhere, or hand what is needed to the module at the cut as an argument"
    )


def _check_needs_no_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: Absent) -> None:
    """Raises where shapes do not suffice: control flow on values, shapes by values, writing into a real tensor."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        raise _needs_values(func._schema.name, first)
    if torch.Tag.inplace_view in func.tags:
        raise AbsentTensorError(
            f"{func._schema.name} changes the shape of a tensor from {first.origin} in place; write x = x.reshape(...)"
        )
    if not func._schema.is_mutable:
        return
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(given.get(argument.name)) if written else ():
            if not isinstance(tensor, Absent):
                raise AbsentTensorError(
                    f"{func._schema.name} would write the values of a tensor from {first.origin}, which are on another "
                    f"stage, into a tensor {list(tensor.shape)} of this one; write it out of place (torch.cat, "
                    "torch.where), or cut the model elsewhere"
                )
