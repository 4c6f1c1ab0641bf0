"""Proves of a schedule that it can run: every action once, each dependency met, no deadlock, the memory cap kept.

Whether ranks wait for one another for ever depends on how tensors travel. There are three models:

- `"posted"`: sends and receives only start, and an action waits for the tensor that it needs. Tensors are told apart
  by their tags, so their order on a link is free. So it is on gloo.
- `"buffered"`: a send returns at once, a receive waits for its tensor; on a link, tensors arrive in the order of their
  sends.
- `"rendezvous"`: a send returns when its receive has begun, and the other way round. So it may be on NCCL, where all
  transfers of a rank pass one after the other. What passes here passes everywhere.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from scale_pipe.schedules.action import COMPUTES, EVERY_MICRO_BATCH, FREES, RECEIVES, SENDS, Action, Kind
from scale_pipe.schedules.schedule import DeadlockError, MemoryCapError, Schedule, ScheduleError

Transport = Literal["posted", "buffered", "rendezvous"]


def validate(
    schedule: Schedule,
    *,
    memory_cap: float | Sequence[float] | None = None,
    transport: Transport = "rendezvous",
) -> None:
    """Returns if the schedule can run, and raises what is wrong with it otherwise.

    Args:
        schedule: Any.
        memory_cap: How many micro-batches may be live on a rank, or by rank, in model equivalents: one stands for one
            micro-batch on all stages of the rank. None for no limit.
        transport: How tensors travel; the strictest model by default.

    Raises:
        ScheduleError: An action is missing, too many, on the wrong rank, or before what it needs.
        DeadlockError: Ranks wait for one another.
        MemoryCapError: A rank holds more than the cap.
        ValueError: The transport is none of the three, or there is not one cap for each rank.
    """
    if transport not in get_args(Transport):
        raise ValueError(f"expected transport to be one of {', '.join(get_args(Transport))}, but got {transport!r}")
    caps = caps_by_rank(memory_cap, schedule.num_ranks)
    _check_each_once(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_local_order(schedule, rank, actions)
    if transport == "buffered":
        _check_order_on_links(schedule)
    _check_progress(schedule, transport)
    for rank, cap in enumerate(caps):
        _check_memory(schedule, rank, cap)


def expected_actions(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yields what a rank has to do in a step, with the backward as its two gradients.

    Args:
        schedule: Read for its placement and number of micro-batches.
        rank: Which.
    """
    rank_of = schedule.placement.rank_of
    for stage in schedule.placement.stages_of[rank]:
        before = stage > 0 and rank_of[stage - 1] != rank
        after = stage + 1 < len(rank_of) and rank_of[stage + 1] != rank
        kinds = [Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT]
        kinds += [Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT] * before
        kinds += [Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT] * after
        for micro_batch in range(schedule.num_micro_batches):
            yield from (Action(kind, stage, micro_batch) for kind in kinds)
        yield Action(Kind.STEP, stage, EVERY_MICRO_BATCH)


def caps_by_rank(memory_cap: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    """Returns the cap of each rank; infinite where there is none.

    Args:
        memory_cap: One for all, one for each, or None.
        num_ranks: How many ranks there are.

    Raises:
        ValueError: There is not one for each rank, or one is not positive.
    """
    if memory_cap is None:
        return (float("inf"),) * num_ranks
    caps = (float(memory_cap),) * num_ranks if isinstance(memory_cap, int | float) else tuple(map(float, memory_cap))
    if len(caps) != num_ranks:
        raise ValueError(f"expected a memory_cap for each of {num_ranks} ranks, or one number, but got {len(caps)}")
    for rank, cap in enumerate(caps):
        if not cap > 0:
            raise ValueError(f"a memory_cap is positive, but that of rank {rank} is {cap}")
    return caps


def _check_each_once(schedule: Schedule) -> None:
    """Each action stands once on its rank, and no other stands anywhere."""
    for rank, actions in enumerate(schedule.actions):
        expected = set(expected_actions(schedule, rank))
        found: Counter[Action] = Counter()
        for action in actions:
            parts = [action]
            if action.kind is Kind.BACKWARD:
                parts = [action._replace(kind=kind) for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)]
            for part in parts:
                found[part] += 1
                if part not in expected:
                    raise ScheduleError(_why_not_here(schedule, rank, action), rank, action)
                if found[part] > 1:
                    raise ScheduleError("stands here a second time; each action is done once in a step", rank, action)
        for action in expected_actions(schedule, rank):
            if not found[action]:
                raise ScheduleError("is missing; weave(...) makes whole schedules of what ranks compute", rank, action)


def _why_not_here(schedule: Schedule, rank: int, action: Action) -> str:
    rank_of = schedule.placement.rank_of
    if not 0 <= action.stage < len(rank_of):
        return f"there are stages 0 to {len(rank_of) - 1} only"
    if rank_of[action.stage] != rank:
        return f"stage {action.stage} stands on rank {rank_of[action.stage]}"
    if action.kind is not Kind.STEP and not 0 <= action.micro_batch < schedule.num_micro_batches:
        return f"there are micro-batches 0 to {schedule.num_micro_batches - 1} only"
    return "there is nothing to transfer: both stages stand on this rank, or there is no stage on the other side"


