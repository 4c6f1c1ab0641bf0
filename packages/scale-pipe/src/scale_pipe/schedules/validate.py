"""The schedule validator: every action once, each dependency met, no deadlock, the memory cap kept.

Whether ranks deadlock depends on the transport. There are three models:

- `"posted"`: sends and receives only start, and an action waits for the tensor that it needs. Tensors have tags, so
  their order on a link is free. gloo is such.
- `"buffered"`: a send returns at once, a receive waits for its tensor; on a link, tensors arrive in the order of their
  sends.
- `"rendezvous"`: a send returns when its receive has begun, and the other way round. NCCL may be such, where all
  transfers of a rank pass one after the other. A schedule that passes here passes everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from scale_pipe.integers import checked_arguments
from scale_pipe.schedules.action import (
    EVERY_MICRO_BATCH,
    GIVES_INPUT_GRADIENT,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    live_change,
    matching_transfer,
)
from scale_pipe.schedules.schedule import DeadlockError, MemoryCapError, Schedule, ScheduleError

Transport = Literal["posted", "buffered", "rendezvous"]

_GRADIENT_NEEDS = ((Kind.FORWARD, 0), (Kind.RECEIVE_GRADIENT, 0), (Kind.INPUT_GRADIENT, 1))
_LOCAL_DEPENDENCIES = {
    Kind.FORWARD: ((Kind.RECEIVE_ACTIVATION, 0), (Kind.FORWARD, -1)),
    Kind.INPUT_GRADIENT: _GRADIENT_NEEDS,
    Kind.BACKWARD: _GRADIENT_NEEDS,
    Kind.WEIGHT_GRADIENT: ((Kind.INPUT_GRADIENT, 0),),
    Kind.SEND_GRADIENT: ((Kind.INPUT_GRADIENT, 0),),
    Kind.SEND_ACTIVATION: ((Kind.FORWARD, 0),),
}
"""By kind, the kinds that the same rank has to do before it, with their stage minus its own."""


@checked_arguments
def validate(
    schedule: Schedule,
    *,
    memory_cap: float | Sequence[float] | None = None,
    transport: Transport = "rendezvous",
) -> None:
    """Proves that a schedule can run, or raises an error that names the mistake.

    Args:
        schedule: Any.
        memory_cap: The largest number of live micro-batches, for all ranks or by rank, in model equivalents: one is a
            micro-batch on all stages of the rank. None for no limit.
        transport: The model of transfers; the strictest by default.

    Raises:
        ScheduleError: An action is missing, occurs twice, is on the wrong rank, or comes before its inputs.
        DeadlockError: Ranks wait for each other.
        MemoryCapError: A rank holds more than the cap.
        ValueError: The transport is none of the three, or there is not one cap for each rank.

    Examples:
        >>> from scale_pipe.schedules.classic import gpipe
        >>> from scale_pipe.schedules.validate import validate
        >>> validate(gpipe(2, 4))
        >>> try:
        ...     validate(gpipe(2, 4), memory_cap=2)
        ... except ValueError as error:
        ...     print(type(error).__name__)
        MemoryCapError

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    if transport not in get_args(Transport):
        raise ValueError(f"expected transport to be one of {', '.join(get_args(Transport))}, but got {transport!r}")
    caps = caps_by_rank(memory_cap, schedule.num_ranks)
    for rank in range(schedule.num_ranks):
        _check_rank(schedule, rank)
    if transport == "buffered":
        _check_order_on_links(schedule)
    _check_progress(schedule, transport)
    for rank, cap in enumerate(caps):
        _check_memory(schedule, rank, cap)


