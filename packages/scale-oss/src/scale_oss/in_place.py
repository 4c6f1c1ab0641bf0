"""One bucket: shards that an optimizer steps on where they are, so that nothing is sent.

Those of an optimizer that updates each element by itself, and tensors that one rank holds whole already.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.autograd.graph import increment_version

from scale_oss.places import Place, Sharded


class InPlaceBucket:
    """Shards of which each rank updates what it holds.

    Args:
        shards: The parameters.
        elementwise: Whether each element is updated by itself; else one rank holds all of each parameter.

    Attributes:
        params: This rank's pieces, as the user's model has them.
        places: Where the state of each is kept.
    """

    def __init__(self, shards: Sequence[Sharded], elementwise: bool) -> None:
        self.params = [shard.param for shard in shards]
        self.places = [_place(shard, elementwise) for shard in shards]

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What this rank's optimizer steps on."""
        return [place.stepped for place in self.places if place.stepped is not None]

    def publish(self) -> None:
        """Tells whoever has gathered these parameters that they have changed, on all ranks alike.

        A rank that holds nothing of one has stepped on nothing; yet it must gather again when the others do.
        """
        increment_version([param for param in self.params if param.grad is not None])


def _place(shard: Sharded, elementwise: bool) -> Place:
    rank = shard.group.rank
    owner = None if elementwise else shard.holder
    assert elementwise or owner is not None, "a tensor that ranks share can't be stepped on where it is"
    steps = rank == owner if owner is not None else bool(shard.ranges[rank].numel) or not shard.numel
    return Place(shard.param, shard.name, shard.shape, shard.ranges, owner, shard.group, shard.param if steps else None)
