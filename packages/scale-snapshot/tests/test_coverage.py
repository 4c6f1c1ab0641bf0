import itertools
import math
import random
import time

import pytest
import torch

from scale_core.sharded_tensor.chunks import Chunk
from scale_snapshot.format.coverage import check_coverage, slices_of


def covers(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    try:
        check_coverage("a", shape, chunks)
    except ValueError:
        return False
    return True


def covers_by_counting(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    count = torch.zeros(shape)
    for chunk in chunks:
        count[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    return bool((count == 1).all())


def test_the_proof_agrees_with_counting_on_random_chunks() -> None:
    drawn, seen = random.Random(0), set()
    for _ in range(3000):
        shape = tuple(drawn.randint(1, 3) for _ in range(drawn.randint(1, 3)))
        chunks = []
        for _ in range(drawn.randint(1, 4)):
            offsets = tuple(drawn.randrange(n) for n in shape)
            chunks.append(Chunk(offsets, tuple(drawn.randint(0, n - o) for n, o in zip(shape, offsets, strict=True))))
        expected = covers_by_counting(shape, chunks)
        assert covers(shape, chunks) == expected, (shape, chunks)
        seen.add(expected)
    assert seen == {True, False}


def test_a_scalar_has_one_chunk_and_an_empty_tensor_any_number() -> None:
    scalar, empty = Chunk((), ()), Chunk((0, 0), (0, 4))
    assert covers((), [scalar])
    assert not covers((), []) and not covers((), [scalar, scalar])
    assert covers((0, 4), []) and covers((0, 4), [empty, empty])


def test_equal_volume_is_not_enough() -> None:
    twice = [Chunk((0,), (2,)), Chunk((0,), (2,))]
    with pytest.raises(ValueError, match=r"^a: 4 elements in the chunks of a tensor of 4; the chunk \[0:2\] and the "):
        check_coverage("a", (4,), twice)


def test_what_is_missing_is_said_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"a: 3 elements in the chunks of a tensor of 4; some of them are in none"):
        check_coverage("a", (4,), [Chunk((0,), (3,))])


@pytest.mark.parametrize("chunk", [Chunk((3,), (2,)), Chunk((-1,), (5,)), Chunk((0, 0), (4, 1)), Chunk((2,), (-1,))])
def test_a_chunk_outside_of_the_tensor_is_refused(chunk: Chunk) -> None:
    assert not covers((4,), [chunk])


def test_many_chunks_are_proved_in_linear_time() -> None:
    side = 200  # 40,000 chunks; compared pair by pair this would be 800 million comparisons.
    chunks = [Chunk((5 * i, 7 * j), (5, 7)) for i, j in itertools.product(range(side), repeat=2)]
    random.Random(0).shuffle(chunks)
    began = time.process_time()
    check_coverage("a", (5 * side, 7 * side), chunks)
    assert time.process_time() - began < 20
    chunks[17] = chunks[18]
    assert math.prod((5 * side, 7 * side)) == sum(math.prod(chunk.sizes) for chunk in chunks)
    assert not covers((5 * side, 7 * side), chunks)


def test_a_chunk_is_told_as_slices() -> None:
    assert slices_of(Chunk((2, 0), (2, 8))) == "2:4, 0:8"
