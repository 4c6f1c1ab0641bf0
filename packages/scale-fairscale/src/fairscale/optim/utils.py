"""The path of programs written for FairScale before 0.4."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def broadcast_object(obj: Any, src_rank: int, group: Any = None, dist_device: torch.device | None = None) -> Any:
    """Returns what one rank has given, on all ranks of a group, which call it together.

    Args:
        obj: Anything that pickle takes; on other ranks than the source it counts for nothing.
        src_rank: The source, by its rank among all.
        group: The ranks; None is the default group.
        dist_device: Where tensors are for the transport; None is as torch chooses.
    """
    found = [obj]
    dist.broadcast_object_list(found, src_rank, group=group, device=dist_device)
    return found[0]


__all__ = ["broadcast_object"]
