"""The orders that a search changes, in time: whole ones, or backbones, which leave weight gradients out.

Nobody waits for a weight gradient, so a search need not place them: a rank computes the oldest one that it owes where
it would be idle for as long, or where a forward needs the place that it frees, and the rest at the end. What is left to
search, the *backbone* of forwards and input gradients, is a third shorter, a step in it moves everything that depends
on it, and no step breaks the memory cap but those that a count of forwards and input gradients tells. Whole orders
reach the last bit where times are such that a weight gradient had better make others wait a little.

All micro-batches of a stage cost the same, so each stage does them in order: exchanging two never helps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from scale_pipe.schedules.solver.problem import ROUNDING, Codes, Problem

FIXED_VISITS = 30
"""What an evaluation costs beside the actions that it passes, in such actions."""


@dataclass(frozen=True)
class Timing:
    """Orders in time, with what an evaluation of neighbouring ones needs to begin in the middle.

    Attributes:
        makespan: The end of the last action.
        rank_ends: By rank, the end of its last action.
        ends: By code.
        arrivals: By code, when the result is where it is needed; one more, 0, for those that need nothing.
        owed_at: By rank, the positions of the input gradients; empty for whole orders.
        paid_at: By rank, before which position each weight gradient is put, in order, without those at the end.
        gaps_at: By rank, before which positions it is idle.
        idle: By rank, for how long it has been idle after each of these gaps.
    """

    makespan: float
    rank_ends: tuple[float, ...]
    ends: list[float]
    arrivals: list[float]
    owed_at: list[list[int]]
    paid_at: list[list[int]]
    gaps_at: list[list[int]]
    idle: list[list[float]]


@dataclass(frozen=True)
class Change:
    """Where orders differ from others that were evaluated.

    Attributes:
        timing: Of the others.
        rank: Whose order differs.
        position: From where on.
    """

    timing: Timing
    rank: int
    position: int


def in_order(order: Sequence[int], num_micro_batches: int) -> list[int]:
    """Returns an order, or a part of one, with each stage's micro-batches in order.

    Args:
        order: Codes.
        num_micro_batches: M.
    """
    following: dict[int, int] = {}
    for code in order:
        first = code - code % num_micro_batches
        if following.get(first, code) >= code:
            following[first] = code
    renumbered = []
    for code in order:
        first = code - code % num_micro_batches
        renumbered.append(following[first])
        following[first] += 1
    return renumbered


def backbone_of(problem: Problem, orders: Codes) -> Codes:
    """Returns whole orders without their weight gradients.

    Args:
        problem: Any.
        orders: By rank.
    """
    return [[code for code in order if code < 2 * problem.size] for order in orders]


def whole_orders(problem: Problem, orders: Codes, timing: Timing) -> Codes:
    """Returns orders with the weight gradients where the evaluation has put them.

    Args:
        problem: Any.
        orders: By rank; a backbone, or whole already.
        timing: Their own.
    """
    whole: Codes = []
    for order, owed_at, paid_at in zip(orders, timing.owed_at, timing.paid_at, strict=True):
        weights = [order[position] + problem.size for position in owed_at]
        num_paid = 0
        whole.append([])
        for position, code in enumerate(order):
            while num_paid < len(paid_at) and paid_at[num_paid] == position:
                whole[-1].append(weights[num_paid])
                num_paid += 1
            whole[-1].append(code)
        whole[-1] += weights[num_paid:]
    return whole


class Evaluator:
    """Evaluates orders for one problem, and counts.

    Attributes:
        problem: With the true costs.
        visits: How many actions were passed, an evaluation itself counting `FIXED_VISITS`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.visits = 0

    def time(
        self,
        orders: Codes,
        limit: float = math.inf,
        patience: float = 1.0,
        change: Change | None = None,
    ) -> Timing | None:
        """Returns orders in time, each action starting as soon as its rank and its source allow.

        Args:
            orders: By rank, whole or a backbone. For one stage and micro-batch, forward, input gradient and weight
                gradient stand in this order, and no more than the cap are ever between the first and the last of them.
            limit: What the makespan may be: the evaluation ends where a rank has been idle for longer than that allows.
            patience: Up to 1: a weight gradient is put where the rank would be idle for this share of its time.
            change: Where they differ from others that were evaluated with the same patience, if they do: what is
                before that is not computed again.

        Returns:
            None where ranks wait for one another in a circle, or where the makespan is above the limit.
        """
        problem, size, is_whole = self.problem, self.problem.size, self.problem.is_whole(orders)
        durations, sources, delays, channels = problem.durations, problem.sources, problem.delays, problem.channels
        may_idle = [limit - work + ROUNDING for work in problem.works]
        state = _State.at_first(problem) if change is None else _State.at_change(problem, orders, change)
        arrivals, ends, links_free = state.arrivals, state.ends, state.links_free
        self.visits += FIXED_VISITS - sum(state.positions)
        waiting: dict[int, int] = {}
        stack = list(range(len(orders) - 1, -1, -1))
        while stack:
            rank = stack.pop()
            order, position, clock = orders[rank], state.positions[rank], state.clocks[rank]
            owed, paid, length = state.owed_at[rank], state.paid_at[rank], len(order)
            num_owed, num_paid = len(owed), len(paid)
            places = problem.caps[rank] - position + num_owed + num_paid
            while position < length:
                code = order[position]
                source = sources[code]
                arrival = arrivals[source]  # the last, 0, where there is no source: -1
                if arrival < 0.0:
                    waiting[source] = rank
                    break
                while num_paid < num_owed:
                    weight = durations[order[owed[num_paid]] + size]
                    if arrival - clock < weight * patience - ROUNDING and (places or code >= size):
                        break
                    clock += weight
                    paid.append(position)
                    num_paid += 1
                    places += 1
                if arrival > clock:
                    gaps, idle = state.gaps_at[rank], state.idle[rank]
                    total = arrival - clock + (idle[-1] if idle else 0.0)
                    if total > may_idle[rank]:
                        self.visits += sum(state.positions) - state.positions[rank] + position
                        return None
                    gaps.append(position)
                    idle.append(total)
                    clock = arrival
                if code < size:
                    places -= 1
                elif not is_whole:
                    owed.append(position)
                    num_owed += 1
                clock += durations[code]
                arrivals[code] = clock
                if ends is not arrivals:
                    ends[code] = clock
                    if delays[code]:
                        channel = channels[code]
                        arrivals[code] = links_free[channel] = max(clock, links_free[channel]) + delays[code]
                position += 1
                if code in waiting:
                    stack.append(waiting.pop(code))
            state.positions[rank] = position
            state.clocks[rank] = clock
        self.visits += sum(state.positions)
        return state.timing(problem, orders)


