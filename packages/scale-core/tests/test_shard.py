"""shard.py: what a tensor of `parameters()` is a piece of."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from scale_core.group import Group
from scale_core.shard import Axis, Held, Shard, full_shape, mark, shard_of


def piece(name: str = "weight") -> Shard:
    return Shard(name, (4, 3), 6, 12, (Axis(Group(), Held.SHARD),), "layer")


def test_an_unmarked_tensor_is_whole() -> None:
    tensor = torch.ones(2, 3)
    assert shard_of(tensor) is None
    assert full_shape(tensor) == torch.Size((2, 3))


def test_a_marked_tensor_says_what_it_is_a_piece_of() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    mark(param, piece())
    shard = shard_of(param)
    assert shard == piece()
    assert shard.numel == 12
    assert full_shape(param) == torch.Size((4, 3))


def test_a_scalar_has_one_element() -> None:
    assert Shard("scale", (), 0, 1).numel == 1


def test_a_later_mark_replaces_an_earlier_one() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    mark(param, piece("before"))
    mark(param, piece("after"))
    assert shard_of(param) == piece("after")


def test_equal_tensors_are_told_apart() -> None:
    one, other = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    mark(one, piece())
    assert shard_of(other) is None


def test_a_mark_is_no_attribute_and_keeps_no_tensor_alive() -> None:
    param = nn.Parameter(torch.ones(6))
    mark(param, piece())
    assert vars(param) == {}
    watch = weakref.ref(param)
    del param
    gc.collect()
    assert watch() is None


def test_a_mark_survives_what_replaces_the_values() -> None:
    param = nn.Parameter(torch.ones(6))
    mark(param, piece())
    param.data = torch.zeros(6)
    param.requires_grad_(False)
    assert shard_of(param) == piece()
