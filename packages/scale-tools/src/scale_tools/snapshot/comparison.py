"""What differs between two checkpoints: keys, shapes, dtypes and values, one tensor of each in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scale_snapshot.convert.naming import StoredState


@dataclass(frozen=True)
class Difference:
    """One key that differs.

    Attributes:
        key: The key.
        what: "only in A", "only in B", "shape", "dtype", "values" (of a tensor) or "value" (of anything else).
        a: What A has, as text; "" where it has nothing.
        b: What B has.
        max_abs_diff: With "values", the largest difference of two numbers; infinite where one alone is not a number.
        num_different: With "values", how many elements differ.
        num_elements: With "values", of how many.
    """

    key: str
    what: str
    a: str = ""
    b: str = ""
    max_abs_diff: float = 0.0
    num_different: int = 0
    num_elements: int = 0

    def __str__(self) -> str:
        if self.what == "values":
            share = f"{self.num_different:,} of {self.num_elements:,} elements"
            return f"{self.key}: {share} differ, by {self.max_abs_diff:.6g} at most"
        if self.what.startswith("only"):
            return f"{self.key}: {self.what} ({self.a or self.b})"
        return f"{self.key}: {self.what} {self.a} in A, {self.b} in B"


def differences(
    a: StoredState, b: StoredState, atol: float = 0.0, progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Difference]:
    """Yields what differs, in A's order; `progress` is called with the bytes of each tensor of A that was compared.

    Numbers that differ by `atol` at most are equal; with 0 two tensors are equal if all their bits are.
    """
    for key in [*a.tensors, *(key for key in b.tensors if key not in a.tensors)]:
        one, other = a.tensors.get(key), b.tensors.get(key)
        if one is None or other is None:
            where, present = ("only in B", other) if one is None else ("only in A", one)
            assert present is not None
            text = _describe(present)
            yield Difference(key, where, text if one is not None else "", text if one is None else "")
        elif one.shape != other.shape:
            yield Difference(key, "shape", str(tuple(one.shape)), str(tuple(other.shape)))
        elif one.dtype != other.dtype:
            yield Difference(key, "dtype", _name(one.dtype), _name(other.dtype))
        else:
            change = compare_tensors(key, one.load(), other.load(), atol)
            if change is not None:
                yield change
        if one is not None:
            progress(one.num_bytes)
    for key in [*a.values, *(key for key in b.values if key not in a.values)]:
        if key not in b.values or key not in a.values:
            value = str(a.values.get(key, b.values.get(key)))
            yield Difference(key, "only in A", value) if key in a.values else Difference(key, "only in B", "", value)
        elif a.values[key] != b.values[key]:
            yield Difference(key, "value", str(a.values[key]), str(b.values[key]))


def compare_tensors(key: str, one: Tensor, other: Tensor, atol: float) -> Difference | None:
    """Compares two tensors of one shape and dtype; None if they are equal."""
    one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest, count = 0.0, 0
    for begin in range(0, one.numel(), _ELEMENTS_AT_ONCE):
        a, b = (tensor[begin : begin + _ELEMENTS_AT_ONCE].to(wide) for tensor in (one, other))
        distance = (a - b).abs()
        distance[a == b] = 0.0  # Equal infinities, whose difference is no number.
        distance[torch.isnan(a) & torch.isnan(b)] = 0.0
        distance[torch.isnan(distance)] = math.inf
        differ = distance > atol if atol else _bits_differ(one, other, begin)
        count += int(differ.sum())
        largest = max(largest, float(distance.max()))
    return Difference(key, "values", "", "", largest, count, one.numel()) if count else None


_ELEMENTS_AT_ONCE = 1 << 22


def _bits_differ(one: Tensor, other: Tensor, begin: int) -> Tensor:
    a, b = (tensor[begin : begin + _ELEMENTS_AT_ONCE] for tensor in (one, other))
    return (a.view(torch.uint8).view(len(a), -1) != b.view(torch.uint8).view(len(b), -1)).any(dim=1)


def _describe(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} {tuple(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
