"""Which elements of a tensor each rank has: as `fully_shard`, OSS, hybrid sharding and tensor parallelism cut them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Ranges, Shard, elements_of
from scale_core.sharded_tensor.tensor import mark_sharded, set_shard


class Axes(NamedTuple):
    """The groups of the ranks: all of them, and with four the rows and columns of a square."""

    world: Group
    inner: Group | None
    outer: Group | None


Layout = Callable[[tuple[int, ...], Axes], Shard | None]


def elements(shape: tuple[int, ...], axes: Axes, cuts: Sequence[int]) -> Shard:
    rank = axes.world.rank
    return Shard("weight", shape, cuts[rank], cuts[rank + 1], (Axis(axes.world, Placement.SHARD),), "unit")


def even_elements(shape: tuple[int, ...], axes: Axes) -> Shard:
    numel, size = math.prod(shape), axes.world.size
    return elements(shape, axes, [numel * at // size for at in range(size + 1)])


def whole_rows(shape: tuple[int, ...], axes: Axes) -> Shard | None:
    if not shape:
        return None
    size, row = axes.world.size, math.prod(shape[1:])
    chunk = -(-shape[0] // size)
    return elements(shape, axes, [min(at * chunk, shape[0]) * row for at in range(size + 1)])


def cut_inside_rows(shape: tuple[int, ...], axes: Axes) -> Shard:
    numel, size = math.prod(shape), axes.world.size
    return elements(shape, axes, [0, *(max(0, numel * at // size - 1) for at in range(1, size)), numel])


def nothing_on_the_first(shape: tuple[int, ...], axes: Axes) -> Shard:
    numel, size = math.prod(shape), axes.world.size
    return elements(shape, axes, [0, *(numel * at // (size - 1) for at in range(size))])


def all_on_the_first(shape: tuple[int, ...], axes: Axes) -> Shard:
    return elements(shape, axes, [0, *[math.prod(shape)] * axes.world.size])


def of_a_bucket(shape: tuple[int, ...], axes: Axes) -> Shard:
    """As pieces of a bucket of OSS: the cut falls where the sizes of others before it have it."""
    numel, size = math.prod(shape), axes.world.size
    bucket = numel + 5
    return elements(shape, axes, [min(numel, max(0, bucket * at // size - 3)) for at in range(size)] + [numel])


def columns(shape: tuple[int, ...], axes: Axes) -> Shard | None:
    if len(shape) < 2:
        return None
    rank, size = axes.world.rank, axes.world.size
    first, last = (shape[-1] * at // size for at in (rank, rank + 1))
    ranges: Ranges = (*(((0, length),) for length in shape[:-1]), ((first, last),))
    return Shard.of_ranges("weight", shape, ranges, (Axis(axes.world, Placement.SHARD),))


def groups_of_rows(shape: tuple[int, ...], axes: Axes) -> Shard | None:
    """As of a layer that has queries, keys and values in one matrix."""
    if not shape or shape[0] < 2 * axes.world.size:
        return None
    rank, size, half = axes.world.rank, axes.world.size, shape[0] // 2
    rows = tuple(
        (start + length * rank // size, start + length * (rank + 1) // size)
        for start, length in ((0, half), (half, shape[0] - half))
    )
    ranges: Ranges = (rows, *(((0, length),) for length in shape[1:]))
    return Shard.of_ranges("weight", shape, ranges, (Axis(axes.world, Placement.SHARD),))


def copies_of_rows(shape: tuple[int, ...], axes: Axes) -> Shard | None:
    """As keys and values of fewer heads than ranks: the last two ranks have the same rows."""
    rank, size = axes.world.rank, axes.world.size
    if not shape or size < 3:
        return None
    part = min(rank, size - 2)
    rows = tuple(shape[0] * at // (size - 1) for at in (part, part + 1))
    ranges: Ranges = (((rows[0], rows[1]),), *(((0, length),) for length in shape[1:]))
    return Shard.of_ranges("weight", shape, ranges, (Axis(axes.world, Placement.SHARD),), counted=rank < size - 1)


def hybrid(shape: tuple[int, ...], axes: Axes) -> Shard | None:
    if axes.inner is None or axes.outer is None:
        return None
    start, stop = (math.prod(shape) * at // 2 for at in (axes.inner.rank, axes.inner.rank + 1))
    both = (Axis(axes.inner, Placement.SHARD), Axis(axes.outer, Placement.REPLICATE))
    return Shard("weight", shape, start, stop, both, "unit")


def columns_of_a_unit(shape: tuple[int, ...], axes: Axes) -> Shard | None:
    """A tensor parallel layer's columns, cut by a unit along the other axis."""
    if axes.inner is None or axes.outer is None or len(shape) < 2:
        return None
    first, last = (shape[-1] * at // 2 for at in (axes.outer.rank, axes.outer.rank + 1))
    ranges: Ranges = (*(((0, length),) for length in shape[:-1]), ((first, last),))
    layer = Shard.of_ranges("weight", shape, ranges, (Axis(axes.outer, Placement.SHARD),))
    numel = layer.stop - layer.start
    start, stop = (numel * at // 2 for at in (axes.inner.rank, axes.inner.rank + 1))
    return layer.cut("weight", start, stop, (Axis(axes.inner, Placement.SHARD),), "unit")


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        *(even_elements, whole_rows, cut_inside_rows, nothing_on_the_first, all_on_the_first, of_a_bucket),
        *(columns, groups_of_rows, copies_of_rows, hybrid, columns_of_a_unit),
    )
}


def local_view(part: Tensor, shard: Shard) -> Tensor:
    """The elements in the shape in which a rank has them: rows or columns if these are whole, or else 1-D."""
    shape = tuple(sum(last - first for first, last in held) for held in shard.ranges) or shard.shape
    row = math.prod(shape[1:])
    if shape and row and len(part) and len(part) % row == 0 and shard.start % row == 0:
        return part.view(-1, *shape[1:])
    return (
        part.view(0, *shape[1:]) if shape and not len(part) else part.view(shape) if not shape and len(part) else part
    )


def sharded(full: Tensor, shard: Shard, shard_class: type[Tensor]) -> Tensor:
    """This rank's shard of a tensor, in memory of its own; of class Tensor, it does not know that it is one."""
    part = local_view(elements_of(full.detach(), shard.start, shard.stop, shard.ranges).clone(), shard)
    if issubclass(shard_class, nn.Parameter):
        param = nn.Parameter(part, requires_grad=False)
        set_shard(param, shard)
        return param
    return part if shard_class is Tensor else mark_sharded(part, shard)
