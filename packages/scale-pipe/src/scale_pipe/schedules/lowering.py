"""From what each rank computes to a whole schedule: transfers are woven in, and the steps stand at the end.

All actions of all ranks are put in one global order in which each stands after what it needs, a transfer being one
event of two ranks. Each rank's list is the part of that order which concerns it. So whoever follows the lists can
always go on with the first event of the global order that is not done: no list deadlocks, even where a send returns
only when its receive is there, and even where all transfers of a rank pass one after the other.

A rank may do a computation before a transfer that it needs only later: nothing that the computation needs comes after
that transfer. So a receive stands as late as its rank's other transfers and what needs it let it.
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
)
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import DeadlockError, Orders, Schedule

T = TypeVar("T")


class Transfer(NamedTuple, Generic[T]):
    """What a computation gives to another stage, which needs it for its own pass of the same kind and micro-batch.

    Attributes:
        target: The stage.
        send: What the sender's list says of it.
        receive: What the receiver's list says of it.
    """

    target: int
    send: T
    receive: T


def weave(name: str, placement: Placement, num_micro_batches: int, orders: Orders) -> Schedule:
    """Returns the schedule that computes in given orders, with its transfers and steps.

    Args:
        name: The schedule's.
        placement: Which rank holds which stage.
        num_micro_batches: How many micro-batches a step has.
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
            kinds, target = (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION), stage + 1
        elif action.kind in GIVES_INPUT_GRADIENT and stage > 0:
            kinds, target = (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT), stage - 1
        else:
            return
        yield Transfer(target, Action(kinds[0], stage, micro_batch), Action(kinds[1], target, micro_batch))

    actions = with_transfers(placement, orders, to_neighbour)
    for rank, stages in enumerate(placement.stages_of):
        actions[rank] += [Action(Kind.STEP, stage, EVERY_MICRO_BATCH) for stage in stages]
    return Schedule(name, placement, num_micro_batches, tuple(map(tuple, actions)))


def with_transfers(
    placement: Placement, orders: Orders, transfers: Callable[[Action], Iterable[Transfer[T]]]
) -> list[list[Action | T]]:
    """Returns by rank its computations with what it sends and receives.

    Args:
        placement: Which rank holds which stage; between stages of one rank nothing is sent.
        orders: By rank, what it computes, in order.
        transfers: Of each computation, what it gives, in the order in which that is sent.

    Raises:
        DeadlockError: With these orders some computations never become ready.
    """
    rank_of = placement.rank_of
    events = [
        (end, action.micro_batch, action, transfer)
        for action, end in global_order(placement, orders)
        for transfer in transfers(action)
        if rank_of[action.stage] != rank_of[transfer.target]
    ]
    lines: list[list[T]] = [[] for _ in orders]  # By rank, its transfers in the global order.
    due: dict[tuple[int, int, bool, bool], int] = {}  # How many of them stand before a computation, or right behind it.
    for _, micro_batch, action, transfer in sorted(events, key=lambda event: event[:2]):
        goes_forward = action.kind is Kind.FORWARD
        sides = ((action.stage, transfer.send, True), (transfer.target, transfer.receive, False))
        for stage, item, leaves in sides:
            line = lines[rank_of[stage]]
            line.append(item)
            due[stage, micro_batch, goes_forward, leaves] = len(line)
    found: list[list[Action | T]] = []
    for order, line in zip(orders, lines, strict=True):
        row: list[Action | T] = []
        num_done = 0
        for action in order:
            for leaves in (False, True):
                if action.kind is not Kind.WEIGHT_GRADIENT:
                    until = due.get((action.stage, action.micro_batch, action.kind is Kind.FORWARD, leaves), 0)
                    row += line[num_done:until]
                    num_done = max(num_done, until)
                row += [action] * (not leaves)
        found.append(row)
    return found


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Returns what has to be computed before an action; any one of several that are given suffices.

    The gradient of a stage's input comes from the next stage as `I` or as part of `B`.

    Args:
        action: A computation.
        num_stages: How many stages there are.
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


def global_order(placement: Placement, orders: Orders) -> Iterator[tuple[Action, float]]:
    """Yields all computations of all ranks in the order in which they start, and when they end; ties by rank.

    Each forward and each gradient counts as one.

    Args:
        placement: Which rank holds which stage.
        orders: By rank, what it computes, in order.

    Raises:
        DeadlockError: Some never become ready.
    """
    costs = Costs.uniform(placement.num_stages)
    ends: dict[Action, float] = {}
    positions = [0] * placement.num_ranks
    free_at = [0.0] * placement.num_ranks
    ready: list[tuple[float, int]] = []
    waiting: dict[tuple[Action, ...], set[int]] = {}

    def look(rank: int) -> None:
        """Puts the next action of a rank among those that are ready, or notes what it waits for."""
        if positions[rank] == len(orders[rank]):
            return
        needed = needs(orders[rank][positions[rank]], placement.num_stages)
        done = [ends[other] for other in needed if other in ends]
        if needed and not done:
            waiting.setdefault(needed, set()).add(rank)
        else:
            heapq.heappush(ready, (max([free_at[rank], *done]), rank))

    for rank in range(placement.num_ranks):
        look(rank)
    while ready:
        start, rank = heapq.heappop(ready)
        action = orders[rank][positions[rank]]
        positions[rank] += 1
        free_at[rank] = ends[action] = start + costs.of(action)
        yield action, ends[action]
        for needed in [needed for needed in waiting if action in needed]:
            for other in sorted(waiting.pop(needed)):
                look(other)
        look(rank)
    if stuck := [rank for rank in range(placement.num_ranks) if positions[rank] < len(orders[rank])]:
        waits = "; ".join(
            f"rank {rank} waits before {orders[rank][positions[rank]]} for "
            + " or ".join(map(str, needs(orders[rank][positions[rank]], placement.num_stages)))
            for rank in stuck
        )
        first = orders[stuck[0]][positions[stuck[0]]]
        raise DeadlockError(f"these orders never end: {waits}; reorder one of these ranks", stuck[0], first)
