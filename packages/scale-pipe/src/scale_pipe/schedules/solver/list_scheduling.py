"""List schedules: a rank that is free does the most urgent thing that can be done.

Urgency is a number per action, the smaller the more urgent, and the whole schedule follows from these numbers: a
search over them finds schedules that no search over orders would reach in as many steps, since one number moves many
actions and what follows keeps its memory.

Stages do their micro-batches in order, and a forward of the j-th of a rank's v stages starts only while v - 1 - j
places stay free, so that younger micro-batches leave a place to older ones. Where nothing can be done all the same, the
makespan is infinite, and callers leave that schedule out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scale_pipe.schedules.solver.problem import ROUNDING, Codes, Problem

STALLS_PER_RANK = 50


def list_schedule(problem: Problem, urgencies: Sequence[float], patience: float) -> tuple[Codes, float]:
    """Returns the schedule that follows from urgencies, and its makespan under the problem's costs.

    Args:
        problem: With caps of at least the stages of a rank.
        urgencies: By code; the smaller the sooner.
        patience: Between 0 and 1: a rank waits for what is about to arrive, instead of starting a weight gradient, if
            it arrives within this share of the weight gradient's time.

    Returns:
        An infinite makespan, and orders that are not complete, where no rank finds anything to do any more.
    """
    num_micro_batches, size = problem.num_micro_batches, problem.size
    num_ranks = problem.placement.num_ranks
    durations, sources, delays, channels = problem.durations, problem.sources, problem.delays, problem.channels
    arrivals = [-1.0] * (3 * size) + [0.0]  # The last one is what a first stage waits for: its source is -1.
    # by stage: how many micro-batches have passed its forward, its input gradient, its weight gradient
    forwards, gradients, weights = ([0] * problem.placement.num_stages for _ in range(3))
    links_free = [0.0] * (num_ranks * num_ranks)
    stages_of = problem.placement.stages_of
    places = [cap - len(stages) for cap, stages in zip(problem.caps, stages_of, strict=True)]
    left = [3 * num_micro_batches * len(stages) for stages in stages_of]
    codes: Codes = [[] for _ in range(num_ranks)]
    free = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    makespan, never, stalls = 0.0, float("inf"), 0
    while free:
        now, rank = heapq.heappop(free)
        best, urgency, soon, limit, room = -1, never, never, now + ROUNDING, places[rank]
        for index, stage in enumerate(stages_of[rank]):
            base = stage * num_micro_batches
            forward, gradient, weight = forwards[stage], gradients[stage], weights[stage]
            waiting = [size + base + gradient] if gradient < forward else []
            if forward < num_micro_batches and room + index >= 0:
                waiting.append(base + forward)
            for code in waiting:
                arrival = arrivals[sources[code]]
                if limit >= arrival >= 0:
                    if urgencies[code] < urgency:
                        best, urgency = code, urgencies[code]
                elif limit < arrival < soon:
                    soon = arrival
            if weight < gradient:
                code = 2 * size + base + weight
                if urgencies[code] < urgency and now + durations[code] * patience < soon:
                    best, urgency = code, urgencies[code]
        if best < 0:
            if left[rank]:
                stalls += 1
                if stalls > STALLS_PER_RANK * num_ranks:
                    return codes, never
                heapq.heappush(free, (_next_event(free, now, soon), rank))
            continue
        stage = best % size // num_micro_batches
        if best < size:
            forwards[stage] += 1
            places[rank] -= 1
        elif best < 2 * size:
            gradients[stage] += 1
        else:
            weights[stage] += 1
            places[rank] += 1
        stalls = 0
        codes[rank].append(best)
        left[rank] -= 1
        end = now + durations[best]
        makespan = max(makespan, end)
        channel = channels[best]
        if channel >= 0 and delays[best]:
            arrivals[best] = links_free[channel] = max(end, links_free[channel]) + delays[best]
        else:
            arrivals[best] = end
        heapq.heappush(free, (end, rank))
    return codes, makespan


def _next_event(free: list[tuple[float, int]], now: float, soon: float) -> float:
    """Returns when a rank that can do nothing looks again: at the next arrival, or when another rank is free."""
    later = min((time for time, _ in free if time > now), default=float("inf"))
    event = min(later, soon)
    if event < float("inf"):
        return event
    # All others are free at this very moment: this rank looks again after they have started something.
    assert free, "a list schedule never deadlocks"
    return now + ROUNDING
