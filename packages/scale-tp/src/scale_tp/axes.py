"""How a world of ranks stands in axes: integers only.

There are four axes, the last of which runs fastest: data, pipeline, context, model. So the ranks that divide a layer
are next to each other, as on one machine.
"""

from __future__ import annotations

from typing import NamedTuple


class AxisSizes(NamedTuple):
    """How many ranks each axis has; their product is that of all. The slowest first."""

    data: int
    pipeline: int
    context: int
    model: int


def rank_groups(sizes: AxisSizes) -> dict[str, list[list[int]]]:
    """The ranks of each group along each axis; integers only.

    Example:
        >>> rank_groups(AxisSizes(data=2, pipeline=1, context=1, model=2))["model"]
        [[0, 1], [2, 3]]
        >>> rank_groups(AxisSizes(data=2, pipeline=1, context=1, model=2))["data"]
        [[0, 2], [1, 3]]
    """
    groups: dict[str, list[list[int]]] = {}
    world, step = sizes.data * sizes.pipeline * sizes.context * sizes.model, 1
    for name, size in reversed(list(sizes._asdict().items())):
        first = [rank for rank in range(world) if rank // step % size == 0]
        groups[name] = [list(range(start, start + step * size, step)) for start in first]
        step *= size
    return groups


def replica_groups(sizes: AxisSizes) -> list[list[int]]:
    """The ranks of each group that has the same parameters: those along the data and the context axis.

    Example:
        >>> replica_groups(AxisSizes(data=2, pipeline=1, context=2, model=2))
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(sizes.data * sizes.pipeline * sizes.context * sizes.model):
        stage = rank // (sizes.context * sizes.model) % sizes.pipeline
        groups.setdefault((stage, rank % sizes.model), []).append(rank)
    return list(groups.values())
