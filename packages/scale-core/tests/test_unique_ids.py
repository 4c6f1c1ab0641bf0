"""flight_recorder.py: objects of a group have the same number on all its ranks, and none has another's."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from rank_values import by_rank

from scale_core.comm.group import group_of
from scale_core.consistency.flight_recorder import next_unique_id


@pytest.mark.ranks(2)
def test_the_next_number_is_new_and_the_same_on_all_ranks() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mine, ours = group_of(alone), group_of(None)
    numbers = [next_unique_id("a thing", mine) for _ in range(3 * dist.get_rank())]
    together = [next_unique_id("a thing", ours), next_unique_id("a thing", ours), next_unique_id("another thing", ours)]
    assert by_rank([*numbers, *together, next_unique_id("a thing", mine)]) == [[0, 1, 0, 0], [0, 1, 2, 0, 1, 0, 3]]