@dataclass
class _State:
    """An evaluation on its way; see `Timing` for what is not said here.

    Attributes:
        positions: By rank, what comes next in its order.
        clocks: By rank, when the action before is over.
        links_free: By channel, when it can carry the next tensor.
    """

    arrivals: list[float]
    ends: list[float]
    owed_at: list[list[int]]
    paid_at: list[list[int]]
    gaps_at: list[list[int]]
    idle: list[list[float]]
    positions: list[int]
    clocks: list[float]
    links_free: list[float]

    @classmethod
    def at_first(cls, problem: Problem) -> _State:
        """Returns the state in which nothing is done."""
        ranks = range(len(problem.caps))
        arrivals = [-1.0] * len(problem.durations) + [0.0]
        return cls(
            arrivals=arrivals,
            ends=arrivals[:] if problem.is_linked else arrivals,
            owed_at=[[] for _ in ranks],
            paid_at=[[] for _ in ranks],
            gaps_at=[[] for _ in ranks],
            idle=[[] for _ in ranks],
            positions=[0] * len(ranks),
            clocks=[0.0] * len(ranks),
            links_free=[0.0] * len(ranks) ** 2,
        )

    @classmethod
    def at_change(cls, problem: Problem, orders: Codes, change: Change) -> _State:
        """Returns the state when a change begins: what is over by then is as it was."""
        base = change.timing
        arrivals, ends, links_free = base.arrivals[:], base.ends, [0.0] * len(orders) ** 2
        changed = orders[change.rank]
        begin = ends[changed[change.position - 1]] if change.position else 0.0
        positions = [bisect_left(order, begin, key=ends.__getitem__) for order in orders]
        positions[change.rank] = change.position
        for order, position in zip(orders, positions, strict=True):
            if problem.is_linked:
                for code in order[:position]:
                    links_free[problem.channels[code]] = arrivals[code]  # -1, for none, is no channel of two ranks
            for code in order[position:]:
                arrivals[code] = -1.0
        gaps_at = _before(positions, base.gaps_at)
        return cls(
            arrivals=arrivals,
            ends=ends[:] if problem.is_linked else arrivals,
            owed_at=_before(positions, base.owed_at),
            paid_at=_before(positions, base.paid_at),
            gaps_at=gaps_at,
            idle=[idle[: len(gaps)] for idle, gaps in zip(base.idle, gaps_at, strict=True)],
            positions=positions,
            clocks=[ends[order[at - 1]] if at else 0.0 for order, at in zip(orders, positions, strict=True)],
            links_free=links_free,
        )

    def timing(self, problem: Problem, orders: Codes) -> Timing | None:
        """Returns the result, or None if some actions are not done."""
        rank_ends = []
        for rank, order in enumerate(orders):
            if self.positions[rank] < len(order):
                return None
            unpaid = self.owed_at[rank][len(self.paid_at[rank]) :]
            rank_ends.append(self.clocks[rank] + sum(problem.durations[order[at] + problem.size] for at in unpaid))
        ends = max(rank_ends), tuple(rank_ends), self.ends, self.arrivals
        return Timing(*ends, self.owed_at, self.paid_at, self.gaps_at, self.idle)


def _before(ends: list[int], positions_by_rank: list[list[int]]) -> list[list[int]]:
    """Returns of sorted positions those before an end, by rank."""
    return [positions[: bisect_left(positions, end)] for end, positions in zip(ends, positions_by_rank, strict=True)]
