"""Two searches by annealing, over urgencies and over orders.

Both are deterministic: seeded, and bounded by evaluations. A search over urgencies makes large steps from one good
schedule to another, all of which run. A search over orders moves one action at a time, near the critical path, and
reaches what no list schedule is.
"""

from __future__ import annotations

import math
from random import Random

from scale_pipe.list_scheduling import list_schedule
from scale_pipe.problem import ROUNDING, Codes, Problem, Times, evaluate

PATIENCE = (0.0, 0.3, 0.6, 0.9, 0.99)
RANGES = ((6, 0.17), (10, 0.27))  # how far an action moves, and how hot a search begins
MEAN_END_SHARE = 0.1
LARGE = 400


class Search:
    """The best schedule that was found for a problem, and what it took.

    Attributes:
        problem: What is scheduled.
        codes: The best orders so far.
        makespan: Theirs.
        goal: A lower bound: a search ends where it is reached.
        visits: How many actions were evaluated, a list schedule's counting `LIST_SCHEDULE_VISITS` times.
        limit: How many may be.
    """

    LIST_SCHEDULE_VISITS = 8

    def __init__(self, problem: Problem, goal: float, limit: int) -> None:
        self.problem = problem
        self.codes: Codes = []
        self.makespan = math.inf
        self.goal = goal
        self.visits = 0
        self.limit = limit

    @property
    def is_large(self) -> bool:
        """Whether a search over urgencies pays: with few actions, one over orders gets further in the same time."""
        return len(self.problem.durations) > LARGE

    @property
    def done(self) -> bool:
        """Whether nothing better is possible, or nothing more may be spent."""
        return self.makespan <= self.goal + ROUNDING or self.visits >= self.limit

    def time(self, codes: Codes, limit: float = math.inf) -> Times | None:
        """Returns the times of orders, or None if they deadlock or take too long; keeps them if they are the best.

        Args:
            codes: By rank; they keep the caps.
            limit: What the makespan may be.
        """
        self.visits += len(self.problem.durations)
        times = evaluate(self.problem, codes, limit)
        if times is not None and times.makespan < self.makespan - ROUNDING:
            self.makespan, self.codes = times.makespan, [list(order) for order in codes]
        return times

    def list_schedule(self, urgencies: list[float], patience: float) -> float:
        """Returns the makespan that follows from urgencies; keeps the schedule if it is the best.

        Args:
            urgencies: By code.
            patience: See `list_schedule`.
        """
        self.visits += self.LIST_SCHEDULE_VISITS * len(self.problem.durations)
        codes, makespan = list_schedule(self.problem, urgencies, patience)
        if makespan < self.makespan - ROUNDING:
            self.makespan, self.codes = makespan, codes
        return makespan


def anneal_urgencies(search: Search, codes: Codes, visits: int, seed: int) -> None:
    """Searches over urgencies, from the times of a schedule on.

    Args:
        search: Takes what is found.
        codes: Where to start.
        visits: How many evaluated actions this may cost.
        seed: Of the random numbers.
    """
    problem, random = search.problem, Random(seed)
    num_stages, num_micro_batches, size = problem.placement.num_stages, problem.num_micro_batches, problem.size
    times = evaluate(problem, codes)
    assert times is not None
    urgencies = [end - duration for end, duration in zip(times.ends, problem.durations, strict=True)]
    patience = 0.9
    current = search.list_schedule(urgencies, patience)
    scale = sum(problem.durations) / size  # of one (stage, micro-batch)
    until, begin = min(search.visits + visits, search.limit), search.visits
    while search.visits < until and not search.done:
        heat = 0.1 * scale * 0.1 ** ((search.visits - begin) / (until - begin))
        changed, patience_here = urgencies[:], patience
        which, shift = random.random(), random.gauss(0, scale)
        kind, stage = random.randrange(3), random.randrange(num_stages)
        first = kind * size + stage * num_micro_batches
        if which < 0.4:  # some micro-batches of a stage
            low = random.randrange(num_micro_batches)
            moved = range(first + low, first + random.randrange(low, num_micro_batches) + 1)
        elif which < 0.6:  # a stage
            moved = range(first, first + num_micro_batches)
        elif which < 0.95:  # one action
            low = random.randrange(num_micro_batches)
            moved = range(first + low, first + low + 1)
        else:
            moved, patience_here = range(0), random.choice(PATIENCE)
        for code in moved:
            changed[code] += shift
        found = search.list_schedule(changed, patience_here)
        if found <= current or random.random() < math.exp((current - found) / heat):
            current, urgencies, patience = found, changed, patience_here


def anneal_orders(search: Search, codes: Codes, visits: int, seed: int) -> None:
    """Searches over orders: takes an action of the critical path and moves it a few places.

    Args:
        search: Takes what is found.
        codes: Where to start.
        visits: How many evaluated actions this may cost.
        seed: Of the random numbers; even ones search nearer and cooler.
    """
    problem, random = search.problem, Random(seed)
    distance, hot = RANGES[seed % len(RANGES)]
    hot *= sum(problem.durations) / problem.size
    current = [list(order) for order in codes]
    times = search.time(current)
    assert times is not None
    score, path = _score(times), critical_path(problem, current, times)
    until, begin = min(search.visits + visits, search.limit), search.visits
    least_mean_end = MEAN_END_SHARE * sum(problem.works) / len(problem.works)
    failures = 0
    while search.visits < until and not search.done and failures < 1000:
        rank, position = path[random.randrange(len(path))]
        target = position + random.randint(1, distance) * random.choice((-1, 1))
        order = current[rank]
        moved = _moved(problem, order, position, target)
        if moved is None or not problem.fits(moved, rank):
            failures += 1
            continue
        failures = 0
        current[rank] = moved
        heat = hot * 0.1 ** ((search.visits - begin) / (until - begin))
        allowed = score - heat * math.log(1 - random.random())
        found = search.time(current, allowed - least_mean_end)
        if found is not None and _score(found) <= allowed:
            times, score, path = found, _score(found), critical_path(problem, current, found)
        else:
            current[rank] = order


def critical_path(problem: Problem, codes: Codes, times: Times) -> list[tuple[int, int]]:
    """Returns the (rank, position) of actions none of which can be later without making the whole later.

    Args:
        problem: With the costs.
        codes: By rank.
        times: Theirs.
    """
    rank = max(range(len(codes)), key=times.rank_ends.__getitem__)
    position = len(codes[rank]) - 1
    path = []
    while True:
        path.append((rank, position))
        code = codes[rank][position]
        start = times.ends[code] - problem.durations[code]
        source = problem.sources[code]
        before = times.ends[codes[rank][position - 1]] if position else -math.inf
        if before >= start - ROUNDING:
            position -= 1
        elif source >= 0:
            rank = problem.owners[source]
            position = codes[rank].index(source)
        else:
            return path


def _score(times: Times) -> float:
    """What is minimised: the makespan, and a little of the mean end, which leads on where many makespans are equal."""
    return times.makespan + MEAN_END_SHARE * sum(times.rank_ends) / len(times.rank_ends)


def _moved(problem: Problem, order: list[int], position: int, target: int) -> list[int] | None:
    """Returns an order with one action moved, or None if that would pass another of its own stage and micro-batch."""
    if not 0 <= target < len(order):
        return None
    code, size = order[position], problem.size
    passed = order[target:position] if target < position else order[position + 1 : target + 1]
    if any(other % size == code % size for other in passed):
        return None
    moved = order[:position] + order[position + 1 :]
    moved.insert(target, code)
    return moved
