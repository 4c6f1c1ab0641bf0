import copy
import io
import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from scale_core.sharded_tensor.chunks import Chunk, chunks_of
from scale_core.state.local_shard import LocalShard

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def elements(shape: tuple[int, ...], box: Chunk) -> list[int]:
    """The row-major numbers of a box's elements, in the box's own order."""
    part = torch.arange(math.prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        part = part.narrow(dim, offset, size)
    return part.reshape(-1).tolist()


def is_box(shape: tuple[int, ...], start: int, stop: int) -> bool:
    """Whether the range is a box, by looking at the smallest box around it."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    inside = (numbers >= start) & (numbers < stop)
    around = 1
    for dim in range(len(shape)):
        others = [other for other in range(len(shape)) if other != dim]
        touched = inside.any(dim=tuple(others)) if others else inside
        around *= int(touched.sum())
    return around == stop - start


def fewest(shape: tuple[int, ...], start: int, stop: int) -> int:
    @cache
    def best(begin: int) -> int:
        if begin == stop:
            return 0
        return 1 + min(best(end) for end in range(begin + 1, stop + 1) if is_box(shape, begin, end))

    return best(start)


@given(ranges())
def test_the_boxes_one_after_the_other_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    found = [number for box in chunks_of(shape, start, stop) for number in elements(shape, box)]
    assert found == list(range(start, stop))


@given(ranges())
def test_there_are_at_most_two_boxes_for_each_dimension_less_one(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(chunks_of(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (2, 1, 3), (1, 4, 1)])
def test_no_fewer_boxes_would_do(shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    for start in range(total + 1):
        for stop in range(start, total + 1):
            assert len(chunks_of(shape, start, stop)) == fewest(shape, start, stop), (start, stop)


def test_an_empty_range_has_no_box_and_a_whole_tensor_one() -> None:
    assert chunks_of((3, 4), 5, 5) == []
    assert chunks_of((3, 0), 0, 0) == []
    assert chunks_of((3, 4), 0, 12) == [Chunk((0, 0), (3, 4))]
    assert chunks_of((), 0, 1) == [Chunk((), ())]


def test_a_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"within the 12 elements of \(3, 4\), got \[5, 13\)"):
        chunks_of((3, 4), 5, 13)


@given(ranges())
def test_a_local_shard_s_pieces_are_views_of_its_tensor(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(math.prod(shape))
    shard = LocalShard(whole[start:stop].clone(), shape, start, stop)
    for box, piece in shard.chunks.items():
        assert piece.reshape(-1).tolist() == elements(shape, box)
        piece.add_(1)
    assert torch.equal(shard.tensor, whole[start:stop] + 1)


def test_a_shard_tells_torch_s_planner_each_of_its_boxes() -> None:
    shard = LocalShard(torch.arange(8), (4, 3), 2, 10)
    items = shard.__create_write_items__("w", shard)
    chunks = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == chunks_of((4, 3), 2, 10)
    assert all(first.offsets < second.offsets for first, second in pairwise(chunks))
    assert shard.__get_tensor_shard__(items[1].index).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert shard.size() == torch.Size((4, 3))


def test_full_tensors_and_full_ranges_may_have_any_strides() -> None:
    whole = torch.arange(12).view(4, 3)
    for shape, ranges in (((3, 4), ()), ((3, 8), (((0, 3),), ((1, 3), (5, 7))))):
        strided = whole.clone().t()
        shard = LocalShard(strided, shape, 0, 12, ranges)
        assert shard.tensor is strided
        for (offsets, sizes), piece in shard.chunks.items():
            first = offsets[1] if not ranges else {1: 0, 5: 2}[offsets[1]]
            assert torch.equal(piece, whole.t()[:, first : first + sizes[1]])
            piece.add_(1)
        assert torch.equal(strided, whole.t() + 1)
        shard.copy_(LocalShard(whole.t().contiguous(), shape, 0, 12, ranges))
        assert torch.equal(strided, whole.t())
        LocalShard(torch.zeros(12, dtype=torch.int64), shape, 0, 12, ranges).copy_(shard)
    with pytest.raises(ValueError, match="contiguous tensor of 12 elements"):
        LocalShard(whole.t(), (24,), 0, 12)


def test_a_box_that_is_not_held_is_an_error_with_the_name() -> None:
    with pytest.raises(ValueError, match=r"w: this rank holds \[2, 10\)"):
        LocalShard(torch.arange(8), (4, 3), 2, 10).__get_tensor_shard__(MetadataIndex("w", torch.Size((0, 0))))


def test_an_empty_tensor_is_still_announced() -> None:
    shard = LocalShard(torch.empty(0), (3, 0), 0, 0)
    (chunk,) = shard.__create_chunk_list__()
    assert tuple(chunk.sizes) == (3, 0)


def test_a_tensor_of_another_length_than_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"contiguous tensor of 8 elements for \[2, 10\), got shape \(7,\)"):
        LocalShard(torch.arange(7), (4, 3), 2, 10)


def shard() -> LocalShard:
    return LocalShard(torch.arange(2.0, 10.0), (4, 3), 2, 10)


def test_to_torch_a_shard_is_a_tensor_of_the_whole_shape() -> None:
    tensor = shard()
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((4, 3), torch.float32, torch.device("cpu"))
    assert repr(tensor).startswith("LocalShard([2, 10) of (4, 3), tensor([2., 3.,")


def test_a_shard_can_be_detached_copied_and_moved() -> None:
    tensor = shard()
    assert tensor.detach().tensor.is_set_to(tensor.tensor)
    for copied in (tensor.clone(), copy.deepcopy(tensor), tensor.to("cpu", copy=True)):
        assert isinstance(copied, LocalShard)
        assert (copied.start, copied.stop, tuple(copied.shape)) == (2, 10, (4, 3))
        assert torch.equal(copied.tensor, tensor.tensor) and not copied.tensor.is_set_to(tensor.tensor)
    assert tensor.to(torch.float64).tensor.dtype == tensor.to(torch.float64).dtype == torch.float64
    zeros = torch.zeros_like(tensor, device="cpu")
    for empty in (torch.empty_like(tensor), tensor.new_empty((4, 3)), zeros):
        assert isinstance(empty, LocalShard) and empty.tensor.shape == tensor.tensor.shape
    assert not zeros.tensor.any()


def test_a_shard_takes_its_elements_from_a_full_tensor_or_shard() -> None:
    tensor, whole = shard(), torch.arange(12.0).view(4, 3) * 10
    tensor.copy_(whole)
    assert tensor.tensor.tolist() == [float(10 * number) for number in range(2, 10)]
    tensor.copy_(shard())
    assert torch.equal(tensor.tensor, shard().tensor)
    with pytest.raises(ValueError, match=r"expected the elements \[2, 10\) to copy, got \[0, 8\)"):
        tensor.copy_(LocalShard(torch.ones(8), (4, 3), 0, 8))
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(4, 3\) to copy, got \(3, 4\)"):
        tensor.copy_(torch.ones(3, 4))


@pytest.mark.parametrize(
    "compute", [torch.sum, lambda tensor: tensor + 1, lambda tensor: torch.ones(4, 3).copy_(tensor)]
)
def test_what_would_need_all_elements_says_where_they_are(compute: Callable[[LocalShard], Any]) -> None:
    with pytest.raises(
        RuntimeError, match=r"got elements 2 to 10 of 12 of one: take shard.tensor .* or the full tensor"
    ):
        compute(shard())


def test_a_shard_alone_is_not_pickled() -> None:
    with pytest.raises(
        TypeError, match=r"torch.distributed.checkpoint.save or .*model.local_state_dict\(\), or full ones"
    ):
        torch.save({"w": shard()}, io.BytesIO())


INDICES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple), min_size=1, max_size=3)


@given(INDICES, INDICES, st.data())
def test_of_some_indices_the_boxes_hold_what_stands_there(rows: Any, columns: Any, data: st.DataObject) -> None:
    def apart(side: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Those of the ranges that meet none before them: of a dimension each index is taken once."""
        found = [r for n, r in enumerate(side) if all(r[1] <= o[0] or o[1] <= r[0] for o in side[:n])]
        return tuple(r for r in found if r[0] < r[1]) or ((0, 0),)

    held = (apart(rows), apart(columns))
    whole = torch.arange(36).view(6, 6)
    part = whole[[i for a, b in held[0] for i in range(a, b)]][:, [i for a, b in held[1] for i in range(a, b)]]
    start = data.draw(st.integers(0, part.numel()))
    stop = data.draw(st.integers(start, part.numel()))
    mine = part.reshape(-1)[start:stop].clone()
    tensor = LocalShard(mine, (6, 6), start, stop, held)
    found = [
        (box, piece) for box, piece in tensor.chunks.items() if elements((6, 6), box) == piece.reshape(-1).tolist()
    ]
    assert len(found) == len(tensor.chunks)
    assert sorted(number for _, piece in found for number in piece.reshape(-1).tolist()) == sorted(mine.tolist())
    for _, piece in found:
        piece.zero_()
    assert not mine.any(), "the pieces are views"
    tensor.copy_(whole)
    assert torch.equal(mine, part.reshape(-1)[start:stop])
    with pytest.raises(ValueError, match="to copy, got"):
        tensor.copy_(LocalShard(torch.zeros(1, dtype=torch.int64), (6, 6), 0, 1, (((5, 6),), ((5, 6),), ())[:2]))


def test_copies_keep_the_indices() -> None:
    held = (((0, 2),), ((1, 2), (3, 4)))
    tensor = LocalShard(torch.zeros(2, 2), (2, 5), 0, 4, held)
    for other in (tensor.clone(), copy.deepcopy(tensor), tensor.double(), torch.empty_like(tensor)):
        assert other.ranges == held