def caps_by_rank(memory_cap: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    """Returns the cap of each rank, infinite for None; raises `ValueError` for caps that don't fit the ranks."""
    if memory_cap is None:
        return (float("inf"),) * num_ranks
    caps = (float(memory_cap),) * num_ranks if isinstance(memory_cap, int | float) else tuple(map(float, memory_cap))
    if len(caps) != num_ranks:
        raise ValueError(f"expected a memory_cap for each of {num_ranks} ranks, or one number, but got {len(caps)}")
    for rank, cap in enumerate(caps):
        if not cap > 0:
            raise ValueError(f"memory_cap must be positive, but is {cap} for rank {rank}")
    return caps


def _check_rank(schedule: Schedule, rank: int) -> None:
    """Checks that each action is in the list of its rank once, and no other, and comes after its inputs there."""
    expected = dict.fromkeys(_expected_actions(schedule, rank))
    seen_actions: set[Action] = set()
    for action in schedule.actions[rank]:
        for part in _parts(action):
            if part not in expected:
                raise ScheduleError(_misplaced_reason(schedule, rank, action), rank, action)
            if part in seen_actions:
                raise ScheduleError("is here a second time; each action is done once in a step", rank, action)
            seen_actions.add(part)
    for action in expected:
        if action not in seen_actions:
            raise ScheduleError("is missing; build_schedule(...) adds transfers and steps", rank, action)
    done: set[Action] = set()
    for action in schedule.actions[rank]:
        for needed in _local_dependencies(action, schedule.num_micro_batches):
            if needed in expected and needed not in done:
                raise ScheduleError(f"needs {needed}, which comes after it", rank, action)
        done.update(_parts(action))


def _expected_actions(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yields the actions of a rank in a step, with each backward as its two gradients."""
    rank_of = schedule.placement.rank_of
    for stage in schedule.placement.stages_of[rank]:
        kinds = [Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT]
        if stage > 0 and rank_of[stage - 1] != rank:
            kinds += [Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT]
        if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank:
            kinds += [Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT]
        yield from (Action(kind, stage, batch) for batch in range(schedule.num_micro_batches) for kind in kinds)
        yield Action(Kind.STEP, stage, EVERY_MICRO_BATCH)


def _parts(action: Action) -> list[Action]:
    """Returns the two gradients of a backward, or else the action itself."""
    if action.kind is Kind.BACKWARD:
        return [action._replace(kind=kind) for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)]
    return [action]


def _misplaced_reason(schedule: Schedule, rank: int, action: Action) -> str:
    rank_of = schedule.placement.rank_of
    if not 0 <= action.stage < len(rank_of):
        return f"there are stages 0 to {len(rank_of) - 1} only"
    if rank_of[action.stage] != rank:
        return f"stage {action.stage} is on rank {rank_of[action.stage]}"
    if action.kind is not Kind.STEP and not 0 <= action.micro_batch < schedule.num_micro_batches:
        return f"there are micro-batches 0 to {schedule.num_micro_batches - 1} only"
    return "there is nothing to transfer: both stages are on this rank, or there is no stage on the other side"


def _local_dependencies(action: Action, num_micro_batches: int) -> list[Action]:
    """Returns the earlier actions of its own rank that an action needs."""
    kind, stage, micro_batch = action
    if kind is Kind.STEP:
        return [Action(Kind.WEIGHT_GRADIENT, stage, batch) for batch in range(num_micro_batches)]
    return [Action(needed, stage + distance, micro_batch) for needed, distance in _LOCAL_DEPENDENCIES.get(kind, ())]


def _check_order_on_links(schedule: Schedule) -> None:
    """Checks that a rank receives from another in the order in which the other sends."""
    rank_of = schedule.placement.rank_of
    sent: dict[tuple[int, int], deque[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent.setdefault((rank, rank_of[matching_transfer(action).stage]), deque()).append(action)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in RECEIVES:
                send = matching_transfer(action)
                peer = rank_of[send.stage]
                arriving = sent[peer, rank].popleft()
                if arriving != send:
                    raise ScheduleError(
                        f"would receive {arriving} of rank {peer}, which sends that before {send}; "
                        "receive in the order of the sends",
                        rank,
                        action,
                    )


def _check_progress(schedule: Schedule, transport: Transport) -> None:
    """Runs the lists, each rank while it can; ranks that are not done at the end wait in a circle."""
    positions = [0] * schedule.num_ranks
    done: set[Action] = set()
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions) and _blocker(schedule, transport, rank, positions, done) is None:
                done.add(actions[positions[rank]])
                positions[rank] += 1
                moving = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if positions[rank] < len(actions)]
    if stuck:
        waits = []
        for rank in stuck:
            action = schedule.actions[rank][positions[rank]]
            needed = _blocker(schedule, transport, rank, positions, done)
            assert needed is not None
            peer = schedule.placement.rank_of[needed.stage]
            waits.append(f"rank {rank} waits at {action} for {needed} of rank {peer}")
        raise DeadlockError(
            f"{schedule.name} deadlocks with {transport} transfers: {'; '.join(waits)}",
            stuck[0],
            schedule.actions[stuck[0]][positions[stuck[0]]],
        )


def _blocker(
    schedule: Schedule, transport: Transport, rank: int, positions: list[int], done: set[Action]
) -> Action | None:
    """Returns the action of another rank for which the next action of a rank waits, if any."""
    action = schedule.actions[rank][positions[rank]]
    if transport == "posted":
        needed = needed_send(action, schedule.placement.rank_of)
        return None if needed in done else needed
    if action.kind not in (RECEIVES if transport == "buffered" else TRANSFERS):
        return None
    other = matching_transfer(action)
    peer = schedule.placement.rank_of[other.stage]
    begins = [*schedule.actions[peer][positions[peer] : positions[peer] + 1]] == [other]
    return None if other in done or (transport == "rendezvous" and begins) else other


def needed_send(action: Action, rank_of: tuple[int, ...]) -> Action | None:
    """Returns the send of another rank whose tensor a computation needs."""
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD and stage and rank_of[stage - 1] != rank_of[stage]:
        return Action(Kind.SEND_ACTIVATION, stage - 1, micro_batch)
    has_next = stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]
    if kind in GIVES_INPUT_GRADIENT and has_next:
        return Action(Kind.SEND_GRADIENT, stage + 1, micro_batch)
    return None


def _check_memory(schedule: Schedule, rank: int, cap: float) -> None:
    num_stages, live = len(schedule.placement.stages_of[rank]), 0
    for action in schedule.actions[rank]:
        live += live_change(action)
        if live > cap * num_stages + 1e-9:
            raise MemoryCapError(
                f"holds {live / num_stages:g} micro-batches (in model equivalents) where {cap:g} fit; "
                f"write memory_cap={live / num_stages:g} or more, or let solve(...) find a schedule for {cap:g}",
                rank,
                action,
            )
