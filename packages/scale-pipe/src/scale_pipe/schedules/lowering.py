"""From the compute order of each rank to a whole schedule: transfers are inserted, and optimizer steps appended.

All actions of all ranks are put in one global order in which each comes after what it needs, a transfer being one
event of two ranks. Each rank's list is the part of that order which concerns it. So the first event of the global
order that is not done can always run: no list deadlocks, even where a send returns only when its receive has begun,
and even where all transfers of a rank pass one after the other.

A rank may do a computation before a transfer that it needs only later: nothing that the computation needs comes after
that transfer. So a receive is as late as its rank's other transfers and what needs it permit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from scale_pipe.schedules.action import (
    COMPUTES,
    EVERY_MICRO_BATCH,
    GIVES_INPUT_GRADIENT,
    Action,
    Kind,
    backward,
    forward,
    input_gradient,
    matching_transfer,
)
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import DeadlockError, Orders, Schedule

T = TypeVar("T")


class Transfer(NamedTuple, Generic[T]):
    """A transfer from a computation to the same pass of another stage, with its entries in both ranks' lists."""

    target: int  # The stage.
    send: T
    receive: T


def build_schedule(name: str, placement: StagePlacement, num_micro_batches: int, orders: Orders) -> Schedule:
    """Returns the schedule with these compute orders: transfers are inserted, and a step for each stage is appended.

    Args:
        name: The schedule's.
        placement: The rank of each stage.
        num_micro_batches: The number of micro-batches of a step.
        orders: By rank, what it computes, in order.

    Raises:
        DeadlockError: With these orders some actions never become ready.
        ValueError: There is not one order for each rank.
    """
    if len(orders) != placement.num_ranks:
        raise ValueError(f"expected an order for each of {placement.num_ranks} ranks, but got {len(orders)}")

    def to_neighbour(action: Action) -> Iterator[Transfer[Action]]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD and stage + 1 < placement.num_stages:
            send = Action(Kind.SEND_ACTIVATION, stage, micro_batch)
        elif action.kind in GIVES_INPUT_GRADIENT and stage > 0:
            send = Action(Kind.SEND_GRADIENT, stage, micro_batch)
        else:
            return
        receive = matching_transfer(send)
        yield Transfer(receive.stage, send, receive)

    actions = insert_transfers(placement, orders, to_neighbour)
    for rank, stages in enumerate(placement.stages_of):
        actions[rank] += [Action(Kind.STEP, stage, EVERY_MICRO_BATCH) for stage in stages]
    return Schedule(name, placement, num_micro_batches, tuple(map(tuple, actions)))


def insert_transfers(
    placement: StagePlacement, orders: Orders, transfers: Callable[[Action], Iterable[Transfer[T]]]
) -> list[list[Action | T]]:
    """Returns by rank its computations with their transfers, which each computation yields in the order of sending.

    Between stages of one rank nothing is sent. Orders with which some computations never become ready deadlock.
    """
    rank_of = placement.rank_of
    events = [
        (end, action.micro_batch, action, transfer)
        for action, end in global_order(placement, orders)
        for transfer in transfers(action)
        if rank_of[action.stage] != rank_of[transfer.target]
    ]
    lines: list[list[T]] = [[] for _ in orders]  # By rank, its transfers in the global order.
    due: dict[tuple[int, int, bool, bool], int] = {}  # How many of them come before a computation, or right after it.
    for _, micro_batch, action, transfer in sorted(events, key=lambda event: event[:2]):
        is_forward = action.kind is Kind.FORWARD
        sides = ((action.stage, transfer.send, True), (transfer.target, transfer.receive, False))
        for stage, item, is_send in sides:
            line = lines[rank_of[stage]]
            line.append(item)
            due[stage, micro_batch, is_forward, is_send] = len(line)
    found: list[list[Action | T]] = []
    for order, line in zip(orders, lines, strict=True):
        row: list[Action | T] = []
        num_done = 0
        for action in order:
            for is_send in (False, True):
                if action.kind is not Kind.WEIGHT_GRADIENT:
                    until = due.get((action.stage, action.micro_batch, action.kind is Kind.FORWARD, is_send), 0)
                    row += line[num_done:until]
                    num_done = max(num_done, until)
                row += [action] * (not is_send)
        found.append(row)
    return found


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Returns what has to be computed before a computation; of several, any one suffices.

    The gradient of a stage's input comes from the next stage as `I` or as part of `B`.
    """
    assert action.kind in COMPUTES
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return (forward(stage - 1, micro_batch),) if stage else ()
    if action.kind is Kind.WEIGHT_GRADIENT:
        return (input_gradient(stage, micro_batch),)
    if stage == num_stages - 1:
        return (forward(stage, micro_batch),)
    return input_gradient(stage + 1, micro_batch), backward(stage + 1, micro_batch)


def global_order(placement: StagePlacement, orders: Orders) -> Iterator[tuple[Action, float]]:
    """Yields all computations of all ranks in the order in which they start, and when they end; ties by rank.

    Each forward and each gradient takes the time 1. If some never become ready, it raises `DeadlockError`.
    """
    costs = Costs.uniform(placement.num_stages)
    ends: dict[Action, float] = {}
    positions = [0] * placement.num_ranks
    free_at = [0.0] * placement.num_ranks
    ready: list[tuple[float, int]] = []  # A heap.
    waiting: dict[tuple[Action, ...], set[int]] = {}

    def schedule_next(rank: int) -> None:
        """Puts a rank on the heap if its next action is ready, or else among those that wait."""
        if positions[rank] == len(orders[rank]):
            return
        needed = dependencies(orders[rank][positions[rank]], placement.num_stages)
        done = [ends[other] for other in needed if other in ends]
        if needed and not done:
            waiting.setdefault(needed, set()).add(rank)
        else:
            heapq.heappush(ready, (max([free_at[rank], *done]), rank))

    for rank in range(placement.num_ranks):
        schedule_next(rank)
    while ready:
        start, rank = heapq.heappop(ready)
        action = orders[rank][positions[rank]]
        positions[rank] += 1
        free_at[rank] = ends[action] = start + costs.duration(action)
        yield action, ends[action]
        for needed in [needed for needed in waiting if action in needed]:
            for other in sorted(waiting.pop(needed)):
                schedule_next(other)
        schedule_next(rank)
    stuck = {rank: order[at] for rank, (order, at) in enumerate(zip(orders, positions, strict=True)) if at < len(order)}
    if stuck:
        waits = "; ".join(
            f"rank {rank} waits before {action} for "
            + " or ".join(map(str, dependencies(action, placement.num_stages)))
            for rank, action in stuck.items()
        )
        first = min(stuck)
        raise DeadlockError(f"these orders deadlock: {waits}; reorder one of these ranks", first, stuck[first])
