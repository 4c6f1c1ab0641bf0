"""Micro-batches in FairScale's form: a `Batch` is a tensor or a tuple of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from scale_pipe.microbatch import gather as _gather
from scale_pipe.microbatch import scatter_each

__all__ = ["Batch", "check", "gather", "scatter"]

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors


class Batch:
    """A micro-batch and its number: `atomic` if it is one tensor.

    Args:
        value: A tensor, or a tuple of them.
        index: The number of the micro-batch.
    """

    def __init__(self, value: TensorOrTensors, index: int = 0) -> None:
        self.value, self.index = value, index

    @property
    def atomic(self) -> bool:
        """Whether it is one tensor."""
        return isinstance(self.value, Tensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor. Raises AttributeError if there are several."""
        if not isinstance(self.value, Tensor):
            raise AttributeError("not atomic batch: it is a tuple, batch.tensors")
        return self.value

    @property
    def tensors(self) -> Tensors:
        """The tuple of tensors. Raises AttributeError if it is one tensor."""
        if isinstance(self.value, Tensor):
            raise AttributeError("batch is atomic: it is one tensor, batch.tensor")
        return self.value

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        """What it holds."""
        return self.value

    def call(self, function: Callable[[Any], TensorOrTensors]) -> Batch:
        """Returns a function's result of what it holds as a batch."""
        return Batch(function(self.value), self.index)

    def _as_list(self) -> list[Tensor]:
        return [self.value] if isinstance(self.value, Tensor) else list(self.value)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._as_list())

    def __len__(self) -> int:
        return len(self._as_list())

    def __getitem__(self, index: int) -> Tensor:
        return self._as_list()[index]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        tensors, atomic = self._as_list(), self.atomic
        tensors[index] = value
        if atomic and len(tensors) != 1:
            raise IndexError("atomic batch cannot be replaced with multiple tensors")
        self.value = tensors[0] if atomic else tuple(tensors)

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"


def check(input: Any) -> None:
    """Raises TypeError if it is neither a tensor nor a tuple of them."""
    if isinstance(input, tuple):
        for part in input:
            check(part)
    elif not isinstance(input, Tensor):
        raise TypeError(
            f"expected Tensor, but got {type(input).__name__}: FairScale's pipelines take and return one tensor or a "
            "tuple of them; scale_pipe.Pipe takes anything that has a tensor in it"
        )


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Cuts a mini-batch, each tensor along dimension 0, into at most `chunks` micro-batches."""
    return [Batch(piece, index) for index, piece in enumerate(scatter_each(input, chunks, stacklevel=3))]


def gather(outputs: Sequence[Batch]) -> TensorOrTensors:
    """Concatenates the tensors of micro-batches along dimension 0."""
    merged: TensorOrTensors = _gather([batch.value for batch in outputs])
    return merged
