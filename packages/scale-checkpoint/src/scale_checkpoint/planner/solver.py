"""The fastest plan within a budget, exactly, by dynamic programming over the segments of a step.

What the segments before a segment keep is all that it needs to know of them: the backward visits them after it. So
the segments are decided in the order of the forward, and of all partial plans that keep as much, only the fastest goes
on; a partial plan that keeps more and is slower is dropped. Besides the bytes that are kept, a partial plan must
remember which crossings are held that a later segment may hold too, how a block that comes again was treated, and what
is fetched early: only partial plans that are equal in these are compared.

    >>> block = {"keep": Way(1.0, 80, 90, 20), "recompute": Way(1.5, 0, 40, 100)}
    >>> profile = (Segment("a", 0, 0, block), Segment("b", 10, 10, block), Segment("c", 20, 20, block))
    >>> [fastest(profile, (), budget) for budget in (280, 279, 120)]
    [['keep', 'keep', 'keep'], ['recompute', 'keep', 'keep'], ['recompute', 'recompute', 'keep']]
    >>> least_peak(profile, ())
    120
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from scale_checkpoint.planner.timeline import Crossing, Segment, Way

MAX_FRONT = 4096
"""Partial plans that are compared with one another and go on; above, kept bytes are rounded up to be fewer."""

UNLIMITED = sys.maxsize


class _Memory(NamedTuple):
    """What decides whether two partial plans are comparable.

    Attributes:
        held: Crossings that are held, of those that a later segment may hold as well.
        treated: The way of each block that comes again, by name.
        early_bytes: What the last segment that fetches anything has fetched early, which another one behind it must
            cause; -1 where none may follow.
    """

    held: frozenset[int]
    treated: tuple[tuple[str, str], ...]
    early_bytes: int


class _Partial(NamedTuple):
    """A plan of the segments so far; the link to the one that it extends makes the whole of it.

    Attributes:
        kept_bytes: What these segments keep for their backward, crossings that nobody behind can hold included.
        cost: Seconds, or the peak so far.
        way: Of the last segment.
        before: The plan of the segments before that.
    """

    kept_bytes: int
    cost: float
    way: str
    before: _Partial | None


_Front: TypeAlias = list[_Partial]
_Cost: TypeAlias = Callable[[float, Way, int], float]


def fastest(segments: Sequence[Segment], crossings: Sequence[Crossing], budget_bytes: int) -> list[str] | None:
    """Returns the way of each segment that makes the step fastest within the budget; None where no plan fits.

    Of equally fast ones, one that keeps less. Exact while no front exceeds `MAX_FRONT`; beyond, what a segment keeps
    counts for up to one part in `MAX_FRONT` of the budget more than it is: the plan fits, but a faster one might, too.

    Args:
        segments: In the order of the forward.
        crossings: By number.
        budget_bytes: What no moment may exceed.
    """
    best = _best(segments, crossings, budget_bytes, lambda cost, way, _: cost + way.seconds)
    return None if best is None else _ways(best)


def least_peak(segments: Sequence[Segment], crossings: Sequence[Crossing]) -> int:
    """Returns the smallest budget that any plan fits.

    Args:
        segments: In the order of the forward.
        crossings: By number.
    """
    best = _best(segments, crossings, UNLIMITED, lambda cost, _, peak: max(cost, peak))
    assert best is not None
    return int(best.cost)


def _best(segments: Sequence[Segment], crossings: Sequence[Crossing], budget: int, cost: _Cost) -> _Partial | None:
    again = _last_visits(segments)
    fronts: Mapping[_Memory, _Front] = {_Memory(frozenset(), (), 0): [_Partial(0, 0.0, "", None)]}
    for j, segment in enumerate(segments):
        found: defaultdict[_Memory, _Front] = defaultdict(list)
        step = _Step(j, segment, crossings, budget, cost)
        for memory, front in fronts.items():
            for name, way in _open_ways(segment, memory):
                longer = [step.extend(partial, memory, name, way) for partial in front]
                fitting = [partial for partial in longer if partial is not None]
                for following in step.memories(memory, name, way, comes_again=again[segment.name] > j):
                    found[following] += fitting
        fronts = {memory: _pruned(front, budget) for memory, front in found.items()}
    ends = [partial for memory, front in fronts.items() if memory.early_bytes <= 0 for partial in front]
    return min(ends, key=lambda partial: (partial.cost, partial.kept_bytes), default=None)


@dataclass(frozen=True)
class _Step:
    """The decision of one segment."""

    j: int
    segment: Segment
    crossings: Sequence[Crossing]
    budget: int
    cost: _Cost

    def extend(self, partial: _Partial, memory: _Memory, name: str, way: Way) -> _Partial | None:
        """Returns the longer plan, or None where it doesn't fit."""
        segment = self.segment
        held = memory.held | set(way.holds)
        open_bytes = sum(self.crossings[number].num_bytes for number in held)
        in_forward = segment.forward_bytes + partial.kept_bytes + way.forward_bytes
        in_backward = segment.backward_bytes + partial.kept_bytes + way.kept_bytes + open_bytes
        early_bytes = max(0, memory.early_bytes)
        if way.early_bytes:
            needs = max(way.backward_bytes, way.end_bytes + early_bytes)
        else:
            needs = way.backward_bytes + early_bytes
        peak = max(in_forward, in_backward + needs)
        if peak > self.budget:
            return None
        closed_bytes = sum(self.crossings[number].num_bytes for number in held if self.crossings[number].last <= self.j)
        kept_bytes = partial.kept_bytes + way.kept_bytes + closed_bytes
        return _Partial(kept_bytes, self.cost(partial.cost, way, peak), name, partial)

    def memories(self, memory: _Memory, name: str, way: Way, comes_again: bool) -> list[_Memory]:
        """Returns what the longer plan must remember; two where it may be the last that fetches anything, or not."""
        held = frozenset(n for n in memory.held | set(way.holds) if self.crossings[n].last > self.j)
        others = [pair for pair in memory.treated if pair[0] != self.segment.name]
        treated = (*others, (self.segment.name, name)) if comes_again and self.segment.is_block else tuple(others)
        after = [way.early_bytes, -1] if way.early_bytes else [memory.early_bytes]
        return [_Memory(held, treated, early_bytes) for early_bytes in after]


def _open_ways(segment: Segment, memory: _Memory) -> Iterator[tuple[str, Way]]:
    """The ways that are open to a segment: the one in which its block was treated before, or all."""
    treated = dict(memory.treated).get(segment.name)
    for name, way in segment.ways.items():
        if treated in (None, name) and not (way.early_bytes and memory.early_bytes < 0):
            yield name, way


def _last_visits(segments: Sequence[Segment]) -> dict[str, int]:
    return {segment.name: j for j, segment in enumerate(segments)}


def _pruned(front: _Front, budget: int) -> _Front:
    """Drops each plan that keeps as much as another or more, and costs as much or more."""
    if len(front) > MAX_FRONT and budget < UNLIMITED:
        unit = max(1, budget // MAX_FRONT)
        front = [partial._replace(kept_bytes=-(-partial.kept_bytes // unit) * unit) for partial in front]
    kept: _Front = []
    for partial in sorted(front, key=lambda partial: (partial.kept_bytes, partial.cost)):
        if not kept or partial.cost < kept[-1].cost:
            kept.append(partial)
    return kept


def _ways(end: _Partial) -> list[str]:
    ways = []
    partial: _Partial | None = end
    while partial is not None and partial.before is not None:
        ways.append(partial.way)
        partial = partial.before
    return ways[::-1]
