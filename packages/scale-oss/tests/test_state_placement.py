"""state_placement.py: which rank keeps the state of which elements of each shard."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from oss_cases import Shards, plain_params

from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_oss import OSS


@pytest.mark.simulation
@pytest.mark.parametrize("rank", range(3))
def test_simulated_ranks_share_what_this_one_does_not_hold(rank: int) -> None:
    with simulate(rank=rank, world_size=3):
        shards = Shards(plain_params())
        optimizer = OSS(shards.params.items(), torch.optim.AdamW, lr=0.1)
        places = [place for bucket in optimizer.in_place_buckets for place in bucket.placements]
        assert [place.name for place in places] == list(shards.params) and group_of().size == 3
        for place in places:
            shard = shard_of(place.param)
            assert shard is not None and place.local_range == (shard.start, shard.stop), place.name
            assert len(place.ranges) == 3
            assert place.ranges[0].start == 0 and place.ranges[-1].stop == shard.numel, place.name
            assert all(before.stop == after.start for before, after in pairwise(place.ranges)), place.name
