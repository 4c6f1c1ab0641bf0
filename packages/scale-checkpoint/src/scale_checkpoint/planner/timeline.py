"""Memory of a step under a plan, from the costs of its segments.

A step visits its *segments* in order, forward and then backward: the blocks, and the code between them. Of each
segment a profile knows the live memory when it is entered, without the parts that a plan changes, and how much more it
needs by the *strategy* for its activations: kept, recomputed or offloaded. Memory kept until its own backward adds to
every segment that comes between, and these nest: the backward of segment j finds the memory that the segments before
it keep.

A *boundary tensor*, which passes from one block to another, lives once however many segments hold it: in the forward
until its last reader, in the backward until the first of its holders in forward order.

    >>> block = {"keep": StrategyCost(1.0, 80, 90, 20), "recompute": StrategyCost(1.5, 0, 40, 100)}
    >>> profile = (Segment("a", 0, 0, block), Segment("b", 10, 10, block), Segment("c", 20, 20, block))
    >>> [timeline(profile, (), chosen).peak_bytes for chosen in (["keep"] * 3, ["recompute"] * 3)]
    [280, 120]
    >>> timeline(profile, (), ["keep", "recompute", "recompute"]).seconds
    4.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StrategyCost:
    """The costs of a segment under one strategy."""

    seconds: float  # of its forward and backward together
    kept_bytes: int  # from its forward to its backward, without boundary tensors
    forward_bytes: int  # peak of its forward over the memory when it is entered
    backward_bytes: int  # the same of its backward, when `kept_bytes` and held boundary tensors live already
    # The bytes of it that the backward of the next offloaded segment behind it fetches; 0 where nothing is offloaded.
    prefetched_bytes: int = 0
    # Peak of its backward from the moment on at which it fetches for the next offloaded segment before it.
    prefetch_peak_bytes: int = 0
    holds: tuple[int, ...] = ()  # boundary tensors that it holds until its backward, by index


@dataclass(frozen=True)
class Segment:
    """One visit of a block, or the code between two visits."""

    name: str  # the block's qualified name, or its neighbors' names; equal names have one strategy
    forward_bytes: int  # live when its forward is entered, without the parts that a plan changes
    backward_bytes: int  # the same of its backward
    costs: Mapping[str, StrategyCost]  # by strategy; code between blocks has one

    @property
    def is_block(self) -> bool:
        """Whether a plan decides for it."""
        return len(self.costs) > 1


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that a segment makes and that segments behind it read."""

    num_bytes: int
    producer: int  # index of the segment that makes it
    last_reader: int  # index of the last segment that reads it; its holders are among `producer` to `last_reader`


@dataclass(frozen=True)
class SegmentPass:
    """The forward or the backward of one segment."""

    name: str
    backward: bool
    start_bytes: int  # live when it is entered
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """A step under a plan."""

    passes: tuple[SegmentPass, ...]  # forward of all segments in order, then backward in reverse
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most at any one time."""
        return max((trace.peak_bytes for trace in self.passes), default=0)


def timeline(
    segments: Sequence[Segment], boundary_tensors: Sequence[BoundaryTensor], strategies: Sequence[str]
) -> Timeline:
    """Returns the step under the strategy of each segment."""
    chosen = [segment.costs[name] for segment, name in zip(segments, strategies, strict=True)]
    forward, backward, prefetched = memory_state(boundary_tensors, chosen)
    passes = []
    for segment, cost, dependent in zip(segments, chosen, forward, strict=True):
        start = segment.forward_bytes + dependent
        passes.append(SegmentPass(segment.name, False, start, start + cost.forward_bytes))
    for segment, cost, dependent, early in reversed(list(zip(segments, chosen, backward, prefetched, strict=True))):
        start = segment.backward_bytes + dependent
        prefetch_peak = cost.prefetch_peak_bytes + early if cost.prefetched_bytes else 0
        passes.append(SegmentPass(segment.name, True, start, start + max(cost.backward_bytes, prefetch_peak)))
    return Timeline(tuple(passes), sum(cost.seconds for cost in chosen))


class MemoryState(NamedTuple):
    """Bytes that live at each segment because of a plan."""

    forward: list[int]  # when its forward is entered
    backward: list[int]  # when its backward is entered
    prefetched: list[int]  # fetched while its backward ends, for another segment


def memory_state(boundary_tensors: Sequence[BoundaryTensor], chosen: Sequence[StrategyCost]) -> MemoryState:
    """Returns the bytes that live at each segment because of a plan."""
    first_holder: dict[int, int] = {}
    for j, cost in enumerate(chosen):
        for index in cost.holds:
            first_holder.setdefault(index, j)
    held_tensors = [(boundary_tensors[index], holder) for index, holder in first_holder.items()]
    last_offloaded = max((j for j, cost in enumerate(chosen) if cost.prefetched_bytes), default=-1)
    state = MemoryState([], [], [])
    kept_bytes = early = 0
    for j, cost in enumerate(chosen):
        passed = sum(tensor.num_bytes for tensor, _ in held_tensors if tensor.last_reader < j)
        held_bytes = sum(tensor.num_bytes for tensor, holder in held_tensors if holder <= j)
        state.forward.append(kept_bytes + passed)
        state.backward.append(kept_bytes + cost.kept_bytes + held_bytes + (0 if cost.prefetched_bytes else early))
        state.prefetched.append(early if cost.prefetched_bytes else 0)
        kept_bytes += cost.kept_bytes
        if cost.prefetched_bytes:
            early = cost.prefetched_bytes if j < last_offloaded else 0
    return state
