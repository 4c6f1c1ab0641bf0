"""What all ranks have, so that each of them can compare it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def by_rank(value: Any) -> list[Any]:
    """The values of all ranks, on each of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
