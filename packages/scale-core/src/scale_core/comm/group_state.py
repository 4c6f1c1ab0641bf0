"""This process's record of a process group: one for each, which ends with the group.

torch's process groups take no attributes, so the records are in a table.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

_KEPT_CALLS = 1_000
_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


class StepCount:
    """Number of optimizer steps on shards of some ranks; equal on all of them.

    Steps are counted because writes can't be compared: an optimizer may skip a shard that is empty on one rank, and
    writes to `param.data` count no version. A count per process would include other models. If hooks of users may have
    stepped in a backward pass, one step is counted at its end.
    """

    number = 0


class CallLog:
    """Calls in a group that have to be equal on all its ranks, since the ranks last compared them.

    Attributes:
        fingerprint: Of all of them, in order.
        last: The last ones as text, to name the first difference.
    """

    is_used = False  # in this process, by any group

    def __init__(self) -> None:
        self.fingerprint = 0
        self.last: deque[str] = deque(maxlen=_KEPT_CALLS)

    def clear(self) -> None:
        """Forgets them: the ranks have compared them, or have aborted the step."""
        self.fingerprint = 0
        self.last.clear()


class GroupState:
    """The record of a process group; each `Group` of it has it as `group.state`.

    Attributes:
        ranks: The global ranks; () where nobody asks for them.
        is_of_parent: This process was forked when the group was there, and shares its connections with that process.
        host_twin: The gloo group of the same ranks that moves data on the host; None until it is needed.
        is_host_group: The group moves data on the host itself, and needs no twin.
        moves_host_tensors: The backend moves tensors on the host itself, by the order of calls and without tags. Its
            collectives are then used there as NCCL's are on CUDA, and the twin moves control messages only.
        twin_of: Of a twin, the group that it belongs to.
        compared_calls: Fingerprints of the calls that were equal on all its ranks; see `check_same_call`.
        calls: The calls of `check_same_call` since the ranks last compared them.
        optimizer_steps: The count of steps on shards of these ranks. All groups of the same ranks share one object,
            because a model may have units on several groups, and an optimizer may have shards of some of them on only
            one rank.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.is_of_parent = False
        self.host_twin: dist.ProcessGroup | None = None
        self.is_host_group = False
        self.moves_host_tensors = False
        self.twin_of: ReferenceType[dist.ProcessGroup] | None = None
        self.compared_calls: set[int] = set()
        self.calls = CallLog()
        self.optimizer_steps = StepCount()
        self._of_packages: dict[type[Any], Any] = {}

    def get_or_create(self, kind: type[T]) -> T:
        """Returns this group's instance of a class, created at the first call.

        Packages above scale-core keep their own facts about a group in it.
        """
        if kind not in self._of_packages:
            self._of_packages[kind] = kind()
        instance: T = self._of_packages[kind]
        return instance


def group_state(process_group: dist.ProcessGroup, ranks: tuple[int, ...] = ()) -> GroupState:
    """Returns the record of a process group, given its global ranks."""
    state = _states.get(process_group)
    if state is None:
        state = _states[process_group] = GroupState()
    if ranks and not state.ranks:  # It may have been made where nobody knew them.
        for other in _states.values():
            if other.ranks == ranks:
                state.optimizer_steps = other.optimizer_steps
        state.ranks = ranks
    return state


def known_groups() -> list[dist.ProcessGroup]:
    """Returns the process groups that have a record, those that torch does not list among them."""
    return list(_states)
