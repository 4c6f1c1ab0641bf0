"""parameters.py: which tensors share memory, and which attributes go with a parameter."""

import pytest
import torch
from torch import Tensor, nn

from scale_core.parameters import MemoryRange, check_memory_unshared, copy_attributes


def named(*tensors: Tensor) -> list[tuple[str, Tensor]]:
    return [(f"layers.{number}.weight", tensor) for number, tensor in enumerate(tensors)]


def matrix() -> Tensor:
    return torch.zeros(6, 4)


def test_one_parameter_in_two_places_is_fine() -> None:
    weight = nn.Parameter(matrix())
    check_memory_unshared("shard", named(weight, weight))


def test_neighbors_in_one_storage_are_fine() -> None:
    packed = matrix()
    check_memory_unshared("shard", named(nn.Parameter(packed[:2]), nn.Parameter(packed[2:])))


def test_columns_of_one_matrix_are_fine() -> None:
    packed = matrix()
    check_memory_unshared("shard", named(nn.Parameter(packed[:, :2]), nn.Parameter(packed[:, 2:])))
    check_memory_unshared("shard", named(nn.Parameter(packed[:, ::2]), nn.Parameter(packed.t()[1::2])))


def test_what_has_no_memory_is_fine() -> None:
    meta, empty = torch.zeros(2, device="meta"), torch.zeros(0, 3)
    check_memory_unshared("shard", named(*(nn.Parameter(each) for each in (meta, meta.detach(), empty, empty[:]))))
    released = nn.Parameter(torch.zeros(3))
    other = nn.Parameter(released.data)
    released.untyped_storage().resize_(0)
    check_memory_unshared("shard", named(released, other))


def test_an_alias_is_refused_with_the_line_that_ties_it() -> None:
    weight = nn.Parameter(matrix())
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' share one memory") as raised:
        check_memory_unshared("shard", [("embed.weight", weight), ("head.weight", nn.Parameter(weight.data))])
    assert "Make them one parameter, head.weight = embed.weight, before shard(...)" in str(raised.value)


@pytest.mark.parametrize("part", [lambda w: w[1:3], lambda w: w.t(), lambda w: w[:, 1:], lambda w: w.view(torch.int16)])
def test_overlapping_views_are_refused_with_the_way_out(part) -> None:
    weight = nn.Parameter(matrix().int(), requires_grad=False)
    view = nn.Parameter(part(weight.data), requires_grad=False)
    with pytest.raises(ValueError, match=r"'layers.0.weight' and 'layers.1.weight' overlap in memory") as raised:
        check_memory_unshared("shard", named(weight, view))
    assert "model.layers" not in str(raised.value)
    assert "layers[1].weight = nn.Parameter(layers[1].weight.detach().clone())" in str(raised.value)


def test_columns_that_overlap_are_refused() -> None:
    packed = matrix()
    with pytest.raises(ValueError, match="overlap in memory"):
        check_memory_unshared("shard", named(nn.Parameter(packed[:, :3]), nn.Parameter(packed[:, 2:])))


def test_tensors_that_stay_may_share_memory_among_themselves() -> None:
    table = matrix()
    check_memory_unshared("shard", named(nn.Parameter(matrix())), [("cos", table), ("sin", table[1:])])
    with pytest.raises(ValueError, match=r"'layers.0.weight' and 'shadow' share"):
        check_memory_unshared("shard", named(nn.Parameter(table)), [("shadow", table)])


def test_memory_is_known_after_its_parameter_is_gone() -> None:
    weight = nn.Parameter(matrix())
    moved = MemoryRange.of("embed.weight", weight)
    alias = nn.Parameter(weight.data)
    weight.data = matrix()
    with pytest.raises(ValueError, match=r"'embed.weight' and 'layers.0.weight' share"):
        check_memory_unshared("shard", named(alias), moved=moved)
    del alias
    check_memory_unshared("shard", named(nn.Parameter(matrix())), moved=moved)  # Even at the same address.


def test_attributes_go_with_a_parameter_but_for_its_record() -> None:
    param, other = nn.Parameter(matrix()), nn.Parameter(matrix())
    vars(param).update(_no_weight_decay=True, _shard_spec="of the old one", infshape=3, own=1)
    vars(other).update(infshape=4)
    copy_attributes(param, other, leave_out=["own"])
    assert vars(other) == {"_no_weight_decay": True, "infshape": 4}
