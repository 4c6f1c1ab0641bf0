"""From the compute order of each rank to a complete schedule: transfers are inserted, and optimizer steps appended.

All actions of all ranks are put in one global order in which each comes after its inputs, a transfer being one
event of two ranks. Each rank's list is the part of that order which concerns it. So the first event of the global
order that is not done can always run: no list deadlocks, even where a send returns only when its receive has begun,
and even where all transfers of a rank pass one after the other.

A rank may do a computation before a transfer that it needs only later: nothing that the computation needs comes after
that transfer. So a receive is as late as its rank's other transfers and its users permit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from scale_pipe.integers import checked_arguments
from scale_pipe.schedules.action import EVERY_MICRO_BATCH, GIVES_INPUT_GRADIENT, Action, Kind, matching_transfer
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import DeadlockError, Orders, Schedule

T = TypeVar("T")


class Transfer(NamedTuple, Generic[T]):
    """A transfer from a computation to the same pass of another stage, with its entries in both ranks' lists."""

    target: int  # The stage.
    send: T
    receive: T


@checked_arguments
def build_schedule(name: str, placement: StagePlacement, num_micro_batches: int, orders: Orders) -> Schedule:
    """Returns the schedule with these compute orders: transfers are inserted, and a step for each stage is appended.

    Args:
        name: The schedule's.
        placement: The rank of each stage.
        num_micro_batches: The number of micro-batches of a step.
        orders: By rank, its computations, in order.

    Raises:
        DeadlockError: With these orders some actions never become ready.
        ValueError: There is not one order for each rank.

    Examples:
        >>> from scale_pipe.schedules.action import Action, Kind
        >>> from scale_pipe.schedules.placement import StagePlacement
        >>> from scale_pipe.schedules.lowering import build_schedule
        >>> orders = [[Action(kind, stage, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)] for stage in range(2)]
        >>> schedule = build_schedule("mine", StagePlacement((0, 1)), 1, orders)
        >>> print(*schedule.actions[0])
        F0.0 SA0.0 RG0.0 B0.0 S0

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    if len(orders) != placement.num_ranks:
        raise ValueError(f"expected an order for each of {placement.num_ranks} ranks, but got {len(orders)}")

    def to_neighbor(action: Action) -> Iterator[Transfer[Action]]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD and stage + 1 < placement.num_stages:
            send = Action(Kind.SEND_ACTIVATION, stage, micro_batch)
        elif action.kind in GIVES_INPUT_GRADIENT and stage > 0:
            send = Action(Kind.SEND_GRADIENT, stage, micro_batch)
        else:
            return
        receive = matching_transfer(send)
        yield Transfer(receive.stage, send, receive)

    actions = insert_transfers(placement, orders, to_neighbor)
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
        (end, action, transfer)
        for action, end in global_order(placement, orders)
        for transfer in transfers(action)
        if rank_of[action.stage] != rank_of[transfer.target]
    ]
    events.sort(key=lambda event: (event[0], event[1].micro_batch))
    lines: list[list[T]] = [[] for _ in orders]  # By rank, its transfers in the global order.
    before: dict[_Result, int] = {}  # How many of them come before the computation with this result,
    after: dict[_Result, int] = {}  # and right after it.
    for _, action, transfer in events:
        is_forward = action.kind is Kind.FORWARD
        for stage, item, due in ((action.stage, transfer.send, after), (transfer.target, transfer.receive, before)):
            line = lines[rank_of[stage]]
            line.append(item)
            due[is_forward, stage, action.micro_batch] = len(line)
    found: list[list[Action | T]] = []
    for order, line in zip(orders, lines, strict=True):
        row: list[Action | T] = []
        num_done = 0
        for action in order:
            result = _result(action)
            until = max(num_done, before.get(result, 0))
            row += [*line[num_done:until], action]
            num_done = max(until, after.get(result, 0))
            row += line[until:num_done]
        found.append(row)
    return found


_Result: TypeAlias = tuple[bool, int, int] | None
"""What a computation gives to others: whether it is a forward's, the stage, and the micro-batch; None of `W`."""


def _result(action: Action) -> _Result:
    kind, stage, micro_batch = action
    return None if kind is Kind.WEIGHT_GRADIENT else (kind is Kind.FORWARD, stage, micro_batch)


def _needed_result(action: Action, last_stage: int) -> _Result:
    """Returns the result that a computation needs, if any."""
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD:
        return (True, stage - 1, micro_batch) if stage else None
    if kind is Kind.WEIGHT_GRADIENT:
        return False, stage, micro_batch
    return (True, stage, micro_batch) if stage == last_stage else (False, stage + 1, micro_batch)


def global_order(placement: StagePlacement, orders: Orders) -> Iterator[tuple[Action, float]]:
    """Yields all computations of all ranks in the order in which they start, and when they end; ties by rank.

    Each forward and each gradient takes the time 1. If some never become ready, it raises `DeadlockError`.
    """
    last_stage = placement.num_stages - 1
    ends: dict[_Result, float] = {None: 0.0}
    positions = [0] * placement.num_ranks
    free_at = [0.0] * placement.num_ranks
    ready: list[tuple[float, int]] = []  # A heap.
    waiting: dict[_Result, list[int]] = {}  # The ranks that wait for a result.

    def schedule_next(rank: int) -> None:
        """Puts a rank on the heap if its next action is ready, or else among those that wait."""
        if positions[rank] < len(orders[rank]):
            needed = _needed_result(orders[rank][positions[rank]], last_stage)
            if needed in ends:
                heapq.heappush(ready, (max(free_at[rank], ends[needed]), rank))
            else:
                waiting.setdefault(needed, []).append(rank)

    for rank in range(placement.num_ranks):
        schedule_next(rank)
    while ready:
        start, rank = heapq.heappop(ready)
        action = orders[rank][positions[rank]]
        result = _result(action)
        positions[rank] += 1
        free_at[rank] = end = start + (2.0 if action.kind is Kind.BACKWARD else 1.0)
        yield action, end
        if result is not None:
            ends[result] = end
            for other in waiting.pop(result, ()):
                schedule_next(other)
        schedule_next(rank)
    stuck = {rank: order[at] for rank, (order, at) in enumerate(zip(orders, positions, strict=True)) if at < len(order)}
    if stuck:
        waits = []
        for rank, action in stuck.items():
            is_forward, stage, micro_batch = _needed_result(action, last_stage) or (True, 0, 0)
            kinds = [Kind.FORWARD] if is_forward else [Kind.INPUT_GRADIENT, Kind.BACKWARD]
            needed = " or ".join(str(Action(kind, stage, micro_batch)) for kind in kinds)
            waits.append(f"rank {rank} waits before {action} for {needed}")
        reason = f"these orders deadlock: {'; '.join(waits)}; reorder one of these ranks"
        raise DeadlockError(reason, *next(iter(stuck.items())))
