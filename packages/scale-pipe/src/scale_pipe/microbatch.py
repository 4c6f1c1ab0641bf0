"""A mini-batch cut into micro-batches.

What a model is given may be nested in any way: each tensor is cut along its first dimension, and everything else goes
to every micro-batch as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scale_core.streams import on_host
from scale_core.tree import map_tensors
from scale_pipe.integers import plain_integer

_ATOMS = frozenset((type(None), bool, int, float, str))


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what `tree` holds, with the way to it as one would write it; containers are taken apart."""
    kind = type(tree)
    if isinstance(tree, Tensor) or kind in _ATOMS:
        yield path, tree
    elif isinstance(tree, MutableMapping):
        for key, part in tree.items():
            yield from leaves_of(part, f"{path}[{key!r}]")
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, part in zip(tree._fields, tree, strict=True):
            yield from leaves_of(part, f"{path}.{name}")
    elif isinstance(tree, list | tuple):
        for number, part in enumerate(tree):
            yield from leaves_of(part, f"{path}[{number}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves_of(getattr(tree, field.name, None), f"{path}.{field.name}")
    else:
        leaves = pytree.tree_leaves(tree)
        if len(leaves) == 1 and leaves[0] is tree:
            yield path, tree
            return
        for number, leaf in enumerate(leaves):  # Of a class that was registered with torch.
            yield from leaves_of(leaf, f"{path}.leaves[{number}]")


def kind_of(leaf: Any) -> str:
    """Says what a tensor or anything else is: "Tensor [] float32"."""
    return f"Tensor {described(leaf)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def described(tensor: Tensor) -> str:
    """Says what a tensor is: "[3, 5] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


_WHOLE = "what belongs to no sample is passed as scale_pipe.NoChunk(tensor)"


class NoChunk:
    """Around a tensor among a model's inputs: it is not cut, but goes to every micro-batch as it is.

    It is for what belongs to no sample, such as a mask [1, 1, L, L] or a table. A tensor without dimensions is not cut
    in any case.

    Args:
        tensor: Any shape.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk: expected a Tensor, got {type(tensor).__name__}: what is no tensor is never cut, so pass it "
                "as it is"
            )
        self.tensor = tensor


