"""packing.py: pieces side by side, no atom cut, and no more padding than the stated bound, for any sizes."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from scale_core.flat.packing import ALIGN, ALIGN_FROM, Piece, pack

PIECES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=8)
MATRICES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300), st.booleans()), min_size=1, max_size=12)
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


def in_order(pieces: list[tuple[int, int]]) -> list[Piece]:
    """Pieces whose atoms are no longer than they are, the longest atom first."""
    capped = [Piece(numel, max(1, min(numel, atom))) for numel, atom in pieces]
    return sorted(capped, key=lambda piece: (-piece.atom, -piece.numel))


def stated_bound(pieces: list[Piece], world_size: int, align: int = ALIGN) -> int:
    """The formula of the module's docstring, in its letters."""
    W, N = world_size, sum(piece.numel for piece in pieces)
    A = max((piece.atom for piece in pieces), default=1)
    P = max((piece.numel for piece in pieces if piece.numel <= piece.atom), default=0)
    M = max((piece.numel for piece in pieces), default=0)
    g = align if ALIGN_FROM * W * align <= N * ALIGN else 1
    L = math.lcm(g, *(piece.atom for piece in pieces if piece.numel > max(piece.atom, math.ceil(N / W))))
    if W == 1:
        return 0
    return min(max((W - 1) * A, W * P - N) + W * (L - 1), max((W - 1) * A, W * M - N) + W * (g - 1))


def check(pieces: list[Piece], world_size: int, alignment: int = 1) -> None:
    size, offsets = pack(pieces, world_size, alignment)
    assert all(place % alignment == 0 for place in (size, *offsets))
    places = sorted((offset, offset + piece.numel) for offset, piece in zip(offsets, pieces, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert all(0 <= start <= stop <= size * world_size for start, stop in places)
    for offset, piece in zip(offsets, pieces, strict=True):
        cuts = [rank * size - offset for rank in range(1, world_size)]
        assert all(cut % piece.atom == 0 for cut in cuts if 0 < cut < piece.numel)
    padding = size * world_size - sum(piece.numel for piece in pieces)
    units = [in_units(piece, alignment) for piece in pieces]
    rounding = alignment * sum(unit.numel for unit in units) - sum(piece.numel for piece in pieces)
    assert 0 <= padding <= alignment * stated_bound(units, world_size, max(1, ALIGN // alignment)) + rounding


def in_units(piece: Piece, k: int) -> Piece:
    """The last paragraph of the module's docstring."""
    numel = math.ceil(piece.numel / k)
    return Piece(numel, max(1, min(numel, math.lcm(piece.atom, k) // k if piece.divisible else numel)))


@PROPERTY
@given(PIECES, st.integers(1, 9), st.sampled_from([2, 4, 8, 16]))
def test_aligned_pieces_start_at_multiples_within_the_bound(
    pieces: list[tuple[int, int]], world_size: int, alignment: int
) -> None:
    check(in_order(pieces), world_size, alignment)


def test_alignment_costs_nothing_where_all_lengths_are_multiples() -> None:
    pieces = [Piece(8 * 96, 96), Piece(8 * 32, 32), Piece(96, 1), Piece(32, 1)]
    assert pack(pieces, 4, 8) == pack(pieces, 4)


@PROPERTY
@given(PIECES, st.integers(1, 9))
def test_padding_stays_below_the_stated_bound_and_no_atom_is_cut(
    pieces: list[tuple[int, int]], world_size: int
) -> None:
    check(in_order(pieces), world_size)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MATRICES, st.integers(2, 70))
def test_the_bound_holds_for_unrelated_row_lengths(matrices: list[tuple[int, int, bool]], world_size: int) -> None:
    pieces = [(rows * length, rows * length if whole else length) for rows, length, whole in matrices]
    check(in_order(pieces), world_size)


def test_atoms_without_a_common_multiple_keep_shards_small() -> None:
    primes = [97, 89, 83, 79, 73, 71, 67, 61]
    pieces = [Piece(64 * prime, prime) for prime in primes]
    size, _ = pack(pieces, 8)
    assert 8 * size < 2 * sum(piece.numel for piece in pieces)


def test_a_piece_that_fits_into_a_gap_fills_it() -> None:
    assert pack([Piece(30, 6), Piece(6, 1), Piece(1, 1)], 2) == (19, [1, 31, 0])


def test_large_plans_have_aligned_shards_and_small_ones_do_not() -> None:
    assert pack([Piece(2 * ALIGN_FROM + 2, 1)], 2)[0] == ALIGN_FROM + ALIGN
    assert pack([Piece(102, 1)], 2)[0] == 51


def test_nothing_needs_no_shard() -> None:
    assert pack([], 3) == (0, [])
    assert pack([Piece(0, 1)], 3) == (0, [0])
