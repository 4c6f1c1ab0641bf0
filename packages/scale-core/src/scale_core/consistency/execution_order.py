"""What the passes of a model were like, so that the next one can be foretold.

Training repeats itself: a forward, a backward, perhaps several of both until gradients are reduced. So the order of the
last pass of a kind tells what comes next in this one, and the last whole cycle of passes tells what all ranks are
going to do until they compare again.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from scale_core.comm.collectives import UNIT_TAGS

# What ranks compare: the events of a pass, and the numbers and words that stand for them.
#
# An event is a phase of one unit, whatever collectives it takes. Its number is the same in every process, so it can be
# compared in eight bytes and tell messages apart; its words are what an error says to people.

_MASK = (1 << 62) - 1


class Event(NamedTuple):
    """One thing that a rank does: a phase of one unit."""

    phase: str
    unit: str

    def __str__(self) -> str:
        return f"{self.phase} of {unit_title(self.unit)}" if self != END else "the end of the pass"


END = Event("the end", "")


class PassKind(NamedTuple):
    """Passes of one kind are expected to run the same events in the same order."""

    phase: str
    grad: bool
    training: bool


def unit_title(name: str) -> str:
    """How an error calls a unit."""
    return f"unit '{name}'" if name else "the root unit"


def identity(*words: object) -> int:
    """A number of 62 bits for these words, equal in every process (Python's own hash is salted)."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


@functools.cache
def message_tag(event: Event) -> int:
    """The tag of the messages that an event sends: two ranks at different events never read each other's data."""
    return UNIT_TAGS[identity(*event) % len(UNIT_TAGS)]


class Entry(NamedTuple):
    """One line of a pass's log.

    Attributes:
        event: What was done.
        is_transfer: It began to move data between ranks; otherwise it was announced, as a phase of a unit.
    """

    event: Event
    is_transfer: bool


@dataclass
class Pass:
    """One pass through a model.

    Attributes:
        kind: Its kind.
        new_step: Whether a step began with it.
        log: What this rank did in it, in order.
    """

    kind: PassKind
    new_step: bool
    log: list[Entry] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """The phases of units that were announced."""
        return [entry.event for entry in self.log if not entry.is_transfer]


class History:
    """This rank's passes: the last whole one of each kind, and the cycle between two comparisons.

    Attributes:
        order: The events of the last whole pass of the current kind; empty before the first.
        position: How many events the current pass has had.
        on_course: Whether it has kept to that order, so that its next event can be foretold.
        times_seen: How many whole passes of the current kind there were.
    """

    def __init__(self) -> None:
        self.order: list[Event] = []
        self.position = 0
        self.on_course = False
        self._current: Pass | None = None
        self._orders: dict[PassKind, list[Event]] = {}
        self._times_seen: dict[PassKind, int] = {}
        self._cycle: list[Pass] = []
        self._last_cycles: dict[PassKind, list[Pass]] = {}  # by the kind of the first pass

    @property
    def times_seen(self) -> int:
        return self.times_seen_of(self.current.kind)

    def times_seen_of(self, kind: PassKind) -> int:
        """How many whole passes of a kind there were."""
        return self._times_seen.get(kind, 0)

    @property
    def last_event(self) -> Event | None:
        """The last event of the current pass; None outside of one, or before the first."""
        events = self._current.events if self._current is not None else []
        return events[-1] if events else None

    @property
    def is_open(self) -> bool:
        """Whether a pass runs now."""
        return self._current is not None

    @property
    def transfers(self) -> list[Event]:
        """What has begun to move between ranks since the last event of the current pass."""
        begun: list[Event] = []
        for event, is_transfer in reversed(self.current.log):
            if not is_transfer:
                break
            begun.insert(0, event)
        return begun

    @property
    def orders(self) -> dict[PassKind, list[Event]]:
        """The events of the last whole pass of each kind."""
        return {kind: list(order) for kind, order in self._orders.items()}

    @property
    def current(self) -> Pass:
        """The pass that runs now."""
        assert self._current is not None, "announced an event outside a pass"
        return self._current

    def begin(self, kind: PassKind, new_step: bool) -> None:
        """A pass begins; one that was left in the middle is forgotten."""
        self._current = Pass(kind, new_step)
        self.order = self._orders.get(kind, [])
        self.position = 0
        self.on_course = self.times_seen > 0

    def add(self, event: Event) -> None:
        """A phase of a unit is announced."""
        expected = self.order[self.position] if self.position < len(self.order) else None
        self.on_course = self.on_course and event == expected
        self.position += 1
        self.current.log.append(Entry(event, is_transfer=False))

    def add_transfer(self, event: Event) -> None:
        """Data begins to move between the ranks."""
        if self._current is not None:
            self._current.log.append(Entry(event, is_transfer=True))

    def end(self, *, closes: bool) -> Pass:
        """The pass ends, and with one that `closes`, the cycle; returns it."""
        ended, kind = self.current, self.current.kind
        self._orders[kind] = ended.events
        self._times_seen[kind] = self.times_seen + 1
        self._cycle.append(ended)
        if closes:
            self._last_cycles[self._cycle[0].kind], self._cycle = self._cycle, []
        self._current = None
        return ended

    def break_off(self) -> None:
        """The cycle that runs now has come to nothing; the last whole one stays."""
        self._cycle, self._current = [], None

    def rest(self, *, in_order: bool) -> list[Pass] | None:
        """What is left of the cycle that runs now, if it goes on as the last one did.

        Args:
            in_order: Whether transfers must have begun in the very order of the last cycle: a transport without tags
                takes one for another. The first pass that is foretold begins its gathers earlier than the one before.

        Returns:
            The rest of the pass that runs now and the whole passes after it; None where this cycle has begun in
            another way than the last one, or is the first.
        """
        if self._current is None:
            return None
        begun = [*self._cycle, self._current]
        last_cycle = self._last_cycles.get(begun[0].kind, [])
        if len(last_cycle) < len(begun):
            return None
        lefts = [_left_of(last, mine, in_order) for last, mine in zip(last_cycle, begun, strict=False)]
        here = lefts[-1]
        if here is None or any(left is None or left.log for left in lefts[:-1]):
            return None
        return [here, *last_cycle[len(begun) :]]


def _left_of(last: Pass, mine: Pass, in_order: bool) -> Pass | None:
    """What is left of a pass that is to be like the last one; None where it has begun in another way."""
    done = Counter(mine.log)
    left = [entry for entry in last.log if not _take(done, entry)]
    begins_alike = mine.events == last.events[: len(mine.events)] and not +done
    if in_order:
        begins_alike = mine.log == last.log[: len(mine.log)]
    return Pass(last.kind, new_step=False, log=left) if begins_alike and mine.kind == last.kind else None


def _take(counts: Counter[Entry], entry: Entry) -> bool:
    """Whether one of these was left to take; takes it."""
    if counts[entry] < 1:
        return False
    counts[entry] -= 1
    return True
