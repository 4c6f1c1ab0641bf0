"""From what each rank computes to a whole schedule: transfers are woven in, and the steps stand at the end.

All actions of all ranks are put in one global order in which each stands after what it needs, a transfer being one
event of two ranks. Each rank's list is the part of that order which concerns it. So whoever follows the lists can
always go on with the first event of the global order that is not done: no list deadlocks, even where a send returns
only when its receive is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

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
from scale_pipe.schedules.costs import Costs
from scale_pipe.schedules.errors import DeadlockError
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Orders, Schedule


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
    actions: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    if len(orders) != placement.num_ranks:
        raise ValueError(f"expected an order for each of {placement.num_ranks} ranks, but got {len(orders)}")
    for action in global_order(placement, orders):
        rank, stage, micro_batch = placement.rank_of[action.stage], action.stage, action.micro_batch
        actions[rank].append(action)
        if action.kind is Kind.FORWARD and stage + 1 < placement.num_stages:
            receiver = placement.rank_of[stage + 1]
            if receiver != rank:
                actions[rank].append(Action(Kind.SEND_ACTIVATION, stage, micro_batch))
                actions[receiver].append(Action(Kind.RECEIVE_ACTIVATION, stage + 1, micro_batch))
        if action.kind in GIVES_INPUT_GRADIENT and stage > 0:
            receiver = placement.rank_of[stage - 1]
            if receiver != rank:
                actions[rank].append(Action(Kind.SEND_GRADIENT, stage, micro_batch))
                actions[receiver].append(Action(Kind.RECEIVE_GRADIENT, stage - 1, micro_batch))
    for rank, stages in enumerate(placement.stages_of):
        actions[rank] += [Action(Kind.STEP, stage, EVERY_MICRO_BATCH) for stage in stages]
    return Schedule(name, placement, num_micro_batches, tuple(map(tuple, actions)))


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


def global_order(placement: Placement, orders: Orders, costs: Costs | None = None) -> Iterator[Action]:
    """Yields all computations of all ranks in the order in which they start; ties by rank.

    Args:
        placement: Which rank holds which stage.
        orders: By rank, what it computes, in order.
        costs: The times; None counts each forward and each gradient as one.

    Raises:
        DeadlockError: Some never become ready.
    """
    costs = costs or Costs.uniform(placement.num_stages)
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
        yield action
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
