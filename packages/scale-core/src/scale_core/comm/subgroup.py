"""Subgroups of a group, created without the ranks outside of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from scale_core import compat
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, group_of


def subgroup_of(group: Group, ranks: Sequence[int]) -> Group:
    """Returns the group of some ranks (global numbers) of a group; all ranks of `group` call it together."""
    # torch names a group that only its members make by how many groups each of them is in so far: members that are in
    # different numbers would wait for each other in vain. So those in fewer first make up for it by groups of their
    # own.
    num_groups = len(compat.process_groups())
    counts = dict(zip(group.ranks, (row[0] for row in exchange([num_groups], group)), strict=True))
    if group.ranks[group.rank] not in ranks:
        return Group()
    for _ in range(max(counts[rank] for rank in ranks) - num_groups):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group_of(dist.new_group(list(ranks), use_local_synchronization=True))
