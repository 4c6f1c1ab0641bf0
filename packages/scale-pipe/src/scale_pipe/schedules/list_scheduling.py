"""List scheduling: a free rank starts the ready action with the smallest priority number.

The schedule follows from one number per action. A search over these numbers finds schedules that no search over
orders reaches in as many steps, since one number moves many actions and the memory cap is kept throughout.

Actions are integers here: kind k (0 forward, 1 input gradient, 2 weight gradient) on stage s and micro-batch m has the
code (k S + s) M + m. `evaluate` is the plain evaluation of such orders; the solver has a faster one, which is tested
with it, and `simulate` computes the same times from schedules.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Orders

KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
ROUNDING = 1e-9
STALLS_PER_RANK = 50

Codes = list[list[int]]
"""By rank the codes of what it computes, in order."""


@dataclass(frozen=True)
class Problem:
    """A pipeline to be scheduled: placement, costs and memory caps, with the costs listed by code."""

    placement: StagePlacement
    num_micro_batches: int
    costs: Costs
    caps: tuple[int, ...]  # By rank, how many (stage, micro-batch) may be live.
    sources: list[int]  # By code, that of the neighbor's action, or last stage's forward, that it needs; or -1.
    channels: list[int]  # By code, the directed link that its result passes; -1 where it stays on its rank.
    delays: list[float]  # By code, the time of that link.
    owners: list[int]  # By code, the rank.

    @classmethod
    def build(cls, placement: StagePlacement, num_micro_batches: int, costs: Costs, caps: Sequence[int]) -> Problem:
        """Returns the problem; each cap is at least the number of the rank's stages."""
        costs.check_for(placement)
        rank_of, num_stages, size = placement.rank_of, placement.num_stages, placement.num_stages * num_micro_batches
        assert all(cap >= len(stages) for cap, stages in zip(caps, placement.stages_of, strict=True))
        sources, channels, delays = [-1] * (3 * size), [-1] * (3 * size), [0.0] * (3 * size)
        for forward in range(size):
            stage, gradient = forward // num_micro_batches, forward + size
            if stage:
                sources[forward] = forward - num_micro_batches
            sources[gradient] = gradient + num_micro_batches if stage + 1 < num_stages else forward
            for code, neighbor in ((forward, stage + 1), (gradient, stage - 1)):
                if 0 <= neighbor < num_stages and rank_of[neighbor] != rank_of[stage]:
                    delays[code] = costs.link[min(stage, neighbor)]
                    channels[code] = rank_of[stage] * placement.num_ranks + rank_of[neighbor]
        owners = [rank_of[code // num_micro_batches % num_stages] for code in range(3 * size)]
        return cls(placement, num_micro_batches, costs, tuple(caps), sources, channels, delays, owners)

    @cached_property
    def durations(self) -> list[float]:
        """By code, the time of the computation."""
        by_kind = (self.costs.forward, self.costs.input_gradient, self.costs.weight_gradient)
        return [time for times in by_kind for time in times for _ in range(self.num_micro_batches)]

    @cached_property
    def rank_work(self) -> tuple[float, ...]:
        """By rank, the time of all its computations."""
        return tuple(self.num_micro_batches * sum(map(self.costs.stage_time, s)) for s in self.placement.stages_of)

    @cached_property
    def has_link_times(self) -> bool:
        """Whether any transfer takes time."""
        return any(self.delays)

    @cached_property
    def size(self) -> int:
        """The number of (stage, micro-batch): codes of two kinds differ by multiples of it."""
        return self.placement.num_stages * self.num_micro_batches

    def has_weight_gradients(self, orders: Codes) -> bool:
        """Returns whether orders are complete; partial ones lack their weight gradients."""
        return len(orders[0]) > 2 * self.num_micro_batches * len(self.placement.stages_of[0])

    def action(self, code: int) -> Action:
        """Returns the action of a code."""
        kind, remainder = divmod(code, self.size)
        return Action(KINDS[kind], *divmod(remainder, self.num_micro_batches))

    def orders(self, codes: Codes) -> list[list[Action]]:
        """Returns by rank the actions of codes."""
        return [[self.action(code) for code in order] for order in codes]

    def codes(self, orders: Orders) -> Codes:
        """Returns by rank the codes of actions; a backward becomes its two gradients."""
        codes_of_rank: Codes = []
        for order in orders:
            codes_of_rank.append([])
            for kind, stage, micro_batch in order:
                numbers = (1, 2) if kind is Kind.BACKWARD else (KINDS.index(kind),)
                codes_of_rank[-1] += [
                    number * self.size + stage * self.num_micro_batches + micro_batch for number in numbers
                ]
        return codes_of_rank


def evaluate(problem: Problem, codes: Codes) -> list[float]:
    """Returns by rank when complete orders, which never deadlock, end; each action starts as soon as it can."""
    sources, durations, delays, channels = problem.sources, problem.durations, problem.delays, problem.channels
    num_ranks = len(codes)
    arrivals = [-1.0] * len(sources) + [0.0]  # The last one is for the source -1.
    positions, clocks = [0] * num_ranks, [0.0] * num_ranks
    links_free = [0.0] * (num_ranks * num_ranks)
    waiting: dict[int, int] = {}
    stack = list(range(num_ranks - 1, -1, -1))
    while stack:
        rank = stack.pop()
        order, position, clock = codes[rank], positions[rank], clocks[rank]
        while position < len(order):
            code = order[position]
            arrival = arrivals[sources[code]]
            if arrival < 0:
                waiting[sources[code]] = rank
                break
            clock = arrivals[code] = max(clock, arrival) + durations[code]
            if delays[code]:
                channel = channels[code]
                arrivals[code] = links_free[channel] = max(clock, links_free[channel]) + delays[code]
            position += 1
            if code in waiting:
                stack.append(waiting.pop(code))
        positions[rank], clocks[rank] = position, clock
    assert positions == list(map(len, codes)), "these orders deadlock"
    return clocks


def list_schedule(problem: Problem, priorities: Sequence[float], patience: float) -> tuple[Codes, float]:
    """Returns the orders that follow from priorities (by code), and their makespan.

    Stages do their micro-batches in order, and a forward of the j-th of a rank's v stages starts only while v - 1 - j
    places stay free, so that younger micro-batches leave a place to older ones. A rank does not start a weight gradient
    but waits where something arrives within `patience` (0 to 1) of its time. The makespan is infinite, and the orders
    are not complete, where no rank finds anything to do any more.
    """
    size, num_micro_batches, stages_of = problem.size, problem.num_micro_batches, problem.placement.stages_of
    sources, durations, delays = problem.sources, problem.durations, problem.delays
    arrivals = [-1.0] * (3 * size) + [0.0]  # The last one is for the source -1 of a first stage.
    # By kind and stage, how many micro-batches are done.
    num_done = forwards, gradients, weights = [[0] * problem.placement.num_stages for _ in range(3)]
    room = [cap - len(stages) for cap, stages in zip(problem.caps, stages_of, strict=True)]
    links_free = [0.0] * len(stages_of) ** 2
    orders: Codes = [[] for _ in stages_of]
    free = [(0.0, rank) for rank in range(len(stages_of))]  # A heap.
    makespan, stalls = 0.0, 0
    while free:
        now, rank = heapq.heappop(free)
        best, priority, next_arrival, limit = -1, inf, inf, now + ROUNDING
        for index, stage in enumerate(stages_of[rank]):
            first = stage * num_micro_batches
            forward, gradient, weight = forwards[stage], gradients[stage], weights[stage]
            candidates = [size + first + gradient] if gradient < forward else []
            if forward < num_micro_batches and room[rank] + index >= 0:
                candidates.append(first + forward)
            for code in candidates:
                arrival = arrivals[sources[code]]
                if limit >= arrival >= 0:
                    if priorities[code] < priority:
                        best, priority = code, priorities[code]
                elif limit < arrival < next_arrival:
                    next_arrival = arrival
            if weight < gradient:
                code = 2 * size + first + weight
                if priorities[code] < priority and now + durations[code] * patience < next_arrival:
                    best, priority = code, priorities[code]
        if best >= 0:
            kind, remainder = divmod(best, size)
            num_done[kind][remainder // num_micro_batches] += 1
            room[rank] += kind - 1  # A forward takes a place, a weight gradient frees one.
            orders[rank].append(best)
            end = arrivals[best] = now + durations[best]
            if delays[best]:
                channel = problem.channels[best]
                arrivals[best] = links_free[channel] = max(end, links_free[channel]) + delays[best]
            makespan, stalls = max(makespan, end), 0
            heapq.heappush(free, (end, rank))
        elif len(orders[rank]) < 3 * num_micro_batches * len(stages_of[rank]):
            stalls += 1
            if stalls > STALLS_PER_RANK * len(stages_of):
                return orders, inf
            heapq.heappush(free, (_next_event(free, now, next_arrival), rank))
    return orders, makespan


def _next_event(free: list[tuple[float, int]], now: float, next_arrival: float) -> float:
    """Returns when a rank that can do nothing looks again: at the next arrival, or when another rank is free."""
    event = min(next_arrival, min((time for time, _ in free if time > now), default=inf))
    if event < inf:
        return event
    # All others are free at this very moment: this rank looks again after they have started something.
    assert free, "a list schedule never deadlocks"
    return now + ROUNDING
