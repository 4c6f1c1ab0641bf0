"""Happens-before: which of two accesses of the same memory comes first, by vector clocks.

Work on a stream, on a communicator or in a host thread runs in order; two of them run side by side until one waits for
the other. So each has a clock that counts its operations, and remembers how far it has seen the clock of every other
one (Mattern, 1989). An access comes before an operation if the clock of the operation's queue has seen it. Two
accesses of the same bytes of which neither has seen the other are a race, if one of them writes (as in FastTrack,
Flanagan and Freund, 2009). Nothing here knows torch.

A copy on a side stream that nobody waits for, and then the missing wait:

    >>> main, side = WorkQueue("main stream"), WorkQueue("side stream")
    >>> memory = AccessHistory()
    >>> memory.add(side.access(0, 64, writes=True, operation="copy"))
    []
    >>> (race,) = memory.add(main.access(0, 64, operation="read"))
    >>> race.operation, race.queue.name
    ('copy', 'side stream')
    >>> main.wait(side.now())
    >>> memory.add(main.access(0, 64, operation="read"))
    []
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Clock: TypeAlias = "Mapping[WorkQueue, int]"
"""How many operations of each queue have been seen."""

QueueKind: TypeAlias = Literal["stream", "communicator", "thread"]

Frames: TypeAlias = tuple[tuple[str, int], ...]
"""Lines of code, (file, line number) each, the innermost first."""

Strides: TypeAlias = tuple[tuple[int, int], ...]
"""Of a view with gaps, the size and stride in bytes of each dimension, the outermost first; the last stride is 1."""

_MOST_RUNS = 1 << 14
"""Views with more pieces than this are compared by their first and last byte."""


class WorkQueue:
    """The operations of a stream, a communicator or a host thread, which run in order.

    Attributes:
        name: For messages.
        kind: What it is, for messages, too.
        clock: How far it has seen the others, and itself.
    """

    def __init__(self, name: str, kind: QueueKind = "stream") -> None:
        self.name = name
        self.kind: QueueKind = kind
        self.clock: dict[WorkQueue, int] = {self: 0}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def now(self) -> dict[WorkQueue, int]:
        """A copy of its clock: an event, recorded after all operations so far."""
        return dict(self.clock)

    def wait(self, clock: Clock) -> None:
        """Its later operations come after all that `clock` has seen.

        >>> main, side, host = WorkQueue("main"), WorkQueue("side"), WorkQueue("host")
        >>> copy = side.access(0, 8, writes=True)
        >>> main.wait(side.now())
        >>> host.wait(main.now())  # Through main, host has seen side as well.
        >>> host.has_seen(copy)
        True
        """
        for queue, count in clock.items():
            if self.clock.get(queue, 0) < count:
                self.clock[queue] = count

    def access(
        self,
        start: int,
        stop: int,
        *,
        writes: bool = False,
        operation: str = "",
        frames: Frames = (),
        strides: Strides = (),
    ) -> Access:
        """An access by its next operation, to bytes [start, stop), or only to the bytes that `strides` select."""
        self.clock[self] += 1
        return Access(self, self.clock[self], start, stop, writes, operation, frames, strides)

    def has_seen(self, access: Access) -> bool:
        """Whether an access comes before what is next here."""
        return self.clock.get(access.queue, 0) >= access.count


@dataclass(slots=True, eq=False)
class Access:
    """A read or write of a range of bytes by one operation."""

    queue: WorkQueue
    count: int  # The operation's number in its queue
    start: int  # In bytes from the start of the storage
    stop: int
    writes: bool
    operation: str  # Such as "aten::copy_"
    frames: Frames
    strides: Strides = ()  # Empty where it has all bytes from start to stop

    def overlaps(self, other: Access) -> bool:
        """Whether both are of the same bytes; an empty range overlaps none.

        Two halves of the columns of a matrix have no byte in common:

        >>> left, right = (WorkQueue("a").access(first, first + 12, strides=((2, 8), (4, 1))) for first in (0, 4))
        >>> left.overlaps(right), left.overlaps(WorkQueue("b").access(3, 5))
        (False, True)

        >>> stream = WorkQueue("stream")
        >>> first, second, empty = stream.access(0, 8), stream.access(8, 16), stream.access(4, 4)
        >>> first.overlaps(second), first.overlaps(empty), first.overlaps(stream.access(7, 9))
        (False, False, True)
        """
        if max(self.start, other.start) >= min(self.stop, other.stop):
            return False
        if not (self.strides or other.strides) or max(self._num_runs, other._num_runs) > _MOST_RUNS:
            return True
        reached = -1  # The end of the run that reaches furthest; runs of one view may overlap each other.
        furthest: Access | None = None
        for start, stop, access in sorted((*self._runs(), *other._runs())):
            if start < reached and access is not furthest:
                return True
            if stop > reached:
                reached, furthest = stop, access
        return False

    def covers(self, other: Access) -> bool:
        """Whether it has all bytes of another access. A view with gaps contains only views with the same outer strides.

        The first columns of a matrix, and one of them:

        >>> columns, column = (WorkQueue("a").access(0, 12, strides=((2, 8), (size, 1))) for size in (4, 2))
        >>> columns.covers(column), column.covers(columns)
        (True, False)
        """
        if not self.strides:
            return self.start <= other.start and other.stop <= self.stop
        if self.strides[:-1] != other.strides[:-1]:
            return False
        return self.start <= other.start and other.start + other.strides[-1][0] <= self.start + self.strides[-1][0]

    @property
    def _num_runs(self) -> int:
        return math.prod(size for size, _ in self.strides[:-1])

    def _runs(self) -> Iterator[_Run]:
        """The pieces without gaps."""
        *outer, length = [(self.stop - self.start, 1)] if not self.strides else self.strides
        for offsets in itertools.product(*(range(0, size * stride, stride) for size, stride in outer)):
            start = self.start + sum(offsets)
            yield _Run(start, start + length[0], self)


class _Run(NamedTuple):
    start: int
    stop: int
    access: Access

    def __lt__(self, other: object) -> bool:
        return isinstance(other, _Run) and (self.start, self.stop) < (other.start, other.stop)


@dataclass(slots=True)
class AccessHistory:
    """The accesses of one storage that a later access could still race with."""

    accesses: list[Access] = field(default_factory=list)

    def add(self, new: Access) -> list[Access]:
        """Adds an access; returns those that it races with.

        >>> one, two = WorkQueue("one"), WorkQueue("two")
        >>> memory = AccessHistory()
        >>> memory.add(one.access(0, 8)) + memory.add(two.access(0, 8))  # Two reads.
        []
        >>> len(memory.add(one.access(0, 4, writes=True)))  # A write, and what two reads.
        1
        >>> memory.add(two.access(4, 8, writes=True))[0].writes  # What one reads; it has written to other bytes.
        False
        """
        races: list[Access] = []
        kept: list[Access] = []
        for old in self.accesses:
            is_seen = new.queue.has_seen(old)
            if not is_seen and (old.writes or new.writes) and old.overlaps(new):
                races.append(old)
            # Whoever has seen the new one has then seen the old one: the new one stands for both.
            if not (is_seen and new.covers(old) and (new.writes or not old.writes)):
                kept.append(old)
        if new.start < new.stop:
            kept.append(new)
        self.accesses = kept
        return races

    def unseen(self, *clocks: Clock) -> list[Access]:
        """The accesses that none of these clocks has seen: memory that is released at these times is still in use.

        >>> main, side = WorkQueue("main"), WorkQueue("side")
        >>> memory = AccessHistory()
        >>> memory.add(side.access(0, 8))
        []
        >>> len(memory.unseen(main.now())), memory.unseen(main.now(), side.now())
        (1, [])
        """
        return [
            access for access in self.accesses if all(clock.get(access.queue, 0) < access.count for clock in clocks)
        ]

    def clear(self) -> None:
        """Forgets them: the memory is another one from now on."""
        self.accesses.clear()
