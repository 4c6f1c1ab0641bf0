"""contract.py: ranks that have numbered different things before agree on the next number, and never repeat one."""

from __future__ import annotations

import torch.distributed as dist

from scale_core.comm.group import group_of
from scale_core.consistency.contract import Contract, next_number
from scale_core.testing import run_ranks


def number_alone_and_together() -> list[int]:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mine, ours = Contract(group_of(alone)), Contract(group_of(None))
    numbers = [next_number("a thing", mine) for _ in range(3 * dist.get_rank())]
    return [*numbers, next_number("a thing", ours), next_number("a thing", ours), next_number("a thing", mine)]


def test_the_next_number_is_new_to_all_ranks_and_the_same_on_them() -> None:
    assert run_ranks(number_alone_and_together, 2) == [[3, 4, 5], [0, 1, 2, 3, 4, 5]]
