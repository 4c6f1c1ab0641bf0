"""Evaluation of the orders that the solver changes: complete ones, or partial ones without weight gradients.

No rank waits for a weight gradient, so a search need not place them: a rank computes the oldest pending one where it
would be idle for as long, or where a forward needs the place that it frees, and the rest at the end. What is left to
search, the *partial order* of forwards and input gradients, is a third shorter, a step in it moves everything that
depends on it, and it keeps the memory cap if a count of its forwards and input gradients does. Complete orders reach
the optimum where times are such that a weight gradient had better make others wait a little.

All micro-batches of a stage cost the same, so each stage does them in order: exchanging two never helps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from scale_pipe.schedules.list_scheduling import ROUNDING, Codes, Problem

FIXED_VISITS = 30
"""The fixed cost of an evaluation, in visited actions."""


@dataclass(frozen=True)
class Timing:
    """The ends of evaluated orders, with the state from which an evaluation of neighboring orders can begin."""

    makespan: float
    rank_ends: tuple[float, ...]
    ends: list[float]  # By code.
    arrivals: list[float]  # By code, when the result is where it is needed; and one 0 for the source -1.
    # By rank, positions in its order:
    input_gradients_at: list[list[int]]  # Of the input gradients; empty for complete orders.
    weights_before: list[list[int]]  # Before which each weight gradient is inserted, in order, but those at the end.
    idle_before: list[list[int]]  # Before which it is idle.
    idle_until: list[list[float]]  # For how long in all, up to each of these.


@dataclass(frozen=True)
class Change:
    """Where orders differ from evaluated ones: in one rank's order, from a position on."""

    timing: Timing  # Of the evaluated orders.
    rank: int
    position: int


def renumber_micro_batches(order: Sequence[int], num_micro_batches: int) -> list[int]:
    """Returns an order, or a part of one, with the micro-batches of each stage in order."""
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


def drop_weight_gradients(problem: Problem, orders: Codes) -> Codes:
    """Returns the partial orders of complete ones."""
    return [[code for code in order if code < 2 * problem.size] for order in orders]


def insert_weight_gradients(problem: Problem, orders: Codes, timing: Timing) -> Codes:
    """Returns complete orders, with the weight gradients where the evaluation `timing` has put them."""
    complete: Codes = []
    for order, gradients, places in zip(orders, timing.input_gradients_at, timing.weights_before, strict=True):
        weights = [order[position] + problem.size for position in gradients]
        num_done = 0
        complete.append([])
        for position, code in enumerate(order):
            while num_done < len(places) and places[num_done] == position:
                complete[-1].append(weights[num_done])
                num_done += 1
            complete[-1].append(code)
        complete[-1] += weights[num_done:]
    return complete


class Search:
    """Evaluates orders of one problem, keeps the best complete ones, and counts the visited actions."""

    def __init__(self, problem: Problem, goal: float) -> None:
        self.problem = problem
        self.goal = goal  # A lower bound.
        self.makespan = math.inf
        self.codes: Codes = []
        self.visits = 0  # With `FIXED_VISITS` for each evaluation itself.

    @property
    def done(self) -> bool:
        """Whether nothing better is possible."""
        return self.makespan <= self.goal + ROUNDING

    def evaluate(
        self, orders: Codes, limit: float = math.inf, patience: float = 1.0, change: Change | None = None
    ) -> Timing | None:
        """Returns when orders are over, each action starting as soon as its rank and its source allow.

        Forward, input gradient and weight gradient of a stage and micro-batch are in this order, and the cap is kept.
        A weight gradient is inserted where the rank would be idle for at least `patience` (up to 1) of its time.
        `change` says where orders differ from ones evaluated with the same patience: actions before it are not
        evaluated again.

        None where ranks wait in a circle, or where some rank is idle for so long that the makespan exceeds `limit`.
        """
        run = _Run(self.problem, orders, limit, patience)
        if change is not None:
            run.skip_to(change)
        self.visits += FIXED_VISITS - sum(run.positions)
        ready = list(range(len(orders) - 1, -1, -1))
        in_time = True
        while ready and in_time:
            in_time = run.advance(ready.pop(), ready)
        self.visits += sum(run.positions)
        timing = run.timing() if in_time else None
        if timing is not None and timing.makespan < self.makespan - ROUNDING:
            self.makespan, self.codes = timing.makespan, insert_weight_gradients(self.problem, orders, timing)
        return timing


