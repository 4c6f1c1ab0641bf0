"""chunks.py: where the pieces of a sequence stand, and in which order they are multiplied."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from scale_core.comm.group import Group
from scale_tp.async_tp.chunks import ChunkRange, SequenceChunks, all_gather_chunks, chunk_ranges, reduce_scatter_chunks


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
