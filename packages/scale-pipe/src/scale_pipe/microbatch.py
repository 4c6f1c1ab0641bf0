"""Cuts a mini-batch into micro-batches, and merges their outputs.

The inputs of a model may be nested in any way: each tensor is cut along its first dimension, and everything else goes
to every micro-batch unchanged.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scale_core.device.streams import on_host
from scale_core.tree import map_leaves, map_tensors, tensors_in
from scale_pipe.integers import plain_integer

T = TypeVar("T")

_ATOMS = frozenset((type(None), bool, int, float, str))
_NO_CHUNK_HINT = "what belongs to no sample is passed as scale_pipe.NoChunk(tensor)"


class NoChunk:
    """Around a tensor among a model's inputs: it is not cut, but goes to every micro-batch unchanged.

    It is for tensors that belong to no sample, for example a mask [1, 1, L, L] or a table. A tensor without dimensions
    is not cut in any case.

    Args:
        tensor: Any shape.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_pipe import NoChunk, Pipe
        >>> class Scaled(nn.Linear):
        ...     def forward(self, input, scale):
        ...         return super().forward(input) * scale
        >>> pipe = Pipe(nn.Sequential(Scaled(4, 3)), balance=[1], devices=["cpu"], chunks=2)
        >>> pipe(torch.ones(6, 4), NoChunk(torch.ones(3))).shape
        torch.Size([6, 3])

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk: expected a Tensor, got {type(tensor).__name__}: only tensors are cut, so pass the value "
                "without NoChunk"
            )
        self.tensor = tensor


class Arguments(NamedTuple):
    """The arguments of a call; errors name them by these words."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Chunks(NamedTuple):
    """Inputs of a mini-batch by micro-batch; `total` samples, None if each micro-batch gets all of it."""

    by_micro_batch: Sequence[Any]
    total: int | None


def check_chunks(chunks: Any) -> int:
    """Returns a number of micro-batches as Python's integer. Raises ValueError if it is not a positive integer."""
    number = plain_integer(chunks)
    if number is None or number <= 0:
        raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
    return number


# Leaves, and how errors describe them.


def iter_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of `tree`, each with its path as one would write it."""
    kind = type(tree)
    if isinstance(tree, Tensor) or kind in _ATOMS:
        yield path, tree
    elif isinstance(tree, MutableMapping):
        for key, part in tree.items():
            yield from iter_leaves(part, f"{path}[{key!r}]")
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, part in zip(tree._fields, tree, strict=True):
            yield from iter_leaves(part, f"{path}.{name}")
    elif isinstance(tree, list | tuple):
        for number, part in enumerate(tree):
            yield from iter_leaves(part, f"{path}[{number}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from iter_leaves(getattr(tree, field.name, None), f"{path}.{field.name}")
    else:
        leaves = pytree.tree_leaves(tree)
        if len(leaves) == 1 and leaves[0] is tree:
            yield path, tree
            return
        for number, leaf in enumerate(leaves):  # Of a class that was registered with torch.
            yield from iter_leaves(leaf, f"{path}.leaves[{number}]")


def describe_tensor(tensor: Tensor) -> str:
    """Describes a tensor: "[3, 5] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def describe_leaf(leaf: Any) -> str:
    """Describes a tensor or anything else: "Tensor [] float32"."""
    return f"Tensor {describe_tensor(leaf)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def describe_arguments(given: Arguments) -> str:
    """Describes the arguments of a call: "Tensor [3, 5] float32, mask=NoneType"."""
    words = [describe_leaf(leaf) for _, leaf in iter_leaves(given.args)]
    words += [f"{name}={describe_leaf(leaf)}" for name, tree in given.kwargs.items() for _, leaf in iter_leaves(tree)]
    return ", ".join([*words[:8], *["..."] * (len(words) > 8)]) or "nothing"


def _describe_input(path: str, tensor: Tensor) -> str:
    return f"inputs{path} {list(tensor.shape)}"


# Cutting.


