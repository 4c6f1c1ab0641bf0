"""What memory a step takes under a plan: numbers in, numbers out.

A step visits its *segments* in order, forward and then backward: the blocks, and what lies between them. For each
segment a profile knows where memory stands when it is entered, by all that no plan changes, and how much more it needs
for a moment, by the *way* in which its activations are treated: kept, computed again or moved to the host. What is kept
until its own backward adds to every segment that comes between, and these nest: the backward of segment j finds just
what the segments before it keep, as its forward did.

A tensor that passes from one block to another, a *crossing*, lives once however many hold it: in the forward until
its last reader, in the backward until the first of its holders in forward order.

    >>> block = {"keep": Way(1.0, 80, 90, 20), "recompute": Way(1.5, 0, 40, 100)}
    >>> profile = (Segment("a", 0, 0, block), Segment("b", 10, 10, block), Segment("c", 20, 20, block))
    >>> [timeline(profile, (), ways).peak_bytes for ways in (["keep"] * 3, ["recompute"] * 3)]
    [280, 120]
    >>> timeline(profile, (), ["keep", "recompute", "recompute"]).seconds
    4.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Way:
    """What a segment costs when its activations are treated in one way.

    Attributes:
        seconds: Time of its forward and backward together.
        kept_bytes: What it keeps from its forward to its backward, without crossings.
        forward_bytes: The most that its forward needs over what stands when it is entered.
        backward_bytes: The same of its backward; when that is entered, `kept_bytes` and held crossings stand already.
        early_bytes: What has come back from the host when its backward is entered: it was fetched when the next one
            behind it that fetches anything was at its end. 0 for a way that moves nothing.
        end_bytes: The most that its backward needs over what stands when it is entered, from the moment on at which the
            next one before it is fetched early; of a way that moves something.
        holds: The crossings that it holds until its backward, by their number.
    """

    seconds: float
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    early_bytes: int = 0
    end_bytes: int = 0
    holds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Segment:
    """One visit of a block, or what runs between two visits.

    Attributes:
        name: The block's qualified name, or what it stands between; equal names are treated in one way.
        forward_bytes: What stands when its forward is entered, by all that no plan changes.
        backward_bytes: The same of its backward.
        ways: What it costs, by the name of the way; what lies between blocks has one way.
    """

    name: str
    forward_bytes: int
    backward_bytes: int
    ways: Mapping[str, Way]

    @property
    def is_block(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.ways) > 1


@dataclass(frozen=True)
class Crossing:
    """A tensor that a segment makes and that segments behind it read.

    Attributes:
        num_bytes: Its size.
        born: The segment that makes it.
        last: The last segment that reads it; its holders are among `born` to `last`.
    """

    num_bytes: int
    born: int
    last: int


@dataclass(frozen=True)
class Moment:
    """One pass through one segment.

    Attributes:
        name: The segment's.
        backward: Whether it is its backward.
        start_bytes: What stands when it is entered.
        peak_bytes: The most while it runs.
    """

    name: str
    backward: bool
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """A step under a plan.

    Attributes:
        moments: The forward of all segments in order, then the backward in reverse.
        seconds: The sum of the segments' times.
    """

    moments: tuple[Moment, ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most at any one time."""
        return max((moment.peak_bytes for moment in self.moments), default=0)


def timeline(segments: Sequence[Segment], crossings: Sequence[Crossing], ways: Sequence[str]) -> Timeline:
    """Plays a step.

    Args:
        segments: In the order of the forward.
        crossings: By number.
        ways: The way of each segment.
    """
    chosen = [segment.ways[way] for segment, way in zip(segments, ways, strict=True)]
    forward, backward, arriving = standing(crossings, chosen)
    moments = []
    for segment, way, dependent in zip(segments, chosen, forward, strict=True):
        start = segment.forward_bytes + dependent
        moments.append(Moment(segment.name, False, start, start + way.forward_bytes))
    for segment, way, dependent, early in reversed(list(zip(segments, chosen, backward, arriving, strict=True))):
        start = segment.backward_bytes + dependent
        needs = max(way.backward_bytes, way.end_bytes + early if way.early_bytes else 0)
        moments.append(Moment(segment.name, True, start, start + needs))
    return Timeline(tuple(moments), sum(way.seconds for way in chosen))


class Standing(NamedTuple):
    """What a plan makes stand at each segment.

    Attributes:
        forward: When its forward is entered.
        backward: When its backward is entered.
        arriving: What comes from the host while its backward ends, for another one.
    """

    forward: list[int]
    backward: list[int]
    arriving: list[int]


def standing(crossings: Sequence[Crossing], chosen: Sequence[Way]) -> Standing:
    """Returns what a plan makes stand at each segment.

    Args:
        crossings: By number.
        chosen: The way of each segment.
    """
    first_holders = _first_holders(crossings, chosen)
    last_fetcher = max((j for j, way in enumerate(chosen) if way.early_bytes), default=-1)
    forward, backward, arriving = [], [], []
    kept = early = 0
    for j, way in enumerate(chosen):
        passed = sum(c.num_bytes for c, h in zip(crossings, first_holders, strict=True) if c.last < j and h is not None)
        held = sum(c.num_bytes for c, h in zip(crossings, first_holders, strict=True) if h is not None and h <= j)
        forward.append(kept + passed)
        backward.append(kept + way.kept_bytes + held + (0 if way.early_bytes else early))
        arriving.append(early if way.early_bytes else 0)
        kept += way.kept_bytes
        if way.early_bytes:
            early = way.early_bytes if j < last_fetcher else 0
    return Standing(forward, backward, arriving)


def _first_holders(crossings: Sequence[Crossing], chosen: Sequence[Way]) -> list[int | None]:
    """The first segment in forward order that holds each crossing."""
    first: list[int | None] = [None] * len(crossings)
    for j, way in enumerate(chosen):
        for number in way.holds:
            if first[number] is None:
                first[number] = j
    return first
