"""What a rank has sent and need not keep any longer: known from the lists of all ranks, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from scale_pipe.distributed.plan import Flow, Receive, Send, Slot, Task, Wiring, arriving
from scale_pipe.schedules.action import COMPUTES, Action


def receipts(plans: Sequence[Sequence[Task]], rank: int, num_stages: int, wiring: Wiring) -> dict[int, list[Slot]]:
    """Returns by task what a rank has sent and knows to be taken in by then, so that it may forget it.

    A peer sends in the order of its list. What it had to wait for before it sent what arrives now has been there.

    Args:
        plans: Of all ranks.
        rank: Whose receipts.
        num_stages: How many stages there are.
        wiring: What the model adds.
    """
    sent_at: dict[tuple[int, Slot], int] = {}
    taken_at: dict[tuple[int, Slot], int] = {}
    for peer, tasks in enumerate(plans):
        for index, task in enumerate(tasks):
            if isinstance(task, Send):
                sent_at[peer, task.slot] = index
            elif isinstance(task, Action) and task.kind in COMPUTES:
                taken_at.update({(peer, slot): index for slot in arriving(task, num_stages, wiring)})
    open_sends: dict[int, list[tuple[int, Slot]]] = {}
    for task in plans[rank]:
        if isinstance(task, Send) and task.slot.flow is not Flow.SHARED:
            open_sends.setdefault(task.peer, []).append((taken_at[task.peer, task.slot], task.slot))
    for sends in open_sends.values():
        sends.sort(reverse=True)
    peer_of = {task.slot: task.peer for task in plans[rank] if isinstance(task, Receive)}
    known: dict[int, list[Slot]] = {}
    for index, task in enumerate(plans[rank]):
        if not (isinstance(task, Action) and task.kind in COMPUTES):
            continue
        for slot in arriving(task, num_stages, wiring):
            if slot in peer_of:
                sends = open_sends.get(peer_of[slot], [])
                while sends and sends[-1][0] < sent_at[peer_of[slot], slot]:
                    known.setdefault(index, []).append(sends.pop()[1])
    return known
