"""Dropout on a tensor that is divided between ranks: it drops the elements that the full tensor would drop.

The mask of the full tensor is drawn on each rank, block by block, and this rank's shard of it is kept. So the result
is the same as on one process, and a recomputation needs no more than torch's own random state. The cost is drawing all
elements on each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, GroupLike
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.sequence_lengths import shard_lengths
from scale_tp.split import Split
from scale_tp.weight_init import full_noise


class ParallelDropout(nn.Dropout):
    """`torch.nn.Dropout` for a shard of a tensor: it drops the elements that the full tensor would drop.

    Args:
        p: The probability of an element to be dropped.
        inplace: Write to the input.
        dim: The dimension that is divided: by default the sequence in [batch, sequence, features].
        split: How it is divided; None is as the sequence was, by a region or a layer.
        process_group: The ranks; None is the model axis, or only this process.

    Examples:
        >>> import torch
        >>> from scale_tp import ParallelDropout
        >>> dropout = ParallelDropout(0.5, dim=-1)
        >>> dropout(torch.ones(2, 8)).shape
        torch.Size([2, 8])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    @checked_arguments
    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        dim: int = -2,
        split: Split | None = None,
        process_group: GroupLike = None,
    ) -> None:
        super().__init__(p, inplace)
        self.dim, self.split, self.group = dim, split, tensor_parallel_group(process_group)

    def forward(self, input: Tensor) -> Tensor:
        """Returns this rank's part, of the same shape, with elements dropped in training as on the full tensor."""
        if self.group.size == 1 or not self.training or self.p == 0.0:
            return super().forward(input)
        split = self.split or Split.of_sizes(shard_lengths(self.group, input, self.dim))
        mask = dropout_mask(input, self.p, self.dim, split, self.group)
        return input.mul_(mask) if self.inplace else input * mask


def dropout_mask(part: Tensor, p: float, dim: int, split: Split, group: Group) -> Tensor:
    """Returns the factors of this rank's shard [..., indices, ...], 0 or 1 / (1 - p), as torch's dropout draws them."""
    dim = dim % part.dim()
    shape = (*part.shape[:dim], split.total, *part.shape[dim + 1 :])
    if part.is_cuda:  # There dropout is one kernel, which draws in an order of its own.
        full = torch.nn.functional.dropout(torch.ones(shape, dtype=part.dtype, device=part.device), p)
        return split.take(full, group.rank, dim)
    if p == 1.0:
        return torch.zeros_like(part, requires_grad=False)
    return full_noise(part, shape, dim, split, group.rank, lambda noise: noise.bernoulli_(1 - p)).div_(1 - p)
