"""What a plan knows a model by: which modules count as more blocks of the same kind, and which don't."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from torch import nn

from scale_checkpoint.planner.model_signature import BlockShape, check_same_blocks, left_out, shape_of


class Known(NamedTuple):
    blocks: dict[str, BlockShape]
    left_out: tuple[str, ...] = ()


def part() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def test_what_is_inside_or_around_a_block_is_not_beside_it() -> None:
    inner = nn.Sequential(part(), nn.Sequential(part(), nn.Linear(2, 2)))
    model = nn.Sequential(inner, part())
    blocks = {"0.0": inner[0], "0.1": inner[1]}
    assert left_out(model, blocks) == ("1",), "those of whole other branches, by their outermost name"
    assert left_out(model, {"0": inner, "1": model[1]}) == ()
    check_same_blocks(model, Known({name: shape_of(block) for name, block in blocks.items()}, ("1",)))
    with pytest.raises(ValueError, match="'1' is a Sequential here, as its blocks are, but the plan has no such block"):
        check_same_blocks(model, Known({name: shape_of(block) for name, block in blocks.items()}))


def test_one_block_under_two_names_is_one() -> None:
    shared = part()
    model = nn.ModuleDict({"first": shared, "again": shared})
    assert left_out(model, {"first": shared}) == ()
    check_same_blocks(model, Known({"first": shape_of(shared)}))
