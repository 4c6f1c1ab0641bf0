"""The search: annealing over orders, whole ones or backbones.

A step takes an action of the critical path and moves it, exchanges it with another of its rank, or moves it together
with the same action of some neighbouring micro-batches: good schedules are nearly periodic, and such a step changes
several periods at once. It is deterministic: seeded, and bounded by the actions that were evaluated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from random import Random
from typing import NamedTuple

from scale_pipe.schedules.solver.partial_order import Change, Evaluator, Timing, in_order, whole_orders
from scale_pipe.schedules.solver.problem import ROUNDING, Codes, Problem

DISTANCE = 8
"""How far an action moves at most."""
DISTANCE_TOGETHER = 4
"""How far several move at most."""
TOGETHER = 0.3
EXCHANGED = 0.2
"""How many of the steps move several actions, and exchange two."""
MEAN_END_SHARE = 0.1
MOST_FAILURES = 1000


class Heat(NamedTuple):
    """By how much a step may be worse and still be taken, more or less: a share of the mean time of a stage's three.

    Attributes:
        first: How hot a search begins.
        last: How hot it ends.
    """

    first: float
    last: float


class Search:
    """The best schedule that was found for a problem, and what it took.

    Attributes:
        problem: What is scheduled.
        codes: The best whole orders so far.
        makespan: Theirs.
        goal: A lower bound: a search ends where it is reached.
        evaluator: What counts.
    """

    def __init__(self, problem: Problem, goal: float) -> None:
        self.problem = problem
        self.codes: Codes = []
        self.makespan = math.inf
        self.goal = goal
        self.evaluator = Evaluator(problem)

    @property
    def visits(self) -> int:
        """How many actions were evaluated."""
        return self.evaluator.visits

    @property
    def done(self) -> bool:
        """Whether nothing better is possible."""
        return self.makespan <= self.goal + ROUNDING

    def time(
        self, orders: Codes, limit: float = math.inf, patience: float = 1.0, change: Change | None = None
    ) -> Timing | None:
        """Returns orders in time, as `Evaluator.time` does; keeps them if they are the best.

        Args:
            orders: By rank, whole or a backbone.
            limit: What the makespan may be.
            patience: How long an idle time must be for a weight gradient.
            change: Where they differ from others that were evaluated.
        """
        timing = self.evaluator.time(orders, limit, patience, change)
        if timing is not None and timing.makespan < self.makespan - ROUNDING:
            self.makespan, self.codes = timing.makespan, whole_orders(self.problem, orders, timing)
        return timing


def anneal(
    search: Search, orders: Codes, visits: int, *, heat: Heat, patience: float, seed: int
) -> tuple[float, Codes]:
    """Searches from orders on, and returns the best that were met here, with their makespan.

    Args:
        search: Takes what is found.
        orders: Where to start; from a backbone only backbones are met, from whole orders only whole ones.
        visits: How many evaluated actions this may cost.
        heat: How hot it is.
        patience: How long an idle time must be for a weight gradient, as a share of its time.
        seed: Of the random numbers.
    """
    problem, random = search.problem, Random(seed)
    scale = sum(problem.durations) / problem.size
    by_kind = (1, 0, -1) if problem.is_whole(orders) else (1, -1, 0)
    effects = [effect for effect in by_kind for _ in range(problem.size)]
    current = [list(order) for order in orders]
    timing = search.time(current, patience=patience)
    assert timing is not None, "orders that run, and their backbones, never deadlock"
    best, best_makespan = [list(order) for order in current], timing.makespan
    score, path = _score(timing), critical_path(problem, current, timing)
    least_mean_end = MEAN_END_SHARE * sum(problem.works) / len(problem.works)
    begin, until, failures = search.visits, search.visits + visits, 0
    while search.visits < until and not search.done and failures < MOST_FAILURES:
        rank, position = path[int(random.random() * len(path))]
        order = current[rank]
        changed = _step(problem, order, position, random)
        if changed is None or not _fits(problem, effects, rank, order, *changed):
            failures += 1
            continue
        failures = 0
        first, part = changed
        current[rank] = order[:first] + part + order[first + len(part) :]
        now = scale * heat.first * (heat.last / heat.first) ** ((search.visits - begin) / (until - begin))
        allowed = score - now * math.log(1 - random.random())
        found = search.time(current, allowed - least_mean_end, patience, Change(timing, rank, first))
        if found is None or _score(found) > allowed:
            current[rank] = order
            continue
        timing, score, path = found, _score(found), critical_path(problem, current, found)
        if timing.makespan < best_makespan - ROUNDING:
            best, best_makespan = [list(order) for order in current], timing.makespan
    return best_makespan, best


def critical_path(problem: Problem, orders: Codes, timing: Timing) -> list[tuple[int, int]]:
    """Returns the (rank, position) of actions none of which can be later without making the whole later.

    Args:
        problem: With the costs.
        orders: By rank.
        timing: Their own.
    """
    rank = timing.rank_ends.index(timing.makespan)
    order = orders[rank]
    position = len(order) - 1
    path = []
    while position >= 0:
        path.append((rank, position))
        gaps = timing.gaps_at[rank]
        at = bisect_left(gaps, position)
        if at == len(gaps) or gaps[at] != position:  # it has not waited for its source
            position -= 1
        else:
            source = problem.sources[order[position]]
            rank = problem.owners[source]
            order = orders[rank]
            position = order.index(source)
    return path


def _score(timing: Timing) -> float:
    """What is minimised: the makespan, and a little of the mean end, which leads on where many makespans are equal."""
    return timing.makespan + MEAN_END_SHARE * sum(timing.rank_ends) / len(timing.rank_ends)


def _step(problem: Problem, order: list[int], position: int, random: Random) -> tuple[int, list[int]] | None:
    """Returns where a changed order begins to differ, and the part that does; None if nothing would."""
    towards = 1 if random.random() < 0.5 else -1
    which = random.random()
    if which < TOGETHER:
        distance = towards * (1 + int(random.random() * DISTANCE_TOGETHER))
        changed = _moved_together(problem, order, position, distance, random)
    else:
        target = position + towards * (1 + int(random.random() * DISTANCE))
        if not 0 <= target < len(order):
            return None
        first, last = min(position, target), max(position, target)
        part = order[first : last + 1]
        if which < TOGETHER + EXCHANGED:
            part[0], part[-1] = part[-1], part[0]
        elif target > position:
            part.append(part.pop(0))
        else:
            part.insert(0, part.pop())
        changed = first, part
    if changed is None:
        return None
    first, part = changed
    part = in_order(part, problem.num_micro_batches)
    return None if part == order[first : first + len(part)] else (first, part)


def _moved_together(
    problem: Problem, order: list[int], position: int, distance: int, random: Random
) -> tuple[int, list[int]] | None:
    """Returns a part in which an action and the same of some neighbouring micro-batches are moved by one distance."""
    num_micro_batches = problem.num_micro_batches
    here = order[position] % num_micro_batches
    first_code = order[position] - here
    low = here - int(random.random() * (here + 1) * random.random())
    high = here + int(random.random() * (num_micro_batches - here))
    positions = [order.index(first_code + micro_batch) for micro_batch in range(low, high + 1)]
    if positions[-1] + distance >= len(order) or positions[0] + distance < 0:
        return None
    changed = order[:]
    for at in reversed(positions) if distance > 0 else positions:
        changed.insert(at + distance, changed.pop(at))
    first = min(positions[0], positions[0] + distance)
    return first, changed[first : max(positions[-1], positions[-1] + distance) + 1]


def _fits(problem: Problem, effects: list[int], rank: int, order: list[int], first: int, part: list[int]) -> bool:
    """Returns whether a part keeps its rank's cap, and the order of what is done for one stage and micro-batch.

    Args:
        problem: With the cap.
        effects: By code, how it changes the number of live (stage, micro-batch).
        rank: Whose order it is.
        order: Before the change.
        first: Where the part begins.
        part: It changes the order of what was there, and nothing else.
    """
    size, cap = problem.size, problem.caps[rank]
    live = sum(map(effects.__getitem__, order[:first]))
    for index, code in enumerate(part):
        live += effects[code]
        if live > cap or (code >= size and code - size in part[index + 1 :]):
            return False
    return True
