"""Numbers and tensors cut by hand, by the names that FairScale gives it.

The layers of this package cut by `split_sizes`, where nothing needs to divide. These are for code beside them.
"""

from __future__ import annotations

import torch

from scale_tp.split_sizes import Split, check_size


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuses numbers that leave a remainder.

    Raises:
        ValueError: They do.
    """
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """Returns the quotient of numbers that leave no remainder.

    Raises:
        ValueError: They leave one.

    Example:
        >>> divide_and_check_no_remainder(6, 3)
        2
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns equal parts of a tensor along its last dimension.

    Args:
        tensor: [..., features].
        num_partitions: How many parts.
        contiguous_split_chunks: Whether each part gets memory of its own; otherwise they are views.

    Returns:
        [..., features / num_partitions] each.

    Raises:
        ValueError: The features don't divide.
    """
    parts = tensor.split(divide_and_check_no_remainder(tensor.shape[-1], num_partitions), -1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class VocabUtility:
    """Which words a rank has of a vocabulary: from the first to one past the last."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The words of a rank where each has as many.

        Example:
            >>> VocabUtility.vocab_range_from_per_partition_vocab_size(5, 1, 2)
            (5, 10)
        """
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """The words of a rank of `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`; they need not divide.

        Raises:
            TypeError: A number is no integer.
            ValueError: There is no such rank.

        Example:
            >>> VocabUtility.vocab_range_from_global_vocab_size(9, 1, 2)
            (5, 9)
        """
        check_size("rank", rank, 0)
        check_size("world_size", world_size, rank + 1)
        ((start, stop),) = Split.even(global_vocab_size, world_size).ranges[rank]
        return start, stop
