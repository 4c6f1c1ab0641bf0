"""Comparisons of sharded tensors that the same ranks divide in different places."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_core.comm.group import group_of
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.testing import run_ranks

FULL = torch.arange(20.0).reshape(5, 4)


def piece_of(full: Tensor, name: str, cut: int) -> nn.Parameter:
    """The first `cut` elements on rank 0, the others on rank 1."""
    group = group_of()
    start, stop = (0, cut) if group.rank == 0 else (cut, full.numel())
    piece = nn.Parameter(full.reshape(-1)[start:stop].clone())
    set_shard(piece, Shard(name, tuple(full.shape), start, stop, (Axis(group, Placement.SHARD),)))
    return piece


def compared() -> list[bool]:
    first, other = piece_of(FULL, "first", 7), piece_of(FULL, "other", 12)
    empty = piece_of(FULL, "empty", 0)
    changed = piece_of(FULL.index_fill(0, torch.tensor(4), 0.0), "changed", 12)
    equal = [torch.equal(first, other), torch.equal(other, empty), torch.allclose(first, empty)]
    return [*equal, torch.equal(first, changed), torch.allclose(changed, empty)]


def test_equal_compares_tensors_that_are_cut_elsewhere() -> None:
    assert run_ranks(compared, 2) == [[True] * 3 + [False] * 2] * 2
