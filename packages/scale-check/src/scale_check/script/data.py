"""The samples of a script: each rank keeps its own, and the one process gets the samples of all ranks.

They are the batches of `DataLoader`s. In a script without a loader they are the positional arguments of the model,
which replace the arguments in the one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader


class SamplesError(RuntimeError):
    """The samples of the ranks can't be given to one process."""


class OutOfSamples(BaseException):
    """A process needs more batches than the ranks have read; not an Exception, which a script may catch."""


class Samples:
    """What the loaders of a process have given, and the arguments of its model, in the order of time."""

    def __init__(self) -> None:
        # By the number of the loader, in the order of first use: the batches of each of its iterations, and its length.
        self.of_loaders: dict[int, list[list[Any]]] = {}
        self.lengths: dict[int, int] = {}
        self.ended: set[tuple[int, int]] = set()  # Numbers of loaders, and of their iterations that went to the end.
        self.of_model: list[Any] = []

    @classmethod
    def together(cls, ranks: Sequence[Samples]) -> Samples:
        """Joins the samples of all ranks, rank 0 first.

        Raises:
            SamplesError: Some ranks have read a loader that others have not, or their batches have other structures.
        """
        samples = cls()
        samples.lengths = dict(ranks[0].lengths)
        samples.ended = set.intersection(*(rank.ended for rank in ranks))
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

    @staticmethod
    def are_equal(ranks: Sequence[Samples]) -> bool:
        """Whether all ranks have had the same samples, as if the ranks divide the model or each batch."""
        first, *others = [rank.of_loaders or rank.of_model for rank in ranks]
        return all(_are_equal(first, other) for other in others)

    @classmethod
    def in_turn(cls, ranks: Sequence[Samples]) -> Samples:
        """The samples of all ranks, one rank after the other, for one process that makes as many forwards as they."""
        samples = cls()
        samples.lengths = {number: length * len(ranks) for number, length in ranks[0].lengths.items()}
        samples.ended = set.intersection(*(rank.ended for rank in ranks))
        for number in ranks[0].of_loaders:
            iterations = zip(*(rank.of_loaders[number] for rank in ranks), strict=False)
            samples.of_loaders[number] = [
                [batch for batches in zip(*of_ranks, strict=False) for batch in batches] for of_ranks in iterations
            ]
        samples.of_model = [
            args for of_ranks in zip(*(rank.of_model for rank in ranks), strict=False) for args in of_ranks
        ]
        return samples

    @classmethod
    def of_one_length(cls, ranks: Sequence[Samples]) -> list[Samples] | None:
        """The samples of each rank, with its sequences as long as the longest of the same batch on any rank.

        None if nothing has to be padded, or if a batch that has to be has no `attention_mask`.
        """
        padded_ranks = [cls() for _ in ranks]
        is_padded = False
        for rank, padded_rank in zip(ranks, padded_ranks, strict=True):
            padded_rank.lengths, padded_rank.ended = rank.lengths, rank.ended
            for number, iterations in rank.of_loaders.items():
                padded_rank.of_loaders[number] = [list(batches) for batches in iterations]
        for number in padded_ranks[0].of_loaders:
            for iterations in zip(*(rank.of_loaders.get(number, []) for rank in padded_ranks), strict=False):
                for index, batches in enumerate(zip(*iterations, strict=False)):
                    lengths = {batch["attention_mask"].shape[1] for batch in batches if _has_mask(batch)}
                    if len(lengths) < 2 or not all(_has_mask(batch) for batch in batches):
                        continue
                    is_padded = True
                    for batches_of_rank, batch in zip(iterations, batches, strict=True):
                        batches_of_rank[index] = _padded(batch, max(lengths), batches)
        return padded_ranks if is_padded else None


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
def keeping(samples: Samples, before_batch: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Keeps what the loaders of this process give, and calls `before_batch` before they give a batch."""

    def read(loader: DataLoader[Any], number: int, batches: Iterator[Any]) -> Iterator[Any]:
        iteration: list[Any] = []
        iterations = samples.of_loaders.setdefault(number, [])
        place = (number, len(iterations))
        iterations.append(iteration)
        with suppress(TypeError):  # A stream has no length.
            samples.lengths[number] = len(loader)
        for batch in batches:
            iteration.append(_copied(batch))
            before_batch()
            yield batch
        samples.ended.add(place)

    with _loaders_read_by(read, lambda number, length: length):
        yield


@contextmanager
def replaying(samples: Samples, before_batch: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Has the loaders of this process give these samples, with the lengths of the ranks' loaders, as `keeping` does."""
    iterations_of = {number: enumerate(iterations) for number, iterations in samples.of_loaders.items()}

    def read(loader: DataLoader[Any], number: int, batches: Iterator[Any]) -> Iterator[Any]:
        place, iteration = next(iterations_of.get(number, iter(())), (-1, []))
        for batch in iteration:
            before_batch()
            yield batch
        if place >= 0 and (number, place) not in samples.ended:
            raise OutOfSamples  # The ranks' loader goes on, and nobody has its further batches.

    with _loaders_read_by(read, lambda number, length: samples.lengths.get(number, length)):
        yield


_Read = Callable[[DataLoader[Any], int, Iterator[Any]], Iterator[Any]]


class _LoaderHooks:
    """Puts `read` between all loaders and their users, also loaders of subclasses with an `__iter__` of their own."""

    def __init__(self, read: _Read, length_of: Callable[[int, int], int]) -> None:
        self._read, self._length_of = read, length_of
        self._numbers: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
        self._inner: set[DataLoader[Any]] = set()  # Loaders whose `__iter__` runs; it may call that of its base class.
        self._replaced: list[tuple[type, str, Any]] = []

    def replace_methods(self, loader_class: type[DataLoader[Any]]) -> None:
        """Replaces the methods that a class and its subclasses define."""
        for name, wrapped in (("__iter__", self._iter), ("__len__", self._len)):
            if (original := loader_class.__dict__.get(name)) is not None:
                self._replaced.append((loader_class, name, original))
                setattr(loader_class, name, wrapped(original))
        for subclass in loader_class.__subclasses__():
            self.replace_methods(subclass)

    def put_back(self) -> None:
        """Puts the original methods back."""
        for loader_class, name, original in self._replaced:
            setattr(loader_class, name, original)

    def _number_of(self, loader: DataLoader[Any]) -> int:
        return self._numbers.setdefault(loader, len(self._numbers))

    def _iter(self, original: Callable[[DataLoader[Any]], Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if loader in self._inner:
                return original(loader)
            with self._running(loader):
                batches = original(loader)
            return self._read(loader, self._number_of(loader), self._batches(loader, batches))

        return iterate

    def _len(self, original: Callable[[DataLoader[Any]], int]) -> Callable[..., int]:
        def length(loader: DataLoader[Any]) -> int:
            return self._length_of(self._number_of(loader), original(loader))

        return length

    def _batches(self, loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._running(loader):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def _running(self, loader: DataLoader[Any]) -> Iterator[None]:
        self._inner.add(loader)
        try:
            yield
        finally:
            self._inner.discard(loader)


@contextmanager
def _loaders_read_by(read: _Read, length_of: Callable[[int, int], int]) -> Iterator[None]:
    hooks = _LoaderHooks(read, length_of)

    def init_subclass(loader_class: type[DataLoader[Any]], **kwargs: Any) -> None:
        super(DataLoader, loader_class).__init_subclass__(**kwargs)
        hooks.replace_methods(loader_class)

    hooks.replace_methods(DataLoader)
    DataLoader.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment, arg-type]
    try:
        yield
    finally:
        del DataLoader.__init_subclass__
        hooks.put_back()


def _are_equal(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        is_strided = all(each.layout is torch.strided and not each.is_nested for each in (value, other))
        return is_strided and value.dtype is other.dtype and torch.equal(value, other)
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(_are_equal(value[key], other[key]) for key in value)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    return isinstance(value, int | float | str | bytes | None) and bool(value == other)


def _has_mask(batch: Any) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, Tensor) and mask.ndim == 2


def _padded(batch: Any, length: int, batches: Sequence[Any]) -> Any:
    """A tokenizer's batch with sequences of another length, padded with what its batches are padded with already."""
    missing = length - batch["attention_mask"].shape[1]
    content = dict(batch)
    for name, tensor in batch.items():
        if isinstance(tensor, Tensor) and tensor.shape[:2] == batch["attention_mask"].shape:
            fill = _padding_value(name, batches)
            content[name] = torch.cat([tensor, tensor.new_full((len(tensor), missing, *tensor.shape[2:]), fill)], 1)
    return content if type(batch) is dict else type(batch)(content)


def _padding_value(name: str, batches: Sequence[Any]) -> float:
    if name == "labels":
        return -100  # As data collators pad them, so that losses leave them out.
    for batch in batches:
        padding = batch[name][batch["attention_mask"] == 0]
        if padding.numel():
            return float(padding.flatten()[0])
    return 0


def _copied(batch: Any) -> Any:
    if isinstance(batch, Mapping) and type(batch) is not dict:
        return type(batch)({key: _copied(value) for key, value in batch.items()})  # type: ignore[call-arg]
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)
