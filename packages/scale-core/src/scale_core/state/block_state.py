"""State of optimizers that is quantized block by block: codes for each element, a scale for each block, code books.

Codes have the parameter's shape, as any other state. A scale belongs to a block of consecutive elements, so a parameter
has to be cut where a block ends, which `ShardOptions(atom=BlockAtom(k))` sees to. Code books are the same for every
rank. Scales and code books are known by their keys, since their shapes could belong to anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from scale_core.state.local_shard import LocalShard
from scale_core.state.param_ownership import ParamSlice, not_elementwise

BLOCK_SIZES: Mapping[str, int] = MappingProxyType({"absmax1": 256, "absmax2": 256})
"""Keys of the scales of bitsandbytes, and the number of elements that each scale is for."""

CODE_BOOKS = frozenset({"qmap1", "qmap2"})
"""Keys of the code books of bitsandbytes."""


def num_blocks(key: str, holding: ParamSlice) -> int:
    """Of the elements that this rank holds.

    Raises:
        ValueError: They begin within a block.
    """
    size = BLOCK_SIZES[key]
    if holding.start == holding.stop:
        return 0
    if holding.start % size or holding.ranges or holding.shares_owner:
        raise ValueError(
            f"optimizer state {holding.name}.{key} has one value for {size} elements, and this rank's shard of the "
            f"parameter is cut within a block: write fully_shard(..., options=ShardOptions(atom=BlockAtom({size})))"
        )
    return -(-(holding.stop - holding.start) // size)


def whole_shape(key: str, holding: ParamSlice) -> tuple[int, ...]:
    """The shape of the scales of the full parameter."""
    return (-(-math.prod(holding.shape) // BLOCK_SIZES[key]),)


def block_shard(key: str, value: Tensor, holding: ParamSlice) -> LocalShard:
    """This rank's scales, as a shard of the scales of the full parameter.

    Raises:
        ValueError: The elements begin within a block, or there is another number of scales.
    """
    block_count = num_blocks(key, holding)
    if tuple(value.shape) != (block_count,):
        raise not_elementwise(f"{holding.name}.{key}", value.shape, holding.owner.shape)
    first = holding.start // BLOCK_SIZES[key] if block_count else 0
    return LocalShard(value.detach(), whole_shape(key, holding), first, first + block_count, written=holding.written)
