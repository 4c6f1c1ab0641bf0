"""The blocks of a model: found by repetition, named by the model or by its user, and recognized again."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from planned_models import AttentionBlock, ConvBlock, ResNet, Transformer, UNet
from torch import nn

from scale_checkpoint.planner.blocks import (
    BlockSignature,
    block_signature,
    check_same_blocks,
    excluded_modules,
    find_blocks,
)


class NoSplit(nn.Module):
    _no_split_modules = ("AttentionBlock",)

    def __init__(self) -> None:
        super().__init__()
        self.only = AttentionBlock(8, 2)
        self.others = nn.ModuleList(ConvBlock(4, 4) for _ in range(2))


def test_items_that_repeat_are_blocks() -> None:
    assert list(find_blocks(Transformer(num_blocks=3))) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(find_blocks(ResNet())) == ["stage1.0", "stage1.1", "stage2.0", "stage2.1"]


def test_a_module_of_a_blocks_class_outside_a_list_is_a_block() -> None:
    assert list(find_blocks(UNet())) == ["down.0", "down.1", "middle", "up.0", "up.1"]


def test_sequences_of_sequences_are_looked_into() -> None:
    model = nn.Sequential(nn.Linear(2, 2), ResNet().stage1, ResNet().stage1)
    assert list(find_blocks(model)) == ["1.0", "1.1", "2.0", "2.1"]


def test_repeated_sequences_without_blocks_are_blocks() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)), nn.Linear(2, 2))
    assert list(find_blocks(model)) == ["0", "1"]


def test_a_model_tells_its_blocks_itself() -> None:
    assert list(find_blocks(NoSplit())) == ["only"]


def test_named_blocks_come_in_the_order_of_the_model() -> None:
    model = Transformer(num_blocks=2)
    assert list(find_blocks(model, ["head", "blocks.0"])) == ["blocks.0", "head"]


def test_names_that_are_none_list_near_ones() -> None:
    with pytest.raises(ValueError, match=r"got 'block\.0'; did you mean 'blocks\.0'"):
        find_blocks(Transformer(num_blocks=2), ["block.0"])


def test_a_block_in_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.0\.norm' is inside 'blocks\.0'"):
        find_blocks(Transformer(), ["blocks.0", "blocks.0.norm"])


def test_a_model_without_repetition_asks_for_names() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    with pytest.raises(ValueError, match=r"name what is to be planned: blocks=\['body'\]"):
        find_blocks(model)


class Twice(nn.Module):
    """A block that stands in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(ConvBlock(4, 4) for _ in range(2))
        self.second = nn.ModuleList([self.first[0], ConvBlock(4, 4)])


def test_a_block_that_stands_in_two_places_is_one() -> None:
    model = Twice()
    assert list(find_blocks(model)) == ["first.0", "first.1", "second.1"]
    assert list(find_blocks(model, ["second.0"])) == ["second.0"]
    with pytest.raises(ValueError, match=r"but '(first|second)\.0' and '(first|second)\.0' are one module; name one"):
        find_blocks(model, ["first.0", "second.0"])
    inside = nn.Sequential(model, nn.Sequential(model.first[0]))
    with pytest.raises(ValueError, match=r"but '1\.0' is inside '0'; name one of them"):
        find_blocks(inside, ["0", "1.0"])


class Known(NamedTuple):
    blocks: dict[str, BlockSignature]
    excluded: tuple[str, ...] = ()


def part() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def test_what_is_inside_or_around_a_block_is_not_beside_it() -> None:
    inner = nn.Sequential(part(), nn.Sequential(part(), nn.Linear(2, 2)))
    model = nn.Sequential(inner, part())
    blocks = {"0.0": inner[0], "0.1": inner[1]}
    assert excluded_modules(model, blocks) == ("1",), "those of whole other branches, by their outermost name"
    assert excluded_modules(model, {"0": inner, "1": model[1]}) == ()
    check_same_blocks(model, *Known({name: block_signature(block) for name, block in blocks.items()}, ("1",)))
    with pytest.raises(ValueError, match="'1' is a Sequential here, as its blocks are, but the plan has no such block"):
        check_same_blocks(model, *Known({name: block_signature(block) for name, block in blocks.items()}))


def test_one_block_under_two_names_is_one() -> None:
    shared = part()
    model = nn.ModuleDict({"first": shared, "again": shared})
    assert excluded_modules(model, {"first": shared}) == ()
    check_same_blocks(model, *Known({"first": block_signature(shared)}))