class Arguments(NamedTuple):
    """What a module is called with; errors name what is in it by these words.

    Attributes:
        args: By place.
        kwargs: By keyword.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_chunks(chunks: Any) -> int:
    """Returns a number of micro-batches, once it is known to be one.

    Args:
        chunks: As a user gives it; NumPy's integers are integers, too.

    Raises:
        ValueError: It is no positive integer.
    """
    number = plain_integer(chunks)
    if number is None or number <= 0:
        raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
    return number


def micro_batch_sizes(batch_size: int, chunks: int) -> list[int]:
    """Returns how many samples each micro-batch has, as `torch.chunk` cuts: there may be fewer of them than chunks.

        >>> micro_batch_sizes(8, 4), micro_batch_sizes(5, 4), micro_batch_sizes(2, 4)
        ([2, 2, 2, 2], [2, 2, 1], [1, 1])

    Args:
        batch_size: Samples in the mini-batch; none make one micro-batch without samples.
        chunks: At most so many micro-batches.
    """
    assert chunks > 0 and batch_size >= 0
    size = max(1, -(-batch_size // chunks))
    return [min(size, batch_size - start) for start in range(0, max(1, batch_size), size)]


def batch_size_of(inputs: Any) -> int | None:
    """Returns how many samples the tensors in `inputs` have; None if no tensor there has a first dimension.

    Raises:
        ValueError: They have different numbers of samples.
    """
    found: tuple[str, Tensor] | None = None
    for path, leaf in leaves_of(inputs):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if found is None:
            found = path, leaf
        elif leaf.shape[0] != found[1].shape[0]:
            raise ValueError(
                f"all tensors of a mini-batch are cut along dimension 0, so they have to agree in it: {_named(*found)} "
                f"has {found[1].shape[0]} samples, and {_named(path, leaf)} has {leaf.shape[0]}; {_WHOLE}"
            )
    return None if found is None else found[1].shape[0]


def scatter(inputs: Any, chunks: int) -> list[Any]:
    """Cuts a mini-batch into at most `chunks` micro-batches, each nested as the inputs are.

    With one micro-batch it is the inputs themselves; otherwise tensors are views of those of the mini-batch.

    Args:
        inputs: Tuples, lists, dicts, dataclasses with tensors [N, ...]; `(args, kwargs)`, for one.
        chunks: Of which `torch.chunk` makes as many as there are samples for.

    Raises:
        TypeError: No tensor in it can be cut; one that is sparse or nested is to be cut.
        ValueError: Tensors have different numbers of samples.
    """
    batch_size = batch_size_of(inputs)
    if batch_size is None:
        kinds = ", ".join(dict.fromkeys(kind_of(leaf) for _, leaf in leaves_of(inputs))) or "nothing"
        if any(isinstance(leaf, Tensor) for _, leaf in leaves_of(inputs)):
            raise TypeError(
                "expected a tensor with a first dimension, along which the mini-batch is cut, but those that were "
                f"given have no dimension: {kinds}; one sample is a mini-batch as x.unsqueeze(0)"
            )
        raise TypeError(
            f"expected Tensor, but got {kinds}: of all that a pipeline is given, at least one has to be a tensor with "
            "a first dimension, along which the mini-batch is cut"
        )
    return _cut(inputs, {batch_size: micro_batch_sizes(batch_size, chunks)})


def scatter_each(inputs: Any, chunks: int, *, stacklevel: int = 2) -> list[Any]:
    """Cuts a mini-batch as `scatter` does, and where tensors differ in their first dimension, each one by itself.

    They have to be cut in the same shares: [2, ...] beside [4, ...] makes two micro-batches of [1, ...] beside
    [2, ...]. Since that may also be a table that was to stay whole, there is a warning.

    Args:
        inputs: As those of `scatter`.
        chunks: As there.
        stacklevel: Of the warning, as `warnings.warn` has it; 2 is what calls this.

    Raises:
        TypeError: As in `scatter`.
        ValueError: Tensors would be cut into different numbers of micro-batches, or in different shares.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for path, leaf in leaves_of(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            found.setdefault(leaf.shape[0], (path, leaf))
    if not found:
        return scatter(inputs, chunks)  # Its error says what was given.
    sizes = {total: micro_batch_sizes(total, chunks) for total in found}
    (total, first), *others = found.items()
    for other, second in others:
        if not _are_alike(sizes[total], sizes[other]):
            raise ValueError(
                "each tensor of a mini-batch is cut along dimension 0, and all in the same shares, but "
                f"{_named(*first)} makes micro-batches of {_listed(sizes[total])} samples, and {_named(*second)} "
                f"of {_listed(sizes[other])}; {_WHOLE}"
            )
    if others and len(sizes[total]) > 1:
        ((_, second), *_) = others
        warnings.warn(
            f"{_named(*first)} and {_named(*second)} have different numbers of samples, and each is cut by itself, in "
            f"{len(sizes[total])} micro-batches; {_WHOLE}, and what has several rows for each sample is given as [N, "
            "rows, ...]",
            stacklevel=stacklevel,
        )
    return _cut(inputs, sizes)


def _are_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    totals = sum(one), sum(other)
    return len(one) == len(other) and all(a * totals[1] == b * totals[0] for a, b in zip(one, other, strict=True))


def cut(inputs: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts inputs into micro-batches of these sizes; inputs without a tensor [N, ...] go whole to each of them.

    Args:
        inputs: As those of `scatter`.
        sizes: Samples of each micro-batch, N together.

    Raises:
        TypeError: A tensor is sparse or nested.
        ValueError: Tensors have another number of samples.
    """
    batch_size = batch_size_of(inputs)
    if batch_size is not None and batch_size != sum(sizes):
        raise ValueError(
            f"expected {sum(sizes)} samples, cut into micro-batches of {_listed(sizes)}, and got tensors "
            f"with {batch_size}: give every stage inputs of the same mini-batch"
        )
    return _cut(inputs, {sum(sizes): sizes})


def _cut(inputs: Any, sizes: Mapping[int, Sequence[int]]) -> list[Any]:
    """Cuts tensors [N, ...] as it says for N; there is an equal number of pieces for each."""
    whole, number_of_pieces = _has_whole(inputs), len(next(iter(sizes.values())))
    if number_of_pieces == 1:
        return [_opened(inputs) if whole else inputs]
    _check_strided(inputs)
    pieces: dict[int, Sequence[Tensor]] = {}

    def piece(number: int, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if id(tensor) not in pieces:
            pieces[id(tensor)] = tensor.split(list(sizes[tensor.shape[0]]))
        return pieces[id(tensor)][number]

    cuts = [map_tensors(partial(piece, number), inputs) for number in range(number_of_pieces)]
    return [_opened(part) for part in cuts] if whole else cuts


def in_words(given: Arguments) -> str:
    """Says what a module is called with, for errors: "Tensor [3, 5] float32, mask=NoneType".

    Args:
        given: Any nesting.
    """
    words = [kind_of(leaf) for _, leaf in leaves_of(given.args)]
    words += [f"{name}={kind_of(leaf)}" for name, tree in given.kwargs.items() for _, leaf in leaves_of(tree)]
    return ", ".join([*words[:8], *["..."] * (len(words) > 8)]) or "nothing"


def _check_strided(inputs: Any) -> None:
    for path, leaf in leaves_of(inputs):
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise TypeError(
                f"inputs{path} is a {kind} tensor, which cannot be cut along dimension 0: pass it in another layout, "
                "by to_dense() or to_padded_tensor(0), or to every micro-batch as a whole: scale_pipe.NoChunk(tensor)"
            )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _named(path: str, tensor: Tensor) -> str:
    return f"inputs{path} {list(tensor.shape)}"


def _has_whole(tree: Any) -> bool:
    return any(isinstance(leaf, NoChunk) for _, leaf in leaves_of(tree))


def _opened(tree: Any) -> Any:
    """`tree` with the tensor of each `NoChunk` in its place."""
    if isinstance(tree, NoChunk):
        return tree.tensor
    leaves, spec = pytree.tree_flatten(tree)
    if not (len(leaves) == 1 and leaves[0] is tree):
        return pytree.tree_unflatten([_opened(leaf) for leaf in leaves], spec)
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return tree
    fresh = copy.copy(tree)
    for field in dataclasses.fields(tree):
        object.__setattr__(fresh, field.name, _opened(getattr(tree, field.name, None)))
    return fresh


T = TypeVar("T")


def copied_to(device: torch.device, tree: T) -> T:
    """Returns `tree` with its tensors on `device`; those that are there already are themselves.

    A copy to the host is waited for. Between accelerators nothing is: the copy has its place in the order of both
    devices' current streams. It is made by who will use it, in the thread that computes on `device`, so that autograd
    finds its way back in the right order.
    """
    host = torch.device("cpu")

    def move(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device != host and not on_host(tensor))

    moved: T = map_tensors(move, tree)
    return moved


def gather(outputs: Sequence[Any]) -> Any:
    """Puts the outputs of all micro-batches together: tensors along dimension 0, everything else as it is in each.

    Args:
        outputs: One or more, nested alike. A single one is returned as it is.

    Raises:
        ValueError: They are not nested alike; tensors without dimensions, or of shapes that do not go together; what
            is no tensor differs.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(type(output) is Tensor for output in outputs):
        return _joined("the output", outputs)
    columns = [dict(leaves_of(output)) for output in outputs]
    joined: dict[int, Tensor] = {}
    places: dict[int, tuple[int, ...]] = {}
    for number, column in enumerate(columns):
        if column.keys() != columns[0].keys():
            differing = sorted(column.keys() ^ columns[0].keys())
            raise ValueError(
                f"expected outputs that are nested alike for every micro-batch; those of micro-batches 0 and {number} "
                f"differ at output{differing[0]}: let the model return the same structure whatever its input is"
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
            joined[id(leaf)] = _joined(f"output{path}", row)
    return map_tensors(lambda tensor: joined[id(tensor)], first)


def _joined(name: str, tensors: Sequence[Any]) -> Tensor:
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
                f"{name} of micro-batch 0 is {described(first)}, and of micro-batch {number} {described(tensor)}: to "
                "be concatenated along dimension 0 they have to agree in all but that"
            )
    return torch.cat(list(tensors))


def _check_equal(name: str, values: Sequence[Any]) -> None:
    for number, value in enumerate(values):
        if value is values[0]:
            continue
        try:
            both_nan = value != value and values[0] != values[0]
            same = type(value) is type(values[0]) and bool(both_nan or value == values[0])
        except (TypeError, ValueError, RuntimeError):  # What cannot be compared, as arrays of some libraries.
            same = False
        if not same:
            raise ValueError(
                f"{name} is no tensor and differs between micro-batches: {values[0]!r} for 0, {value!r} for {number}; "
                "return a tensor [N, ...], or what is the same for all samples"
            )
