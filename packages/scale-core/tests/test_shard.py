"""shard.py: what a tensor of `parameters()` is a piece of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.shard import (
    Axis,
    Placement,
    Shard,
    check_undivided,
    elements_of,
    full_shape,
    is_divided,
    on_first_shard,
    register_stages,
    shard_of,
    title_of,
    unit_shard_of,
)
from scale_core.sharded_tensor.tensor import set_shard


def piece(name: str = "weight") -> Shard:
    return Shard(name, (4, 3), 6, 12, (Axis(Group(), Placement.SHARD),), "layer")


def test_an_unmarked_tensor_is_whole() -> None:
    tensor = torch.ones(2, 3)
    assert shard_of(tensor) is None
    assert full_shape(tensor) == torch.Size((2, 3))


def test_errors_call_a_parameter_by_its_name_or_by_its_shape() -> None:
    named, nameless = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    set_shard(named, piece())
    set_shard(nameless, piece(""))
    assert title_of(named) == "'weight'"
    assert title_of(nameless) == "a parameter of shape (4, 3)"
    assert title_of(torch.ones(2, 3)) == "a parameter of shape (2, 3)"


def test_a_marked_tensor_says_what_it_is_a_piece_of() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    set_shard(param, piece())
    shard = shard_of(param)
    assert shard == piece()
    assert shard.numel == 12
    assert full_shape(param) == torch.Size((4, 3))


def test_a_scalar_has_one_element() -> None:
    assert Shard("scale", (), 0, 1).numel == 1


def test_a_later_mark_replaces_an_earlier_one() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    set_shard(param, piece("before"))
    set_shard(param, piece("after"))
    assert shard_of(param) == piece("after")


class Pipeline:
    """A pipeline without parameters."""

    group = Group()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def counted_elsewhere(self) -> list[Tensor]:
        return []


@pytest.mark.parametrize("mark", [lambda: set_shard(torch.ones(2, 3), piece()), lambda: register_stages(Pipeline())])
def test_who_waits_for_the_first_shard_or_stage_is_called_once(mark: Callable[[], None]) -> None:
    called: list[str] = []
    on_first_shard(lambda: called.append("first"))
    mark()
    mark()
    assert called == ["first"]


def test_equal_tensors_are_told_apart() -> None:
    one, other = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    set_shard(one, piece())
    assert shard_of(other) is None


def test_a_record_stands_on_the_parameter_and_keeps_no_tensor() -> None:
    param = nn.Parameter(torch.ones(6))
    set_shard(param, piece())
    assert list(vars(param).values()) == [piece()]
    watch = weakref.ref(param)
    del param
    gc.collect()
    assert watch() is None


def test_a_mark_survives_what_replaces_the_values() -> None:
    param = nn.Parameter(torch.ones(6))
    set_shard(param, piece())
    param.data = torch.zeros(6)
    param.requires_grad_(False)
    assert shard_of(param) == piece()


AXES = (Axis(Group(0, 2, ranks=(0, 1)), Placement.SHARD),)
WHOLE = torch.arange(12).view(4, 3)


def test_indices_that_are_one_range_of_elements_are_said_to_be() -> None:
    rows = Shard.of_ranges("weight", (4, 3), (((1, 3),), ((0, 3),)), AXES)
    assert rows == Shard("weight", (4, 3), 3, 9, AXES, gathered=False)
    assert elements_of(WHOLE, rows.start, rows.stop, rows.ranges).tolist() == list(range(3, 9))


def test_columns_and_groups_of_rows_are_said_by_their_indices() -> None:
    columns = Shard.of_ranges("weight", (4, 3), (((0, 4),), ((1, 3),)), AXES)
    assert (columns.start, columns.stop) == (0, 8)
    assert elements_of(WHOLE, 0, 8, columns.ranges).tolist() == WHOLE[:, 1:].reshape(-1).tolist()
    groups = Shard.of_ranges("weight", (4, 3), (((0, 1), (2, 3)), ((0, 3),)), AXES)
    assert elements_of(WHOLE, groups.start, groups.stop, groups.ranges).tolist() == [0, 1, 2, 6, 7, 8]


def test_a_piece_of_a_piece_counts_from_where_that_begins() -> None:
    other = (Axis(Group(1, 2, ranks=(1, 3)), Placement.SHARD),)
    rows = Shard.of_ranges("", (4, 3), (((1, 3),), ((0, 3),)), AXES, counted=False).cut("weight", 2, 5, other, "layer")
    assert rows == Shard("weight", (4, 3), 5, 8, other + AXES, "layer", counted=False)
    columns = Shard.of_ranges("", (4, 3), (((0, 4),), ((1, 3),)), AXES).cut("weight", 3, 8, other)
    assert elements_of(WHOLE, columns.start, columns.stop, columns.ranges).tolist() == [5, 7, 8, 10, 11]


def test_what_a_module_computes_with_is_no_shard_of_a_unit() -> None:
    of_layer, of_unit, plain = (nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    set_shard(of_layer, Shard.of_ranges("weight", (4, 3), (((1, 3),), ((0, 3),)), AXES))
    set_shard(of_unit, Shard("weight", (4, 3), 0, 6, AXES))
    assert unit_shard_of(of_layer) is None
    assert unit_shard_of(of_unit) == shard_of(of_unit)
    assert unit_shard_of(plain) is None
    assert [is_divided(param) for param in (of_layer, of_unit, plain)] == [True, True, False]
    set_shard(of_layer, Shard("weight", (2, 3), 0, 6, (Axis(AXES[0].group, Placement.REPLICATE),)))
    assert not is_divided(of_layer)


def test_ranks_that_hold_parts_are_not_taken_for_replicas() -> None:
    part, alike, piece_of_unit, plain = (nn.Parameter(torch.ones(2, 3)) for _ in range(4))
    layer = Group(0, 2, None, "fake", (0, 1))
    set_shard(part, Shard.of_ranges("", (4, 3), (((0, 2),), ((0, 3),)), (Axis(layer, Placement.SHARD),)))
    set_shard(alike, Shard("", (2, 3), 0, 6, (Axis(layer, Placement.REPLICATE),), gathered=False))
    set_shard(piece_of_unit, Shard("", (4, 3), 0, 6, (Axis(layer, Placement.SHARD),)))
    named = [("plain", plain), ("alike", alike), ("piece", piece_of_unit), ("part", part)]
    for ranks in ((0,), (0, 2), (0, 4, 8)):
        check_undivided(named, Group(0, len(ranks), None, "fake", ranks), "Wrapper")
    for ranks in ((0, 1), (0, 1, 2, 3)):
        with pytest.raises(
            ValueError,
            match=r"^Wrapper: 'part' is a shard \[2, 3\] of a parameter \[4, 3\] that its layer divides between the "
            r"ranks \[0, 1\], and Wrapper was given .* as ranks that hold the same: give it those along the data axis",
        ):
            check_undivided(named, Group(0, len(ranks), None, "fake", ranks), "Wrapper")
