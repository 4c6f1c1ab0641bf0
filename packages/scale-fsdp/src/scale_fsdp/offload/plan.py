"""Which elements have their optimizer state on the host; integers only.

The last parameters come first: their gradients are the first to be there in a backward pass, and their new values the
last to be needed in the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence


def host_counts(sizes: Sequence[int], wanted: int, multiples: Sequence[int]) -> list[int]:
    """Returns how many of each parameter's first elements go to the host.

    At most one parameter is cut. The sum is `wanted`, up to half of that parameter's `multiple`; where parameters
    can't be cut, it is near to `wanted`, as whole ones allow.

        >>> host_counts([100, 100, 100], wanted=130, multiples=[1, 1, 1])
        [0, 30, 100]
        >>> host_counts([100, 100, 100], wanted=130, multiples=[64, 64, 64])
        [0, 0, 100]
        >>> host_counts([100, 100, 100], wanted=170, multiples=[0, 0, 0])
        [0, 100, 100]

    Args:
        sizes: Elements of each parameter.
        wanted: Elements on the host.
        multiples: Of what number of elements a cut must be a multiple, for each parameter; 0: it can't be cut.
    """
    counts = [0] * len(sizes)
    left = wanted
    for index in reversed(range(len(sizes))):
        size, multiple = sizes[index], multiples[index]
        if size <= left:
            counts[index] = size
        elif multiple:
            counts[index] = min(size, (left + multiple // 2) // multiple * multiple)
            break
        elif left > 0 and size < 2 * left:
            counts[index] = size  # Nearer to what is wanted with it than without.
            break
        left -= counts[index]
    return counts


def ranges(numel: int, most: int) -> list[tuple[int, int]]:
    """Returns `[0, numel)` in consecutive ranges of at most `most` elements; one, if it is empty.

    >>> ranges(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(start, min(start + most, numel)) for start in range(0, max(numel, 1), most)]