def _check_local_order(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """What an action needs of its own rank stands before it."""
    done: set[Action] = set()
    expected = set(expected_actions(schedule, rank))
    for action in actions:
        for needed in _needs_here(action, schedule.num_micro_batches):
            if needed in expected and needed not in done:
                raise ScheduleError(f"needs {needed}, which stands behind it", rank, action)
        if action.kind is Kind.BACKWARD:
            done |= {action._replace(kind=kind) for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)}
        done.add(action)


def _needs_here(action: Action, num_micro_batches: int) -> list[Action]:
    """Returns what an action needs of its own rank, where its rank does that at all."""
    kind, stage, micro_batch = action
    match kind:
        case Kind.FORWARD:
            return [Action(Kind.RECEIVE_ACTIVATION, stage, micro_batch), Action(Kind.FORWARD, stage - 1, micro_batch)]
        case Kind.INPUT_GRADIENT | Kind.BACKWARD:
            return [
                Action(Kind.FORWARD, stage, micro_batch),
                Action(Kind.RECEIVE_GRADIENT, stage, micro_batch),
                Action(Kind.INPUT_GRADIENT, stage + 1, micro_batch),
            ]
        case Kind.WEIGHT_GRADIENT | Kind.SEND_GRADIENT:
            return [Action(Kind.INPUT_GRADIENT, stage, micro_batch)]
        case Kind.SEND_ACTIVATION:
            return [Action(Kind.FORWARD, stage, micro_batch)]
        case Kind.STEP:
            return [Action(Kind.WEIGHT_GRADIENT, stage, batch) for batch in range(num_micro_batches)]
        case _:
            return []


def partner(action: Action) -> Action:
    """Returns the receive of a send, or the send of a receive.

    Args:
        action: A transfer.
    """
    kind, stage, micro_batch = action
    match kind:
        case Kind.SEND_ACTIVATION:
            return Action(Kind.RECEIVE_ACTIVATION, stage + 1, micro_batch)
        case Kind.RECEIVE_ACTIVATION:
            return Action(Kind.SEND_ACTIVATION, stage - 1, micro_batch)
        case Kind.SEND_GRADIENT:
            return Action(Kind.RECEIVE_GRADIENT, stage - 1, micro_batch)
        case _:
            assert kind is Kind.RECEIVE_GRADIENT
            return Action(Kind.SEND_GRADIENT, stage + 1, micro_batch)


def _check_order_on_links(schedule: Schedule) -> None:
    """What a rank receives from another stands in the order in which the other sends it."""
    rank_of = schedule.placement.rank_of
    sent: dict[tuple[int, int], deque[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent.setdefault((rank, rank_of[partner(action).stage]), deque()).append(action)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in RECEIVES:
                peer = rank_of[partner(action).stage]
                arriving = sent[peer, rank].popleft()
                if arriving != partner(action):
                    raise ScheduleError(
                        f"would be given {arriving} of rank {peer}, which sends that before {partner(action)}; "
                        "receive in the order of the sends",
                        rank,
                        action,
                    )


def _check_progress(schedule: Schedule, transport: Transport) -> None:
    """Follows the lists: each rank goes on while it can; whoever is left waits in a circle."""
    rank_of = schedule.placement.rank_of
    positions = [0] * schedule.num_ranks
    done: set[Action] = set()

    def blocker(rank: int) -> Action | None:
        """Returns what the next action of a rank waits for."""
        action = schedule.actions[rank][positions[rank]]
        wanted: list[Action] = []
        if action.kind in RECEIVES and transport == "buffered":
            wanted = [partner(action)]
        elif action.kind in COMPUTES and transport == "posted":
            receives = [need for need in _needs_here(action, schedule.num_micro_batches) if need.kind in RECEIVES]
            wanted = [partner(receive) for receive in receives if receive in done]
        elif action.kind in SENDS | RECEIVES and transport == "rendezvous":
            other = partner(action)
            peer = rank_of[other.stage]
            at_peer = positions[peer] < len(schedule.actions[peer]) and schedule.actions[peer][positions[peer]]
            wanted = [] if at_peer == other or other in done else [other]
        return next((action for action in wanted if action not in done), None)

    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions) and blocker(rank) is None:
                done.add(actions[positions[rank]])
                positions[rank] += 1
                moving = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if positions[rank] < len(actions)]
    if stuck:
        waits = []
        for rank in stuck:
            needed = blocker(rank)
            assert needed is not None
            waits.append(
                f"rank {rank} at {schedule.actions[rank][positions[rank]]} for {needed} of rank {rank_of[needed.stage]}"
            )
        raise DeadlockError(
            f"{schedule.name} never ends where transfers are {transport}; there wait {'; '.join(waits)}",
            stuck[0],
            schedule.actions[stuck[0]][positions[stuck[0]]],
        )


def _check_memory(schedule: Schedule, rank: int, cap: float) -> None:
    num_stages, live = len(schedule.placement.stages_of[rank]), 0
    for action in schedule.actions[rank]:
        live += (action.kind is Kind.FORWARD) - (action.kind in FREES)
        if live > cap * num_stages + 1e-9:
            raise MemoryCapError(
                f"holds {live / num_stages:g} micro-batches (in model equivalents) where {cap:g} fit; "
                f"write memory_cap={live / num_stages:g} or more, or let solve(...) find a schedule for {cap:g}",
                rank,
                action,
            )
