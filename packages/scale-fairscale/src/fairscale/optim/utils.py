"""The path of programs written for FairScale before 0.4."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fairscale.internal.containers import apply_to_tensors
from fairscale.internal.process_group import unwrap_process_group


def broadcast_object(obj: Any, src_rank: int, group: Any = None, dist_device: torch.device | None = None) -> Any:
    """Returns what one rank has given, on all ranks of a group, which call it together.

    Args:
        obj: Anything that pickle takes; on other ranks than the source it counts for nothing.
        src_rank: The source, by its rank among all.
        group: The ranks; None is the default group.
        dist_device: Where the other ranks get its tensors; None is where they were.
    """
    objects = [obj]
    dist.broadcast_object_list(objects, src_rank, group=unwrap_process_group(group), device=dist_device)
    if dist_device is None or dist.get_rank() == src_rank:
        return objects[0]
    return apply_to_tensors(lambda tensor: tensor.to(dist_device), objects[0])


__all__ = ["broadcast_object"]