def micro_batch_sizes(batch_size: int, chunks: int) -> list[int]:
    """The samples of each micro-batch, as `torch.chunk` cuts: there may be fewer of them than chunks.

    >>> micro_batch_sizes(8, 4), micro_batch_sizes(5, 4), micro_batch_sizes(2, 4), micro_batch_sizes(0, 4)
    ([2, 2, 2, 2], [2, 2, 1], [1, 1], [0])
    """
    assert chunks > 0 and batch_size >= 0
    size = max(1, -(-batch_size // chunks))
    return [min(size, batch_size - start) for start in range(0, max(1, batch_size), size)]


def batch_size_of(inputs: Any) -> int | None:
    """The samples of the tensors in `inputs`, None without such tensors. Raises ValueError where they differ."""
    first_tensor: tuple[str, Tensor] | None = None
    for path, leaf in iter_leaves(inputs):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if first_tensor is None:
            first_tensor = path, leaf
        elif leaf.shape[0] != first_tensor[1].shape[0]:
            raise ValueError(
                "all tensors of a mini-batch are cut along dimension 0, so they have to agree in it: "
                f"{_describe_input(*first_tensor)} has {first_tensor[1].shape[0]} samples, and "
                f"{_describe_input(path, leaf)} has {leaf.shape[0]}; {_NO_CHUNK_HINT}"
            )
    return None if first_tensor is None else first_tensor[1].shape[0]


def scatter(inputs: Any, chunks: int) -> list[Any]:
    """Cuts a mini-batch into at most `chunks` micro-batches, as `scatter_with_sizes` does."""
    return scatter_with_sizes(inputs, chunks)[0]


def scatter_with_sizes(inputs: Any, chunks: int) -> tuple[list[Any], list[int]]:
    """Cuts a mini-batch into at most `chunks` micro-batches, nested as the inputs are, and returns their samples.

    With one micro-batch it is the inputs themselves; otherwise tensors are views of the tensors of the mini-batch.
    Raises TypeError if no tensor in it can be cut, and ValueError if tensors have different numbers of samples.
    """
    batch_size = batch_size_of(inputs)
    if batch_size is None:
        kinds = ", ".join(dict.fromkeys(describe_leaf(leaf) for _, leaf in iter_leaves(inputs))) or "nothing"
        if any(isinstance(leaf, Tensor) for _, leaf in iter_leaves(inputs)):
            raise TypeError(
                "expected a tensor with a first dimension, along which the mini-batch is cut, but those that were "
                f"given have no dimension: {kinds}; one sample is a mini-batch as x.unsqueeze(0)"
            )
        raise TypeError(
            f"expected Tensor, but got {kinds}: of all that a pipeline is given, at least one has to be a tensor with "
            "a first dimension, along which the mini-batch is cut"
        )
    sizes = micro_batch_sizes(batch_size, chunks)
    return _cut(inputs, {batch_size: sizes}), sizes


def scatter_each(inputs: Any, chunks: int, *, stacklevel: int = 2) -> list[Any]:
    """Cuts a mini-batch as `scatter` does, and where tensors differ in their first dimension, each one by itself.

    They have to be cut in the same proportions: [2, ...] with [4, ...] makes two micro-batches of [1, ...] with
    [2, ...]. Since one of them may also be a table that was not to be cut, there is a warning; `stacklevel` is for
    `warnings.warn`, 2 for the caller. Raises ValueError where proportions differ.
    """
    first_by_size: dict[int, tuple[str, Tensor]] = {}
    for path, leaf in iter_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            first_by_size.setdefault(leaf.shape[0], (path, leaf))
    if not first_by_size:
        return scatter(inputs, chunks)  # Its error describes the inputs.
    sizes = {total: micro_batch_sizes(total, chunks) for total in first_by_size}
    (total, first), *others = first_by_size.items()
    for other, second in others:
        if not _same_proportions(sizes[total], sizes[other]):
            raise ValueError(
                "each tensor of a mini-batch is cut along dimension 0, and all in the same shares, but "
                f"{_describe_input(*first)} makes micro-batches of {_listed(sizes[total])} samples, and "
                f"{_describe_input(*second)} of {_listed(sizes[other])}; {_NO_CHUNK_HINT}"
            )
    if others and len(sizes[total]) > 1:
        ((_, second), *_) = others
        warnings.warn(
            f"{_describe_input(*first)} and {_describe_input(*second)} have different numbers of samples, and each is "
            f"cut by itself, in {len(sizes[total])} micro-batches; {_NO_CHUNK_HINT}, and what has several rows for "
            "each sample is given as [N, rows, ...]",
            stacklevel=stacklevel,
        )
    return _cut(inputs, sizes)


def _same_proportions(one: Sequence[int], other: Sequence[int]) -> bool:
    totals = sum(one), sum(other)
    return len(one) == len(other) and all(a * totals[1] == b * totals[0] for a, b in zip(one, other, strict=True))


def _cut(inputs: Any, sizes: Mapping[int, Sequence[int]]) -> list[Any]:
    """Cuts tensors [N, ...] into the sizes for N; there are as many pieces for each N."""
    num_pieces = len(next(iter(sizes.values())))
    for path, leaf in iter_leaves(inputs):
        if num_pieces > 1 and isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise TypeError(
                f"inputs{path} is a {kind} tensor, which cannot be cut along dimension 0: pass it in another layout, "
                "by to_dense() or to_padded_tensor(0), or to every micro-batch as a whole: scale_pipe.NoChunk(tensor)"
            )
    if num_pieces == 1:
        return [unwrap_no_chunk(inputs)]

    def split(tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(list(sizes[tensor.shape[0]])) if tensor.dim() else [tensor] * num_pieces

    tensors = list(tensors_in(inputs))
    pieces = {id(tensor): split(tensor) for tensor in tensors}
    cuts = [  # Containers may make new tensors each time they are iterated.
        map_tensors(lambda tensor: (pieces.get(id(tensor)) or split(tensor))[number], inputs)  # noqa: B023  # called at once
        for number in range(num_pieces)
    ]
    return list(map(unwrap_no_chunk, cuts))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def unwrap_no_chunk(tree: Any) -> Any:
    """`tree` with the tensor of each `NoChunk` in its place; the very same object where there is none."""
    if not any(isinstance(leaf, NoChunk) for _, leaf in iter_leaves(tree)):
        return tree
    return map_leaves(lambda leaf: leaf.tensor if isinstance(leaf, NoChunk) else leaf, tree)


def copy_to(device: torch.device, tree: T) -> T:
    """Returns `tree` with its tensors on `device`; those that are there already stay the same objects.

    A copy to the host is waited for. Between accelerators nothing is: the copy has its place in the order of both
    devices' current streams. The thread that computes on `device` makes it, so that autograd's backward has the right
    order.
    """
    moved: T = map_tensors(lambda tensor: tensor if tensor.device == device else _copy(tensor, device), tree)
    return moved


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=device.type != "cpu" and not on_host(tensor))


# Merging.


def gather(outputs: Sequence[Any]) -> Any:
    """Merges the outputs of all micro-batches: tensors along dimension 0; other values must be equal in all.

    A single output is returned unchanged. Raises ValueError where outputs are not nested in the same way, tensors have
    no dimension or do not fit, or values that are no tensors differ.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(type(output) is Tensor for output in outputs):
        return _concatenate("the output", outputs)
    columns = [dict(iter_leaves(output)) for output in outputs]
    joined: dict[int, Tensor] = {}
    places: dict[int, tuple[int, ...]] = {}
    for number, column in enumerate(columns):
        if column.keys() != columns[0].keys():
            differing = sorted(column.keys() ^ columns[0].keys())
            raise ValueError(
                f"expected outputs with the same nesting for every micro-batch; the outputs of micro-batches 0 and "
                f"{number} differ at output{differing[0]}: let the model return the same structure for every input"
            )
    for path, leaf in columns[0].items():
        row = [column[path] for column in columns]
        if not isinstance(leaf, Tensor):
            _check_equal(f"output{path}", row)
            continue
        ids = tuple(map(id, row))
        if places.setdefault(id(leaf), ids) != ids:
            raise ValueError(
                f"output{path} is one tensor with another output for micro-batch 0, and not for all others: let the "
                "model return a copy there"
            )
        if id(leaf) not in joined:
            joined[id(leaf)] = _concatenate(f"output{path}", row)
    return map_tensors(lambda tensor: joined[id(tensor)], first)


def _concatenate(name: str, tensors: Sequence[Any]) -> Tensor:
    """Concatenates a tensor [n_i, ...] of each micro-batch into [N, ...]."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a Tensor for micro-batch 0, and a {type(tensor).__name__} for {number}")
        if tensor.dim() == 0:
            raise ValueError(
                f"{name} is a tensor without dimensions for each of {len(tensors)} micro-batches, so they cannot be "
                "concatenated along dimension 0: return a value per sample [N], and reduce it after the pipeline"
            )
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise ValueError(
                f"{name} of micro-batch 0 is {describe_tensor(first)}, and of micro-batch {number} "
                f"{describe_tensor(tensor)}: to be concatenated along dimension 0 they have to agree in all but that"
            )
    return torch.cat(list(tensors))


def _check_equal(name: str, values: Sequence[Any]) -> None:
    for number, value in enumerate(values):
        if value is values[0]:
            continue
        try:
            both_nan = value != value and values[0] != values[0]
            same = type(value) is type(values[0]) and bool(both_nan or value == values[0])
        except (TypeError, ValueError, RuntimeError):  # Values that cannot be compared, as arrays of some libraries.
            same = False
        if not same:
            raise ValueError(
                f"{name} is not a tensor and differs between micro-batches: {values[0]!r} for 0, {value!r} for "
                f"{number}; return a tensor [N, ...], or what is the same for all samples"
            )
