"""Process groups by name, and objects that imitate one, as trackers of communication do."""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed as dist

from fairscale._warnings import warn_once


class ProcessGroupName(enum.StrEnum):
    """Names of groups, which FairScale's users pass in the place of a second group."""

    default = "default"
    reduce_scatter = "reduce_scatter"


def unwrap_process_group(process_group: Any) -> Any:
    """Returns the process group that an object with its methods holds; any other argument unchanged.

    FairScale called methods of the object it was given. Here collectives are torch's functions on the group itself, so
    that an object which counts calls sees none; there is a warning.
    """
    kind = type(process_group)
    imitates = all(callable(getattr(process_group, name, None)) for name in ("rank", "size"))
    if isinstance(process_group, dist.ProcessGroup) or not imitates:
        return process_group
    attributes = {id(value): value for value in getattr(process_group, "__dict__", {}).values()}
    unwrapped = {id(group): group for group in map(unwrap_process_group, attributes.values())}
    groups = [group for group in unwrapped.values() if isinstance(group, dist.ProcessGroup)]
    if len(groups) != 1:
        return process_group
    if kind.__module__.partition(".")[0] != "fairscale":
        warn_once(
            f"process_group={kind.__name__}(...)",
            "collectives go over the process group inside of it, whose methods aren't called: give that group, and "
            "count by fairscale.experimental.tooling.layer_memory_tracker.LayerwiseMemoryTracker or a profiler",
        )
    return groups[0]


__all__ = ["ProcessGroupName", "unwrap_process_group"]
