"""chunks.py: where the pieces of a sequence stand, and in which order they are multiplied."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scale_core.comm.group import Group
from scale_tp.async_tp.chunks import (
    ChunkRange,
    SequenceChunks,
    all_gather_chunks,
    chunk_ranges,
    matmul_into,
    product_dtype,
    reduce_scatter_chunks,
    to_rows,
)


def test_pieces_of_all_rounds_are_the_whole_sequence_once() -> None:
    for sizes, pieces in itertools.product([(5, 2), (3, 3, 2), (1, 0), (4,)], [1, 2, 3, 9]):
        rounds = [chunk_ranges(sizes, pieces, turn) for turn in range(pieces)]
        for rank, size in enumerate(sizes):
            first = sum(sizes[:rank])
            reached = [place[rank].start for place in rounds] + [first + size]
            assert reached[0] == first
            assert [place[rank].length for place in rounds] == [b - a for a, b in itertools.pairwise(reached)]


def test_a_cut_knows_its_part_and_the_shapes_along_its_dimension() -> None:
    cut = SequenceChunks(Group(1, 3, None, "fake", (0, 1, 2)), 1, (3, 2, 2), 2)
    assert cut.own == ChunkRange(3, 2)
    assert cut.shape((4, 2, 6), 7) == (4, 7, 6) and cut.shape((4, 2, 6), 7, 5) == (4, 7, 5)
    whole = torch.arange(14).view(1, 7, 2)
    assert cut.at(whole, cut.own).tolist() == [[[6, 7], [8, 9]]]


def test_on_one_rank_all_is_one_piece_and_nothing_is_sent() -> None:
    cut, x, seen = SequenceChunks(Group(), 0, (5,), 3), torch.arange(10.0).view(5, 2), []

    def gathered(place: ChunkRange, piece: Tensor) -> None:
        seen.append((place, piece))

    all_gather_chunks(cut, x, gathered)
    assert [(tuple(place), piece.shape) for place, piece in seen] == [((0, 5), (5, 2))]

    def summand(place: ChunkRange, out: Tensor) -> None:
        out.copy_(x[place.start : place.start + place.length] * 2)

    assert torch.equal(reduce_scatter_chunks(cut, x[:0], summand), x * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_into_a_part_of_a_tensor_is_a_linear_layer(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    bias = torch.randn(7, dtype=dtype) if has_bias else None
    expected = F.linear(x, weight, bias)
    for whole, place in (
        (torch.zeros(2, 5, 7, dtype=dtype), slice(None)),
        (torch.zeros(2, 9, 7, dtype=dtype), slice(1, 6)),
    ):
        matmul_into(to_rows(x), weight.mT, bias, whole[:, place])
        assert torch.equal(whole[:, place], expected)
        assert not whole[:, :0].any() and whole.count_nonzero() == expected.count_nonzero()


def test_without_features_the_rows_are_still_there() -> None:
    out = torch.ones(2, 3, 4)
    matmul_into(to_rows(torch.zeros(2, 3, 0)), torch.zeros(0, 4), None, out)
    assert not out.any() and to_rows(torch.zeros(2, 3, 0)).shape == (6, 0)


def test_what_is_multiplied_has_one_dtype_or_that_of_autocast() -> None:
    x, half = torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.bfloat16)
    assert product_dtype(x, [x]) == torch.float32
    with pytest.raises(ValueError, match=r"a weight of the input's dtype, torch.float32, got torch.bfloat16: call .to"):
        product_dtype(x, [half])
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(x, [half]) == torch.bfloat16
        assert product_dtype(x.double(), [x.double()]) == torch.float64  # Which autocast leaves as it is.
