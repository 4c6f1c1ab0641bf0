"""Shards that are updated where they are, without a buffer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.autograd.graph import increment_version

from scale_core.shard import on_local_tensors
from scale_oss.buckets.state_placement import ShardedParam, StatePlacement


class InPlaceBucket:
    """Shards that are updated where they are: of element-wise optimizers, or tensors that one rank holds in full."""

    def __init__(self, shards: Sequence[ShardedParam], elementwise: bool) -> None:
        self.params = [shard.param for shard in shards]
        self.placements = [
            StatePlacement(
                shard.param,
                shard.name,
                shard.shape,
                shard.ranges,
                None if elementwise else shard.holder,
                shard.group,
                shard.param,
            )
            for shard in shards
        ]

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        return [placement.optimizer_param for placement in self.placements if placement.optimizer_param is not None]

    @on_local_tensors
    def mark_updated(self) -> None:
        """Increments the versions of the updated parameters, by which gathered copies are known to be stale."""
        # On all ranks: one without elements of a parameter must gather it again with the others.
        increment_version([param for param in self.params if param.grad is not None])
