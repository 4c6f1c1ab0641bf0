"""The samples of a script: each rank keeps its own, and the one process gets the samples of all ranks.

They are the batches of `DataLoader`s. In a script without a loader they are the positional arguments of the model,
which replace the arguments in the one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader


class SamplesError(RuntimeError):
    """The samples of the ranks can't be those of one process."""


class Samples:
    """What the loaders of a process have given, and the arguments of its model, in the order of time."""

    def __init__(self) -> None:
        # By the number of the loader, in the order of first use: the batches of each of its iterations, and its length.
        self.of_loaders: dict[int, list[list[Any]]] = {}
        self.lengths: dict[int, int] = {}
        self.of_model: list[Any] = []

    @classmethod
    def together(cls, ranks: Sequence[Samples]) -> Samples:
        """Joins the samples of all ranks, rank 0 first.

        Raises:
            SamplesError: Some ranks have read a loader that others have not, or their batches have other structures.
        """
        samples = cls()
        samples.lengths = dict(ranks[0].lengths)
        if any(rank.of_loaders.keys() != ranks[0].of_loaders.keys() for rank in ranks):
            raise SamplesError("some ranks read a DataLoader that others don't: their samples can't be put together")
        for number in ranks[0].of_loaders:
            iterations = zip(*(rank.of_loaders[number] for rank in ranks), strict=False)
            samples.of_loaders[number] = [
                [joined(batches, f"DataLoader number {number + 1}") for batches in zip(*iteration, strict=False)]
                for iteration in iterations
            ]
        if not samples.of_loaders:
            of_model = zip(*(rank.of_model for rank in ranks), strict=False)
            samples.of_model = [joined(args, "the arguments of the model") for args in of_model]
        return samples

    @classmethod
    def in_turn(cls, ranks: Sequence[Samples]) -> Samples:
        """The arguments of the model on all ranks, one after the other, for a process that makes as many forwards."""
        samples = cls()
        samples.of_model = [
            args for of_ranks in zip(*(rank.of_model for rank in ranks), strict=False) for args in of_ranks
        ]
        return samples


def joined(batches: Sequence[Any], what: str = "a batch") -> Any:
    """Batches with the same structure as one: tensors along their first dimension, lists one after the other.

    >>> joined([{"x": torch.ones(2, 3), "ids": ["a"]}, {"x": torch.zeros(2, 3), "ids": ["b"]}])["x"].shape
    torch.Size([4, 3])
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if not first.ndim:
            return torch.stack(list(batches)).mean() if first.is_floating_point() else first
        shapes = {tuple(batch.shape[1:]) for batch in batches}
        if len(shapes) > 1:
            raise SamplesError(
                f"{what} has tensors of {' and '.join(str(tuple(batch.shape)) for batch in batches)} on the ranks, "
                "which can't be joined: pad them to one length"
            )
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        content = {key: joined([batch[key] for batch in batches], what) for key in first}
        return content if type(first) is dict else type(first)(content)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        if first and not any(isinstance(item, Tensor | Mapping | tuple | list) for item in first):
            return type(first)([item for batch in batches for item in batch])
        parts = [joined(parts, what) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if not isinstance(first, int | float | str | bytes | None):
        raise SamplesError(f"{what} has a {type(first).__name__}, which can't be joined: give tensors, lists and dicts")
    return first


@contextmanager
def keeping(samples: Samples) -> Iterator[None]:
    """Keeps what the loaders of this process give."""

    def read(loader: DataLoader[Any], number: int, batches: Iterator[Any]) -> Iterator[Any]:
        iteration: list[Any] = []
        samples.of_loaders.setdefault(number, []).append(iteration)
        with suppress(TypeError):  # A stream has no length.
            samples.lengths[number] = len(loader)
        for batch in batches:
            iteration.append(_copied(batch))
            yield batch

    with _loaders_read_by(read, lambda number, length: length):
        yield


@contextmanager
def replaying(samples: Samples) -> Iterator[None]:
    """Has the loaders of this process give these samples, with the lengths of the ranks' loaders."""
    iterations_of = {number: iter(iterations) for number, iterations in samples.of_loaders.items()}

    def read(loader: DataLoader[Any], number: int, batches: Iterator[Any]) -> Iterator[Any]:
        yield from next(iterations_of.get(number, iter(())), [])

    with _loaders_read_by(read, lambda number, length: samples.lengths.get(number, length)):
        yield


@contextmanager
def _loaders_read_by(
    read: Callable[[DataLoader[Any], int, Iterator[Any]], Iterator[Any]], length_of: Callable[[int, int], int]
) -> Iterator[None]:
    original_iter, original_len = DataLoader.__iter__, DataLoader.__len__
    numbers: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()

    def number_of(loader: DataLoader[Any]) -> int:
        return numbers.setdefault(loader, next(counter) if loader not in numbers else -1)

    counter = count()

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        return read(self, number_of(self), original_iter(self))

    def length(self: DataLoader[Any]) -> int:
        return length_of(number_of(self), original_len(self))

    DataLoader.__iter__, DataLoader.__len__ = iterate, length  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__, DataLoader.__len__ = original_iter, original_len  # type: ignore[method-assign]


def _copied(batch: Any) -> Any:
    if isinstance(batch, Mapping) and type(batch) is not dict:
        return type(batch)({key: _copied(value) for key, value in batch.items()})  # type: ignore[call-arg]
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
