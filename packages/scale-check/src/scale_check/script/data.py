"""The samples of a script: what each rank has had is kept, and the one process gets that of all ranks together.

Kept is what `DataLoader`s give. A script that has none gets its samples in the calls of its model: then the positional
arguments of these are kept, and take the place of those of the one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader


class Samples:
    """What the loaders of a process have given, and the arguments of its model, in the order of time."""

    def __init__(self) -> None:
        self.of_loaders: dict[int, list[Any]] = {}  # by the number of the loader, in the order of first use
        self.of_model: list[Any] = []

    @classmethod
    def together(cls, ranks: Sequence[Samples]) -> Samples:
        """The samples of all ranks in one: those of rank 0 first."""
        whole = cls()
        for number in ranks[0].of_loaders:
            whole.of_loaders[number] = [
                joined(batches) for batches in zip(*(rank.of_loaders.get(number, []) for rank in ranks), strict=False)
            ]
        whole.of_model = [joined(args) for args in zip(*(rank.of_model for rank in ranks), strict=False)]
        return whole


def joined(batches: Sequence[Any]) -> Any:
    """Batches with the same structure as one: tensors along their first dimension, lists one after the other.

    >>> joined([{"x": torch.ones(2, 3), "ids": ["a"]}, {"x": torch.zeros(2, 3), "ids": ["b"]}])["x"].shape
    torch.Size([4, 3])
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.ndim else torch.stack(list(batches)).mean()
    if isinstance(first, Mapping):
        content = {key: joined([batch[key] for batch in batches]) for key in first}
        return content if type(first) is dict else type(first)(content)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        if first and not any(isinstance(each, Tensor | Mapping | tuple | list) for each in first):
            return type(first)([each for batch in batches for each in batch])
        parts = [joined(parts) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


@contextmanager
def keeping(samples: Samples) -> Iterator[None]:
    """Keeps what the loaders of this process give."""

    def read(number: int, batches: Iterator[Any]) -> Iterator[Any]:
        kept = samples.of_loaders.setdefault(number, [])
        for batch in batches:
            kept.append(_copied(batch))
            yield batch

    with _loaders_read_by(read):
        yield


@contextmanager
def replaying(samples: Samples) -> Iterator[None]:
    """Has the loaders of this process give these samples."""
    given = {number: iter(batches) for number, batches in samples.of_loaders.items()}

    def read(number: int, batches: Iterator[Any]) -> Iterator[Any]:
        yield from given.get(number, batches)

    with _loaders_read_by(read):
        yield


@contextmanager
def _loaders_read_by(read: Callable[[int, Iterator[Any]], Iterator[Any]]) -> Iterator[None]:
    own, numbers = DataLoader.__iter__, {}  # type: ignore[var-annotated]

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        number = numbers.setdefault(id(self), len(numbers))
        return read(number, own(self))

    DataLoader.__iter__ = iterate  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = own  # type: ignore[method-assign]


def _copied(batch: Any) -> Any:
    if isinstance(batch, Mapping) and type(batch) is not dict:
        return type(batch)({key: _copied(value) for key, value in batch.items()})  # type: ignore[call-arg]
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
