"""The pipeline as a search sees it: everything is a number in a list, and one evaluation is one pass over the actions.

An action of kind k (0 forward, 1 input gradient, 2 weight gradient) on stage s and micro-batch m has the code
(k S + s) M + m. `evaluate` is the plain evaluation; the search has one that begins in the middle and ends early
(`Evaluator`), which is tested with it. `simulate` computes the same times from schedules, on its own, and the solver's
results are checked with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Orders

KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
ROUNDING = 1e-9

Codes = list[list[int]]
"""By rank the codes of what it computes, in order."""


class Times(NamedTuple):
    """When things are over.

    Attributes:
        makespan: The end of the last action.
        ends: By code.
        arrivals: By code, when the result is where it is needed.
        rank_ends: By rank.
    """

    makespan: float
    ends: list[float]
    arrivals: list[float]
    rank_ends: list[float]


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled.

    Attributes:
        placement: Which rank holds which stage.
        num_micro_batches: M.
        costs: The true ones, or others that a list schedule is led by.
        caps: By rank, how many (stage, micro-batch) may be live.
        durations: By code.
        sources: By code, the code of another stage that it needs, or of the last stage's own forward; -1 for none.
        delays: By code, the time of the link that its result passes; 0 where it stays.
        channels: By code, which directed link its result passes; -1 where it stays.
        owners: By code, the rank.
        works: By rank, the time of all that it computes.
    """

    placement: Placement
    num_micro_batches: int
    costs: Costs
    caps: tuple[int, ...]
    durations: list[float]
    sources: list[int]
    delays: list[float]
    channels: list[int]
    owners: list[int]
    works: tuple[float, ...]

    @classmethod
    def of(cls, placement: Placement, num_micro_batches: int, costs: Costs, caps: Sequence[int]) -> Problem:
        """Returns the problem with everything by code.

        Args:
            placement: Which rank holds which stage.
            num_micro_batches: M.
            costs: For the placement's stages.
            caps: By rank, how many (stage, micro-batch) may be live; at least the number of its stages.
        """
        costs.check_for(placement)
        num_stages, size = placement.num_stages, placement.num_stages * num_micro_batches
        assert all(cap >= len(stages) for cap, stages in zip(caps, placement.stages_of, strict=True))
        sources, delays, channels = [-1] * (3 * size), [0.0] * (3 * size), [-1] * (3 * size)
        for stage in range(num_stages):
            for micro_batch in range(num_micro_batches):
                there = stage * num_micro_batches + micro_batch
                back = size + there
                if stage:
                    sources[there] = there - num_micro_batches
                sources[back] = back + num_micro_batches if stage + 1 < num_stages else there
                for code, neighbour in ((there, stage + 1), (back, stage - 1)):
                    if 0 <= neighbour < num_stages and placement.rank_of[neighbour] != placement.rank_of[stage]:
                        delays[code] = costs.link[min(stage, neighbour)]
                        channels[code] = placement.rank_of[stage] * placement.num_ranks + placement.rank_of[neighbour]
        by_kind = (costs.forward, costs.input_gradient, costs.weight_gradient)
        return cls(
            placement=placement,
            num_micro_batches=num_micro_batches,
            costs=costs,
            caps=tuple(caps),
            durations=[time for times in by_kind for time in times for _ in range(num_micro_batches)],
            sources=sources,
            delays=delays,
            channels=channels,
            works=works(placement, num_micro_batches, costs),
            owners=[placement.rank_of[code // num_micro_batches % num_stages] for code in range(3 * size)],
        )

    @cached_property
    def is_linked(self) -> bool:
        """Whether any transfer takes time."""
        return any(self.delays)

    @cached_property
    def size(self) -> int:
        """How many (stage, micro-batch) there are: codes of two kinds differ by multiples of it."""
        return self.placement.num_stages * self.num_micro_batches

    def is_whole(self, orders: Codes) -> bool:
        """Returns whether orders hold weight gradients.

        Args:
            orders: By rank, complete but perhaps for these.
        """
        return len(orders[0]) > 2 * self.num_micro_batches * len(self.placement.stages_of[0])

    def action(self, code: int) -> Action:
        """Returns the action of a code.

        Args:
            code: Any.
        """
        kind, rest = divmod(code, self.size)
        return Action(KINDS[kind], *divmod(rest, self.num_micro_batches))

    def orders(self, codes: Codes) -> list[list[Action]]:
        """Returns the actions of codes.

        Args:
            codes: By rank.
        """
        return [[self.action(code) for code in order] for order in codes]

    def codes(self, orders: Orders) -> Codes:
        """Returns the codes of actions; a backward becomes its two gradients.

        Args:
            orders: By rank.
        """
        found: Codes = []
        for order in orders:
            found.append([])
            for kind, stage, micro_batch in order:
                there = stage * self.num_micro_batches + micro_batch
                kinds = (1, 2) if kind is Kind.BACKWARD else (KINDS.index(kind),)
                found[-1] += [number * self.size + there for number in kinds]
        return found

    def fits(self, order: Sequence[int], rank: int) -> bool:
        """Returns whether an order keeps its rank's cap.

        Args:
            order: Codes.
            rank: Whose.
        """
        live, cap, first_gradient, first_weight = 0, self.caps[rank], self.size, 2 * self.size
        for code in order:
            if code < first_gradient:
                live += 1
                if live > cap:
                    return False
            elif code >= first_weight:
                live -= 1
        return True


def works(placement: Placement, num_micro_batches: int, costs: Costs) -> tuple[float, ...]:
    """Returns by rank the time of all that it computes.

    Args:
        placement: Which rank holds which stage.
        num_micro_batches: M.
        costs: For its stages.
    """
    return tuple(num_micro_batches * sum(map(costs.work, stages)) for stages in placement.stages_of)


def evaluate(problem: Problem, codes: Codes) -> Times | None:
    """Returns when everything is over, each action starting as soon as its rank and its source allow.

    Args:
        problem: With the true costs.
        codes: By rank; a weight gradient stands after its input gradient, and that after its forward.

    Returns:
        None where ranks wait for one another in a circle.
    """
    sources, durations, delays, channels = problem.sources, problem.durations, problem.delays, problem.channels
    num_ranks = len(codes)
    arrivals = [-1.0] * len(sources)
    linked = problem.is_linked
    ends = [-1.0] * len(sources) if linked else arrivals
    positions, clocks, lengths = [0] * num_ranks, [0.0] * num_ranks, [len(order) for order in codes]
    links_free = [0.0] * (num_ranks * num_ranks)
    waiting: dict[int, int] = {}
    stack = list(range(num_ranks - 1, -1, -1))
    while stack:
        rank = stack.pop()
        order, position, clock, length = codes[rank], positions[rank], clocks[rank], lengths[rank]
        while position < length:
            code = order[position]
            source = sources[code]
            if source >= 0:
                arrival = arrivals[source]
                if arrival < 0:
                    waiting[source] = rank
                    break
                clock = max(clock, arrival)
            clock += durations[code]
            arrivals[code] = clock
            if linked:
                ends[code] = clock
                if delays[code]:
                    channel = channels[code]
                    arrivals[code] = links_free[channel] = max(clock, links_free[channel]) + delays[code]
            position += 1
            if code in waiting:
                stack.append(waiting.pop(code))
        positions[rank] = position
        clocks[rank] = clock
    if positions != lengths:
        return None
    return Times(max(clocks), ends, arrivals, clocks)
