"""The fastest plan within a budget, exactly, by dynamic programming over the segments of a step.

The backward visits the segments before a segment after it, so it needs to know only the memory that these keep.
The segments are decided in the order of the forward, and of all partial plans that keep as much, only the fastest goes
on; a partial plan that keeps more and is slower is dropped. Besides the kept bytes, a partial plan has a state: which
boundary tensors are held that a later segment may hold too, which strategy a block that comes again has, and what is
prefetched. Only partial plans with equal states are compared.

    >>> block = {"keep": StrategyCost(1.0, 80, 90, 20), "recompute": StrategyCost(1.5, 0, 40, 100)}
    >>> profile = (Segment("a", 0, 0, block), Segment("b", 10, 10, block), Segment("c", 20, 20, block))
    >>> [fastest(profile, (), budget) for budget in (280, 279, 120)]
    [['keep', 'keep', 'keep'], ['recompute', 'keep', 'keep'], ['recompute', 'recompute', 'keep']]
    >>> minimum_peak(profile, ())
    120
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from scale_checkpoint.planner.timeline import BoundaryTensor, Segment, StrategyCost

MAX_FRONT = 4096
"""Partial plans of one state that go on; above, kept bytes are rounded up to be fewer."""

UNLIMITED = sys.maxsize


class _PlanState(NamedTuple):
    """The state by which two partial plans are comparable."""

    held: frozenset[int]  # held boundary tensors that a later segment may hold as well
    chosen: tuple[tuple[str, str], ...]  # the strategy of each block that comes again, by name
    # The prefetch of the last offloaded segment, which another one behind it must cause; -1: none may follow.
    prefetched_bytes: int


class _PartialPlan(NamedTuple):
    """A plan of the segments so far, linked to the one that it extends."""

    kept_bytes: int  # kept by these segments for their backward, with boundary tensors that no later one can hold
    cost: float  # seconds, or the peak so far
    strategy: str  # of the last segment
    previous: _PartialPlan | None


_Front: TypeAlias = list[_PartialPlan]
_Cost: TypeAlias = Callable[[float, StrategyCost, int], float]


def fastest(
    segments: Sequence[Segment], boundary_tensors: Sequence[BoundaryTensor], budget_bytes: int
) -> list[str] | None:
    """Returns the strategy of each segment that makes the step fastest within the budget; None where no plan fits.

    Of equally fast plans, one that keeps less. Exact while no front exceeds `MAX_FRONT`. Beyond it, kept bytes are
    rounded up by at most 1 / `MAX_FRONT` of the budget. The plan fits then, but a faster plan might fit as well.
    """
    best = _best(segments, boundary_tensors, budget_bytes, lambda cost, added, _: cost + added.seconds)
    if best is None:
        return None
    strategies = []
    while best.previous is not None:
        strategies.append(best.strategy)
        best = best.previous
    return strategies[::-1]


def minimum_peak(segments: Sequence[Segment], boundary_tensors: Sequence[BoundaryTensor]) -> int:
    """Returns the smallest budget that any plan fits, in bytes."""
    best = _best(segments, boundary_tensors, UNLIMITED, lambda cost, _, peak: max(cost, peak))
    assert best is not None
    return int(best.cost)


def _best(
    segments: Sequence[Segment], boundary_tensors: Sequence[BoundaryTensor], budget: int, cost: _Cost
) -> _PartialPlan | None:
    last_visit = {segment.name: j for j, segment in enumerate(segments)}
    fronts: Mapping[_PlanState, _Front] = {_PlanState(frozenset(), (), 0): [_PartialPlan(0, 0.0, "", None)]}
    for j, segment in enumerate(segments):
        front_by_state: defaultdict[_PlanState, _Front] = defaultdict(list)
        choice = _SegmentChoice(j, segment, boundary_tensors, budget, cost, last_visit[segment.name] > j)
        for state, front in fronts.items():
            for name, added in choice.allowed(state):
                longer = [choice.extend(partial, state, name, added) for partial in front]
                fitting = [partial for partial in longer if partial is not None]
                for following in choice.next_states(state, name, added):
                    front_by_state[following] += fitting
        fronts = {state: _pruned(front, budget) for state, front in front_by_state.items()}
    ends = [partial for state, front in fronts.items() if state.prefetched_bytes <= 0 for partial in front]
    return min(ends, key=lambda partial: (partial.cost, partial.kept_bytes), default=None)


@dataclass(frozen=True)
class _SegmentChoice:
    """The decision of one segment."""

    j: int
    segment: Segment
    boundary_tensors: Sequence[BoundaryTensor]
    budget: int
    cost: _Cost
    comes_again: bool

    def allowed(self, state: _PlanState) -> Iterator[tuple[str, StrategyCost]]:
        """Yields the strategies that are open: the one that the block has already, or all."""
        chosen = dict(state.chosen).get(self.segment.name)
        for name, added in self.segment.costs.items():
            if chosen in (None, name) and not (added.prefetched_bytes and state.prefetched_bytes < 0):
                yield name, added

    def extend(self, partial: _PartialPlan, state: _PlanState, name: str, added: StrategyCost) -> _PartialPlan | None:
        """Returns the longer plan, or None where it exceeds the budget."""
        segment, tensors = self.segment, self.boundary_tensors
        held_tensors = state.held | set(added.holds)
        in_forward = segment.forward_bytes + partial.kept_bytes + added.forward_bytes
        in_backward = segment.backward_bytes + partial.kept_bytes + added.kept_bytes
        in_backward += sum(tensors[index].num_bytes for index in held_tensors)
        prefetched = max(0, state.prefetched_bytes)
        if added.prefetched_bytes:
            in_backward += max(added.backward_bytes, added.prefetch_peak_bytes + prefetched)
        else:
            in_backward += added.backward_bytes + prefetched
        peak = max(in_forward, in_backward)
        if peak > self.budget:
            return None
        closed_bytes = sum(tensors[index].num_bytes for index in held_tensors if tensors[index].last_reader <= self.j)
        kept_bytes = partial.kept_bytes + added.kept_bytes + closed_bytes
        return _PartialPlan(kept_bytes, self.cost(partial.cost, added, peak), name, partial)

    def next_states(self, state: _PlanState, name: str, added: StrategyCost) -> list[_PlanState]:
        """Returns the state of the longer plan; two where it may be the last offloaded segment, or not."""
        held_tensors = frozenset(
            i for i in state.held | set(added.holds) if self.boundary_tensors[i].last_reader > self.j
        )
        others = [pair for pair in state.chosen if pair[0] != self.segment.name]
        is_open = self.comes_again and self.segment.is_block
        chosen = (*others, (self.segment.name, name)) if is_open else tuple(others)
        prefetched = [added.prefetched_bytes, -1] if added.prefetched_bytes else [state.prefetched_bytes]
        return [_PlanState(held_tensors, chosen, count) for count in prefetched]


def _pruned(front: _Front, budget: int) -> _Front:
    """Drops each plan that keeps as much as another or more, and costs as much or more."""
    if len(front) > MAX_FRONT and budget < UNLIMITED:
        unit = max(1, budget // MAX_FRONT)
        front = [partial._replace(kept_bytes=-(-partial.kept_bytes // unit) * unit) for partial in front]
    best: _Front = []
    for partial in sorted(front, key=lambda partial: (partial.kept_bytes, partial.cost)):
        if not best or partial.cost < best[-1].cost:
            best.append(partial)
    return best
