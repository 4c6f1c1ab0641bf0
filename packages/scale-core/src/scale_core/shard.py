"""What a local shard is a piece of: the contract between the packages.

An optimizer wrapper, a gradient norm, a checkpoint and a tensor-parallel layer all ask one question of a tensor that
`parameters()` yields: which elements of which tensor are you, and who holds the others? The answer stands here, in a
map beside the tensor and never in hidden attributes on it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.group import Group


class Held(enum.Enum):
    """How the ranks of one mesh axis hold a tensor between them."""

    SHARD = "each rank holds other elements"
    REPLICATE = "each rank holds the same elements with the same values"
    PARTIAL = "each rank holds a summand of the same elements"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: its ranks, and how they hold the tensor."""

    group: Group
    held: Held


@dataclass(frozen=True)
class Shard:
    """The piece of a parameter that this rank holds.

    Attributes:
        name: The parameter's qualified name in the plain model.
        shape: The shape of the whole parameter.
        start: First element held, in the row-major order of the whole parameter.
        stop: One past the last element held; `start == stop` where this rank holds nothing.
        axes: How each mesh axis holds it.
        unit: The name of the unit that gathers it; "" is the root.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    axes: tuple[Axis, ...] = ()
    unit: str = ""

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)


_shards: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark(param: Tensor, shard: Shard) -> None:
    """Records that `param` is this piece; a later mark replaces an earlier one."""
    _shards[param] = shard


def shard_of(param: Tensor) -> Shard | None:
    """Returns what `param` is a piece of, or None if it is a whole tensor of its own."""
    found: Shard | None = _shards.get(param)
    return found


def full_shape(param: Tensor) -> torch.Size:
    """Returns the shape of the whole parameter, whether `param` is a piece of it or all of it."""
    shard = shard_of(param)
    return param.shape if shard is None else torch.Size(shard.shape)
