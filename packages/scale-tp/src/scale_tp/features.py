"""All features out of the ranks' parts, and a part out of all, in the order of the layer that is not divided.

A split may give a rank several ranges, as of matrices that are stacked. Then the parts, one behind the other, are in
another order than the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scale_core.group import Group
from scale_tp.regions import gather_from_model_parallel_region, scatter_to_model_parallel_region
from scale_tp.split_sizes import Split


def gather_features(part: Tensor, group: Group, split: Split) -> Tensor:
    """Returns all features, in their order, of which each rank has those of a split.

    Args:
        part: [..., features of this rank].
        group: The ranks.
        split: Which features each rank has; of copies, the first counts, and gets the gradient.
    """
    if group.size == 1:
        return part
    gathered = gather_from_model_parallel_region(part, group, sizes=split.sizes)
    return gathered if split.is_in_rank_order else split.join(gathered.split(list(split.sizes), -1), -1)


def scatter_features(input_: Tensor, group: Group, split: Split) -> Tensor:
    """Returns the features that a split gives this rank.

    Args:
        input_: [..., all features], the same on all ranks.
        group: The ranks.
        split: Which features each rank has; no copies.
    """
    if not split.is_in_rank_order:
        input_ = torch.cat([split.take(input_, rank, -1) for rank in range(group.size)], -1)
    return scatter_to_model_parallel_region(input_, group, sizes=split.sizes)
