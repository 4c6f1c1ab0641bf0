import random

import pytest

from scale_snapshot.format.checksums import BlockChecksums, checksum, num_blocks, ranges_of


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 30, 99])
def test_checksums_of_blocks_do_not_depend_on_the_pieces(length: int) -> None:
    drawn = random.Random(length)
    data = drawn.randbytes(length)
    expected = [checksum(data[begin : begin + 10]) for begin in range(0, length, 10)]
    for _ in range(20):
        hashed, position = BlockChecksums(10), 0
        while position < length:
            piece = drawn.randint(1, 35)
            hashed.update(memoryview(data)[position : position + piece])
            position += piece
        assert hashed.digests() == expected
    assert num_blocks(length, 10) == len(expected)


def test_a_checksum_is_that_of_its_parts_in_order() -> None:
    assert checksum(b"ab", b"", memoryview(b"c")) == checksum(b"abc") != checksum(b"acb")
    assert len(checksum()) == 32


def test_numbers_are_told_as_ranges() -> None:
    assert ranges_of([]) == []
    assert ranges_of([3]) == [(3, 4)]
    assert ranges_of([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
