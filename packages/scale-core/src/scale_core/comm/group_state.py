"""What this process knows of a process group: one record for each, which is gone when the group is.

torch's process groups take no attributes, so the records stand in a table.
"""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


class GroupState:
    """The record of a process group; each `Group` of it has it as `group.state`.

    Attributes:
        host_twin: The gloo group of the same ranks that moves data on the host; None until it is needed.
        twin_of: Of such a twin, the group that it belongs to.
        compared_calls: Fingerprints of the calls that were equal on all its ranks; see `check_same_call`.
        num_optimizer_steps: How many steps optimizers have taken on the shards of these ranks; equal on all of them.
            Whether a shard was written to is not: an optimizer may leave out what is empty on this rank, and one that
            writes to `param.data` counts no versions. Nor is the number of all steps of a process, which may train
            other models as well. Steps in backward passes count where they end, if hooks of users may have taken them.
    """

    def __init__(self) -> None:
        self.host_twin: dist.ProcessGroup | None = None
        self.twin_of: ReferenceType[dist.ProcessGroup] | None = None
        self.compared_calls: set[int] = set()
        self.num_optimizer_steps = 0
        self._of_packages: dict[type[Any], Any] = {}

    def of(self, kind: type[T]) -> T:
        """Returns what a package above keeps of the group: its one object of this class, made at the first call."""
        if kind not in self._of_packages:
            self._of_packages[kind] = kind()
        found: T = self._of_packages[kind]
        return found


def group_state(process_group: dist.ProcessGroup) -> GroupState:
    """Returns the record of a process group."""
    state = _states.get(process_group)
    if state is None:
        state = _states[process_group] = GroupState()
    return state