class _Run:
    """One evaluation; see `Timing` for the fields it shares."""

    def __init__(self, problem: Problem, orders: Codes, limit: float, patience: float) -> None:
        ranks = range(len(orders))
        self.problem, self.orders, self.patience = problem, orders, patience
        self.inserts_weights = not problem.has_weight_gradients(orders)
        self.max_idle = [limit - work + ROUNDING for work in problem.rank_work]
        self.arrivals = [-1.0] * len(problem.durations) + [0.0]
        self.ends = self.arrivals[:] if problem.has_link_times else self.arrivals
        self.links_free = [0.0] * len(ranks) ** 2
        self.input_gradients_at: list[list[int]] = [[] for _ in ranks]
        self.weights_before: list[list[int]] = [[] for _ in ranks]
        self.idle_before: list[list[int]] = [[] for _ in ranks]
        self.idle_until: list[list[float]] = [[] for _ in ranks]
        self.positions = [0] * len(ranks)  # Of the next action of each rank.
        self.clocks = [0.0] * len(ranks)  # When the action before it is over.
        self.waiting: dict[int, int] = {}  # By code, the rank that waits for its result.

    def skip_to(self, change: Change) -> None:
        """Takes over the actions that end before a change begins."""
        base, orders = change.timing, self.orders
        ends, changed = base.ends, orders[change.rank]
        begin = ends[changed[change.position - 1]] if change.position else 0.0
        positions = [bisect_left(order, begin, key=ends.__getitem__) for order in orders]
        positions[change.rank] = change.position
        self.positions, self.arrivals = positions, base.arrivals[:]
        self.clocks = [ends[order[index - 1]] if index else 0.0 for order, index in zip(orders, positions, strict=True)]
        for order, position in zip(orders, positions, strict=True):
            if self.problem.has_link_times:
                for code in order[:position]:
                    # The channel -1, for none, is the last one: of a rank to itself.
                    self.links_free[self.problem.channels[code]] = self.arrivals[code]
            for code in order[position:]:
                self.arrivals[code] = -1.0
        self.ends = ends[:] if self.problem.has_link_times else self.arrivals
        self.input_gradients_at = _before(positions, base.input_gradients_at)
        self.weights_before = _before(positions, base.weights_before)
        self.idle_before = _before(positions, base.idle_before)
        pairs = zip(base.idle_until, self.idle_before, strict=True)
        self.idle_until = [idle[: len(before)] for idle, before in pairs]

    def advance(self, rank: int, ready: list[int]) -> bool:
        """Runs a rank until it waits, and adds ranks that need not wait any more; False where it was idle too long."""
        problem, order, arrivals, ends = self.problem, self.orders[rank], self.arrivals, self.ends
        size, durations, sources, delays = problem.size, problem.durations, problem.sources, problem.delays
        position, clock, length = self.positions[rank], self.clocks[rank], len(order)
        gradients, weights = self.input_gradients_at[rank], self.weights_before[rank]
        num_gradients, num_weights = len(gradients), len(weights)
        room = problem.caps[rank] - position + num_gradients + num_weights
        patience, waiting, in_time = self.patience, self.waiting, True
        while position < length:
            code = order[position]
            source = sources[code]
            arrival = arrivals[source]  # The last one, 0, for the source -1.
            if arrival < 0.0:
                waiting[source] = rank
                break
            while num_weights < num_gradients:
                weight = durations[order[gradients[num_weights]] + size]
                if arrival - clock < weight * patience - ROUNDING and (room or code >= size):
                    break
                clock += weight
                weights.append(position)
                num_weights += 1
                room += 1
            if arrival > clock:
                in_time = self._idle(rank, position, arrival - clock)
                if not in_time:
                    break
                clock = arrival
            if code < size:
                room -= 1
            elif self.inserts_weights:
                gradients.append(position)
                num_gradients += 1
            clock += durations[code]
            arrivals[code] = clock
            if ends is not arrivals:
                ends[code] = clock
                if delays[code]:
                    channel = problem.channels[code]
                    arrivals[code] = self.links_free[channel] = max(clock, self.links_free[channel]) + delays[code]
            position += 1
            if code in waiting:
                ready.append(waiting.pop(code))
        self.positions[rank], self.clocks[rank] = position, clock
        return in_time

    def _idle(self, rank: int, position: int, duration: float) -> bool:
        """Notes that a rank is idle before a position; False where it has been idle for too long."""
        idle = self.idle_until[rank]
        total = duration + (idle[-1] if idle else 0.0)
        if total > self.max_idle[rank]:
            return False
        self.idle_before[rank].append(position)
        idle.append(total)
        return True

    def timing(self) -> Timing | None:
        """Returns the result, or None if some actions are not done."""
        rank_ends = []
        for rank, order in enumerate(self.orders):
            if self.positions[rank] < len(order):
                return None
            remaining = self.input_gradients_at[rank][len(self.weights_before[rank]) :]
            rank_ends.append(
                self.clocks[rank] + sum(self.problem.durations[order[index] + self.problem.size] for index in remaining)
            )
        return Timing(
            max(rank_ends),
            tuple(rank_ends),
            self.ends,
            self.arrivals,
            self.input_gradients_at,
            self.weights_before,
            self.idle_before,
            self.idle_until,
        )


def _before(ends: list[int], positions_by_rank: list[list[int]]) -> list[list[int]]:
    """Returns by rank the sorted positions before an end."""
    return [positions[: bisect_left(positions, end)] for end, positions in zip(ends, positions_by_rank, strict=True)]
