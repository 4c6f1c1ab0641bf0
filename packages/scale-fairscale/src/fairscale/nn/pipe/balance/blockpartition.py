"""Block partition: neighboring costs in blocks, so that the largest sum is minimal."""

from __future__ import annotations

from collections.abc import Sequence

from scale_pipe.partition.block_partition import block_partition

__all__ = ["solve"]


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Cuts costs into blocks of neighbors.

    Args:
        sequence: Costs, not negative.
        partitions: The number of blocks.

    Returns:
        The costs of each block.

    Raises:
        ValueError: `partitions` is not positive, or there are fewer costs.
    """
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer, but is {partitions}")
    if len(sequence) < partitions:
        raise ValueError(f"sequence is shorter than intended partitions: {len(sequence)} costs for {partitions} blocks")
    blocks, remainder = [], list(sequence)
    for size in block_partition(remainder, partitions):
        blocks.append(remainder[:size])
        remainder = remainder[size:]
    return blocks
