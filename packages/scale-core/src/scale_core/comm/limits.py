"""The longest wait for another rank."""

from __future__ import annotations

import math
import os
from functools import cache

import torch.distributed as dist

from scale_core import compat

LIMIT_VARIABLE = "SCALE_LIMIT_SECONDS"
# The longest limit: torch's default of half an hour is too long to look at a machine that does nothing.
LIMIT_SECONDS = 600.0


def process_limit() -> float | None:
    """The limit of `SCALE_LIMIT_SECONDS` for every wait of this process that is given none; None where it is not set.

    Raises:
        ValueError: It is not a number of seconds above 0.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    return None if text is None else _seconds_in(text)


@cache
def _seconds_in(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected a number of seconds above 0 in {LIMIT_VARIABLE}, got {text!r}: such as 600")
    return seconds


def limit_of(process_group: dist.ProcessGroup | None, limit_seconds: float | None) -> float:
    """The longest wait in a group: `limit_seconds`, `SCALE_LIMIT_SECONDS`, or the group's own, at most ten minutes."""
    if limit_seconds is not None:
        if not limit_seconds > 0:
            raise ValueError(f"expected limit_seconds above 0, or None for the group's own, got {limit_seconds}")
        return limit_seconds
    if (limit := process_limit()) is not None:
        return limit
    if process_group is None or compat.is_fake_group(process_group):
        return LIMIT_SECONDS
    return min(compat.time_limit(process_group).total_seconds(), LIMIT_SECONDS)
