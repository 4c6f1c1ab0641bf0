"""Checks that a saved state belongs to this model and optimizer, before anything is written.

Only names, shapes and dtypes are compared, since a snapshot is compared before it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scale_core.errors import ScaleError


@dataclass(frozen=True)
class SavedTensor:
    """The shape of a saved full tensor, and its dtype.

        >>> import torch
        >>> from scale_core.state.validation import SavedTensor
        >>> SavedTensor((3, 4), torch.float32).shape
        (3, 4)

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Misfit:
    """Stands in a state in place of an entry that can't be loaded, and says why."""

    reason: str


class StateMismatch(ScaleError, ValueError):
    """A saved state belongs to a different model or optimizer; the message lists the differences.

    Attributes:
        differences: The differences by key, if known.

    See also: [what to do about a StateMismatch](../guides/troubleshooting.md#statemismatch).
    """

    def __init__(self, message: str, differences: StateDifferences | None = None) -> None:
        super().__init__(message)
        self.differences = differences


@dataclass
class StateDifferences:
    """The differences of two states, by key, with a text if the name is not enough."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: dict[str, str] = field(default_factory=dict)
    other_dtype: dict[str, str] = field(default_factory=dict)
    other_kind: dict[str, str] = field(default_factory=dict)  # a tensor here, another value there
    misfits: dict[str, str] = field(default_factory=dict)  # entries that can't be loaded for another reason

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __str__(self) -> str:
        texts = (
            ("missing in it", self.missing),
            ("unexpected in it", self.unexpected),
            ("of another shape", self.misshapen.values()),
            ("of another dtype", self.other_dtype.values()),
            ("of another kind", self.other_kind.values()),
        )
        listed = [f"{len(keys)} {problem}: {some_keys(list(keys))}" for problem, keys in texts if keys]
        return "; ".join([*listed, *self.misfits.values()])

    def refusal(self) -> str:
        """Why the state does not fit, and what helps."""
        if self.keys == self.misfits.keys():
            return str(self)
        way = "build model and optimizer as they were, or load what fits with strict=False"
        if self.keys == self.other_dtype.keys():
            way = "build the model in that dtype, or convert with cast=True"
        return f"the state belongs to another model or optimizer ({self}): {way}"

    @classmethod
    def of_ranks(cls, found: Iterable[StateDifferences]) -> StateDifferences:
        """The differences of all ranks; an entry is unexpected if none of them expects it."""
        every = list(found)
        everywhere = set.intersection(*(set(difference.unexpected) for difference in every))
        together = cls(
            missing=list(dict.fromkeys(key for difference in every for key in difference.missing)),
            unexpected=[key for key in every[0].unexpected if key in everywhere],
        )
        for rank_difference in every:
            together.misshapen.update(rank_difference.misshapen)
            together.other_dtype.update(rank_difference.other_dtype)
            together.other_kind.update(rank_difference.other_kind)
            together.misfits.update(rank_difference.misfits)
        return together

    @property
    def keys(self) -> set[str]:
        """All keys that differ."""
        return {*(*self.missing, *self.unexpected, *self.misshapen, *self.other_dtype, *self.other_kind, *self.misfits)}


def compare_states(own: Mapping[str, Any], given: Mapping[str, Any]) -> StateDifferences:
    """Compares two states; tensors are compared by shape and dtype.

    Args:
        own: The current state: tensors or `SavedTensor`s, other values, and `Misfit`s.
        given: The saved one.
    """
    misfits = {key: misfit.reason for key, misfit in own.items() if isinstance(misfit, Misfit)}
    differences = StateDifferences(
        missing=[key for key in own if key not in given and key not in misfits],
        unexpected=[key for key in given if key not in own],
        misfits=misfits,
    )
    for key, destination in own.items():
        if key not in given or key in misfits:
            continue
        saved = given[key]
        if _is_tensor(saved) != _is_tensor(destination):
            kinds = ("a tensor", "none") if _is_tensor(saved) else ("no tensor", "one")
            differences.other_kind[key] = f"{key}: {kinds[0]} was saved, where {kinds[1]} is expected"
        elif _is_tensor(saved) and tuple(saved.shape) != tuple(destination.shape):
            differences.misshapen[key] = (
                f"{key}: the saved shape is {tuple(saved.shape)}, expected {tuple(destination.shape)}"
            )
        elif _is_tensor(saved) and saved.dtype != destination.dtype:
            differences.other_dtype[key] = f"{key}: the saved dtype is {saved.dtype}, expected {destination.dtype}"
    return differences


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | SavedTensor)


def some_keys(keys: list[str], limit: int = 10) -> str:
    """The first of some keys, and how many there are besides."""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return (", ".join(keys[:limit]) or "none") + more
