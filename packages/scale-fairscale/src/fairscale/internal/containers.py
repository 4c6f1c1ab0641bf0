"""Tensors in containers, and keyword arguments as one flat tuple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from scale_core.tree import map_tensors


def apply_to_tensors(fn: Callable[[Tensor], Any], container: Any) -> Any:
    """Returns a container of any kind, sets included, with each tensor replaced by what `fn` makes of it.

    Of a `PackedSequence`, only the data counts, and a function that changes it in place may return None.

    >>> apply_to_tensors(lambda tensor: tensor + 1, [{torch.ones(1)}, "as it is"])
    [{tensor([2.])}, 'as it is']
    """
    if type(container) in (list, tuple, set):
        return type(container)(apply_to_tensors(fn, item) for item in container)
    if type(container) is dict:
        return {key: apply_to_tensors(fn, item) for key, item in container.items()}
    if isinstance(container, PackedSequence):
        data = fn(container.data)
        return container if data is None else container._replace(data=data)
    return map_tensors(fn, container)


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Returns the names of keyword arguments, and all arguments, theirs last.

    >>> pack_kwargs(1, b=2)
    (('b',), (1, 2))
    """
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(kwarg_keys: Sequence[str], flat_args: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what `pack_kwargs` was given.

    >>> unpack_kwargs(("b",), (1, 2))
    ((1,), {'b': 2})
    """
    assert len(kwarg_keys) <= len(flat_args), f"too many keyword args {len(kwarg_keys)} vs. {len(flat_args)}"
    num_args = len(flat_args) - len(kwarg_keys)
    return tuple(flat_args[:num_args]), dict(zip(kwarg_keys, flat_args[num_args:], strict=True))


def split_non_tensors(mixed: Any) -> tuple[tuple[Tensor, ...], dict[str, list[Any]] | None]:
    """Returns the tensors of a tuple, and what says how to put the rest between them."""
    if isinstance(mixed, Tensor):
        return (mixed,), None
    tensors = tuple(value for value in mixed if torch.is_tensor(value))
    objects = [value for value in mixed if not torch.is_tensor(value)]
    return tensors, {"is_tensor": [torch.is_tensor(value) for value in mixed], "objects": objects}


def unpack_non_tensors(tensors: Sequence[Tensor], packed: dict[str, list[Any]] | None) -> tuple[Any, ...]:
    """Returns what `split_non_tensors` was given."""
    if packed is None:
        return tuple(tensors)
    assert isinstance(packed, dict), f"expected what split_non_tensors gave, got a {type(packed).__name__}"
    assert len(tensors) + len(packed["objects"]) == len(packed["is_tensor"]), (
        "got an argument that split_non_tensors has not made"
    )
    tensor_iter, object_iter = iter(tensors), iter(packed["objects"])
    return tuple(next(tensor_iter) if is_tensor else next(object_iter) for is_tensor in packed["is_tensor"])


__all__ = ["apply_to_tensors", "pack_kwargs", "split_non_tensors", "unpack_kwargs", "unpack_non_tensors"]
