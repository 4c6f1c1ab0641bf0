"""Simulated annealing over orders, complete or partial.

A move takes an action of the critical path and shifts it, swaps it with another of its rank, or shifts it together
with the same action of some neighboring micro-batches: good schedules are nearly periodic, and such a move changes
several periods at once. The search is deterministic: seeded, and bounded by the number of visited actions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from random import Random
from typing import NamedTuple

from scale_pipe.schedules.list_scheduling import ROUNDING, Codes, Problem
from scale_pipe.schedules.solver.partial_order import Change, Search, Timing, renumber_micro_batches

MAX_SHIFT = 8
MAX_SHIFT_OF_SEVERAL = 4
SHARE_OF_SEVERAL = 0.3
"""The share of moves that shift several actions."""
SHARE_OF_SWAPS = 0.2
MEAN_END_SHARE = 0.1
MAX_FAILURES = 1000


class Temperatures(NamedTuple):
    """The temperature at the start and the end: about by how much a move may make it worse, in mean stage times."""

    start: float
    end: float


def anneal(
    search: Search, orders: Codes, visits: int, *, temperatures: Temperatures, patience: float, seed: int
) -> tuple[float, Codes]:
    """Searches from orders on, for so many visits; returns the best makespan found here, with its orders.

    From partial orders only partial ones are reached, from complete orders only complete ones.
    """
    problem, random = search.problem, Random(seed)
    scale = sum(problem.durations) / problem.size
    by_kind = (1, 0, -1) if problem.has_weight_gradients(orders) else (1, -1, 0)
    live_changes = [change for change in by_kind for _ in range(problem.size)]
    current = [list(order) for order in orders]
    timing = search.evaluate(current, patience=patience)
    assert timing is not None, "orders that run never deadlock, nor do their partial orders"
    best, best_makespan = [list(order) for order in current], timing.makespan
    score, path = _score(timing), critical_path(problem, current, timing)
    least_mean_end = MEAN_END_SHARE * sum(problem.rank_work) / len(problem.rank_work)
    begin, until, failures = search.visits, search.visits + visits, 0
    while search.visits < until and not search.done and failures < MAX_FAILURES:
        rank, position = path[int(random.random() * len(path))]
        order = current[rank]
        move = _propose_move(problem, order, position, random)
        if move is None or not _keeps_cap(problem, live_changes, rank, order, *move):
            failures += 1
            continue
        failures = 0
        first, part = move
        current[rank] = order[:first] + part + order[first + len(part) :]
        cooling = (temperatures.end / temperatures.start) ** ((search.visits - begin) / (until - begin))
        allowed = score - scale * temperatures.start * cooling * math.log(1 - random.random())
        neighbour = search.evaluate(current, allowed - least_mean_end, patience, Change(timing, rank, first))
        if neighbour is None or _score(neighbour) > allowed:
            current[rank] = order
            continue
        timing, score, path = neighbour, _score(neighbour), critical_path(problem, current, neighbour)
        if timing.makespan < best_makespan - ROUNDING:
            best, best_makespan = [list(order) for order in current], timing.makespan
    return best_makespan, best


def critical_path(problem: Problem, orders: Codes, timing: Timing) -> list[tuple[int, int]]:
    """Returns the (rank, position) of actions that can't be later without making the makespan longer."""
    rank = timing.rank_ends.index(timing.makespan)
    position = len(orders[rank]) - 1
    path = []
    while position >= 0:
        path.append((rank, position))
        idle = timing.idle_before[rank]
        position_in_idle = bisect_left(idle, position)
        if position_in_idle == len(idle) or idle[position_in_idle] != position:  # It has not waited for its source.
            position -= 1
        else:
            source = problem.sources[orders[rank][position]]
            rank = problem.owners[source]
            position = orders[rank].index(source)
    return path


def _score(timing: Timing) -> float:
    """Returns the objective: the makespan, and a little of the mean end, which guides where makespans are equal."""
    return timing.makespan + MEAN_END_SHARE * sum(timing.rank_ends) / len(timing.rank_ends)


def _propose_move(problem: Problem, order: list[int], position: int, random: Random) -> tuple[int, list[int]] | None:
    """Returns the position from which the changed order differs, and the part that does; None if nothing would."""
    direction = 1 if random.random() < 0.5 else -1
    choice = random.random()
    if choice < SHARE_OF_SEVERAL:
        distance = direction * (1 + int(random.random() * MAX_SHIFT_OF_SEVERAL))
        move = _shift_several(problem, order, position, distance, random)
        if move is None:
            return None
        first, part = move
    else:
        target = position + direction * (1 + int(random.random() * MAX_SHIFT))
        if not 0 <= target < len(order):
            return None
        first, last = min(position, target), max(position, target)
        part = order[first : last + 1]
        if choice < SHARE_OF_SEVERAL + SHARE_OF_SWAPS:
            part[0], part[-1] = part[-1], part[0]
        elif target > position:
            part.append(part.pop(0))
        else:
            part.insert(0, part.pop())
    part = renumber_micro_batches(part, problem.num_micro_batches)
    return None if part == order[first : first + len(part)] else (first, part)


def _shift_several(
    problem: Problem, order: list[int], position: int, distance: int, random: Random
) -> tuple[int, list[int]] | None:
    """Shifts an action and the same one of some neighboring micro-batches by one distance; see `_propose_move`."""
    num_micro_batches = problem.num_micro_batches
    this_micro_batch = order[position] % num_micro_batches
    first_code = order[position] - this_micro_batch
    low = this_micro_batch - int(random.random() * (this_micro_batch + 1) * random.random())
    high = this_micro_batch + int(random.random() * (num_micro_batches - this_micro_batch))
    positions = [order.index(first_code + micro_batch) for micro_batch in range(low, high + 1)]
    if positions[-1] + distance >= len(order) or positions[0] + distance < 0:
        return None
    changed = order[:]
    for index in reversed(positions) if distance > 0 else positions:
        changed.insert(index + distance, changed.pop(index))
    first = min(positions[0], positions[0] + distance)
    return first, changed[first : max(positions[-1], positions[-1] + distance) + 1]


def _keeps_cap(
    problem: Problem, live_changes: list[int], rank: int, order: list[int], first: int, part: list[int]
) -> bool:
    """Returns whether a reordered part of an order keeps the cap, and each stage and micro-batch its order."""
    size, cap = problem.size, problem.caps[rank]
    live = sum(map(live_changes.__getitem__, order[:first]))
    for index, code in enumerate(part):
        live += live_changes[code]
        if live > cap or (code >= size and code - size in part[index + 1 :]):
            return False
    return True
