"""The proof that chunks are a tensor: each of its elements in exactly one of them."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Sequence

from scale_core.sharded_tensor.chunks import Chunk

_PRIME = (1 << 61) - 1
_COMPARED = 1000  # chunks among which an overlap is looked for by name, once it is known that there is one


def check_coverage(what: str, shape: Sequence[int], chunks: Sequence[Chunk]) -> None:
    """Proves that the chunks cover a tensor of `shape`, each element exactly once; a ValueError names the mistake.

    Each coordinate of a dimension gets a random number `r(x)` of the field of a large prime. The product of
    `r(end) - r(begin)` over the dimensions is a polynomial in them, linear in each. Summed over the chunks it is the
    polynomial of the full tensor if and only if every element is in one chunk. If some element is not, the sums are
    equal for fewer than one choice in 2^55 (Schwartz, 1980). The time is linear in the number of chunks.
    """
    everything = Chunk((0,) * len(shape), tuple(shape))
    if len(chunks) == 1 and chunks[0] == everything:
        return
    for chunk in chunks:
        if not (len(chunk.offsets) == len(chunk.sizes) == len(shape)):
            raise ValueError(f"{what}: a chunk of {len(chunk.sizes)} dimensions in a tensor of shape {tuple(shape)}")
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"{what}: the chunk [{slices_of(chunk)}] lies outside of the shape {tuple(shape)}")
    numbers: list[defaultdict[int, int]] = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape]
    if sum(_product(numbers, chunk) for chunk in chunks) % _PRIME != _product(numbers, everything):
        volume, expected = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
        raise ValueError(f"{what}: {volume} elements in the chunks of a tensor of {expected}{_first_overlap(chunks)}")


def _product(numbers: Sequence[defaultdict[int, int]], chunk: Chunk) -> int:
    result = 1
    for number, offset, size in zip(numbers, chunk.offsets, chunk.sizes, strict=True):
        result = result * (number[offset + size] - number[offset]) % _PRIME
    return result


def _first_overlap(chunks: Sequence[Chunk]) -> str:
    for one, other in itertools.combinations(chunks[:_COMPARED], 2):
        sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(a < b + n and b < a + m for a, m, b, n in sides) and math.prod(one.sizes) * math.prod(other.sizes):
            return f"; the chunk [{slices_of(one)}] and the chunk [{slices_of(other)}] overlap"
    return "; some of them are in none"


def slices_of(chunk: Chunk) -> str:
    """A chunk as Python slices: `2:4, 0:8`."""
    return ", ".join(f"{offset}:{offset + size}" for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
