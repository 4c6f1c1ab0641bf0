"""What can be known of one rank's tasks before they run: who needs what, and what each stage does last."""

from __future__ import annotations

from collections.abc import Sequence

from scale_pipe.distributed.program.plan import Flow, Receive, Send, Slot, Task, Wiring, arriving, leaving
from scale_pipe.schedules.action import COMPUTES, GIVES_INPUT_GRADIENT, Action, Kind


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


class Order:
    """The tasks of one rank, with what can be known of them before they run.

    Args:
        plans: The tasks of all ranks.
        rank: Which is this one's.
        num_stages: How many stages there are.
        wiring: What the model adds.

    Attributes:
        num_stages: How many stages there are.
        tasks: In order.
        receives: Those that receive.
        splits: Whether gradients of inputs and of parameters are computed apart.
        receipts: By task, which sends are known to have arrived.
        turns: By stage, its micro-batches in the order of their backwards.
        arriving: By computation, what it takes.
        leaving: By computation, what it gives.
        peers: Of what comes from another rank, which one.
        sent: What goes to another rank.
        opening: What this rank waits for before it does anything; None on the rank that begins.
    """

    def __init__(self, plans: Sequence[Sequence[Task]], rank: int, num_stages: int, wiring: Wiring) -> None:
        self.num_stages = num_stages
        self.tasks = tuple(plans[rank])
        self.receives = [task for task in self.tasks if isinstance(task, Receive)]
        computes = [(i, t) for i, t in enumerate(self.tasks) if isinstance(t, Action) and t.kind in COMPUTES]
        self.splits = any(action.kind is Kind.INPUT_GRADIENT for _, action in computes)
        self.receipts = receipts(plans, rank, num_stages, wiring)
        self.turns: dict[int, list[int]] = {}
        for _, action in computes:
            if action.kind in GIVES_INPUT_GRADIENT:
                self.turns.setdefault(action.stage, []).append(action.micro_batch)
        self.arriving = {action: arriving(action, num_stages, wiring) for _, action in computes}
        self.leaving = {action: leaving(action, num_stages, wiring) for _, action in computes}
        self.peers: dict[Slot, int] = {task.slot: task.peer for task in self.receives}
        self.sent = frozenset(task.slot for task in self.tasks if isinstance(task, Send))
        first = self.arriving[computes[0][1]] if computes else ()
        self.opening = self.receives[0].slot if any(slot in self.peers for slot in first) else None

    def ends_with(self, stage: int, micro_batch: int, num_micro_batches: int) -> bool:
        """Whether a micro-batch's backward is the stage's last one of those that the mini-batch has.

        Args:
            stage: Of this rank.
            micro_batch: Which.
            num_micro_batches: How many the mini-batch makes: at most those of the schedule.
        """
        turns = self.turns.get(stage, ())
        return next((turn for turn in reversed(turns) if turn < num_micro_batches), None) == micro_batch
