"""Two gradients of one batch, so that one worker which accumulates nothing knows how noisy they are.

The estimates are as good as those of two workers, and cost a second forward and backward pass of half the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, cast

from scale_core.nested import map_tensors, tensors_in

Batch = TypeVar("Batch")


def halves(batch: Batch) -> Iterator[Batch]:
    """Yields the first half of a batch and the second, for two backward passes in place of one.

        >>> import torch
        >>> [half.tolist() for half in halves(torch.arange(4))]
        [[0, 1], [2, 3]]

    Args:
        batch: Tensors, in whatever they stand; all have their samples along the first dimension.

    Raises:
        ValueError: The samples are no even number, or not the same for all tensors.
    """
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(batch)}
    size = next(iter(sizes), 0)
    if len(sizes) != 1 or size % 2 or not size:
        raise ValueError(
            f"expected tensors with one even number of samples, got {sorted(sizes)}: pass the tensors that have the "
            "samples of one batch, and drop the last sample of an odd one"
        )
    yield _part(batch, 0, size // 2)
    yield _part(batch, size // 2, size // 2)


def _part(batch: Batch, first: int, size: int) -> Batch:
    return cast(Batch, map_tensors(lambda tensor: tensor.narrow(0, first, size), batch))
