"""The recorded order of events in each kind of pass, from which the next pass is predicted.

Training repeats itself: a forward, a backward, perhaps several of both until gradients are reduced. So the order of the
last pass of a kind predicts the next event in this one, and the last complete cycle of passes predicts what all ranks
run until they compare again.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from scale_core.comm.collectives import UNIT_TAGS

_MASK = (1 << 62) - 1


class Event(NamedTuple):
    """One phase of one unit, such as its forward, whatever collectives it takes."""

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
    """The name of a unit in errors."""
    return f"unit '{name}'" if name else "the root unit"


def fingerprint_of(*words: object) -> int:
    """A number of 62 bits, equal in every process (Python's own hash is salted)."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


@functools.cache
def message_tag(event: Event) -> int:
    """The tag of an event's messages: two ranks at different events never read each other's data."""
    return UNIT_TAGS[fingerprint_of(*event) % len(UNIT_TAGS)]


class LogEntry(NamedTuple):
    """One entry of a pass's log."""

    event: Event  # What was done
    is_transfer: bool  # It began to move data between ranks; otherwise it was announced, as a phase of a unit


@dataclass
class Pass:
    """One pass through a model."""

    kind: PassKind  # Its kind
    new_step: bool  # Whether a step began with it
    log: list[LogEntry] = field(default_factory=list)  # What this rank did in it, in order

    @property
    def events(self) -> list[Event]:
        """The recorded phases of units, without transfers."""
        return [entry.event for entry in self.log if not entry.is_transfer]


class History:
    """This rank's passes: the last complete one of each kind, and the cycle between two comparisons."""

    def __init__(self) -> None:
        self.order: list[Event] = []  # The events of the last whole pass of the current kind; empty before the first
        self.position = 0  # How many events the current pass has had
        self.matches_last_order = False  # Whether it has kept to that order, so that its next event is predicted
        self.num_completed = 0  # How many whole passes of the current kind there were
        self._current: Pass | None = None
        self._orders: dict[PassKind, list[Event]] = {}
        self._num_completed: dict[PassKind, int] = {}
        self._cycle: list[Pass] = []
        self._last_cycles: dict[PassKind, list[Pass]] = {}  # by the kind of the first pass

    def num_completed_of(self, kind: PassKind) -> int:
        """The number of complete passes of a kind."""
        return self._num_completed.get(kind, 0)

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
        """The transfers started since the last event of the current pass."""
        begun: list[Event] = []
        for event, is_transfer in reversed(self.current.log):
            if not is_transfer:
                break
            begun.insert(0, event)
        return begun

    @property
    def orders(self) -> dict[PassKind, list[Event]]:
        """The events of the last complete pass of each kind."""
        return {kind: list(order) for kind, order in self._orders.items()}

    @property
    def current(self) -> Pass:
        """The current pass."""
        assert self._current is not None, "announced an event outside a pass"
        return self._current

    def begin(self, kind: PassKind, new_step: bool) -> None:
        """Begins a pass; one that was left in the middle is forgotten."""
        self._current = Pass(kind, new_step)
        self.order = self._orders.get(kind, [])
        self.position = 0
        self.num_completed = self._num_completed.get(kind, 0)
        self.matches_last_order = self.num_completed > 0

    def add(self, event: Event) -> None:
        """Records a phase of a unit."""
        expected = self.order[self.position] if self.position < len(self.order) else None
        self.matches_last_order = self.matches_last_order and event == expected
        self.position += 1
        assert self._current is not None, "recorded an event outside of a pass"
        self._current.log.append(LogEntry(event, is_transfer=False))

    def add_transfer(self, event: Event) -> None:
        """Records the start of a transfer."""
        if self._current is not None:
            self._current.log.append(LogEntry(event, is_transfer=True))

    def end(self, *, closes: bool) -> Pass:
        """Ends the current pass and returns it; `closes` ends the cycle as well."""
        ended, kind = self.current, self.current.kind
        self._orders[kind] = ended.events
        self._num_completed[kind] = self.num_completed + 1
        self._cycle.append(ended)
        if closes:
            self._last_cycles[self._cycle[0].kind], self._cycle = self._cycle, []
        self._current = None
        return ended

    def reset(self) -> None:
        """Drops the current cycle; the last complete one stays."""
        self._cycle, self._current = [], None

    def remaining(self, *, in_order: bool) -> list[Pass] | None:
        """The rest of the current cycle, if it goes on as the last one did."""
        if self._current is None:
            return None
        begun = [*self._cycle, self._current]
        last_cycle = self._last_cycles.get(begun[0].kind, [])
        if len(last_cycle) < len(begun):
            return None
        lefts = [_remaining_of(last, mine, in_order) for last, mine in zip(last_cycle, begun, strict=False)]
        here = lefts[-1]
        if here is None or any(left is None or left.log for left in lefts[:-1]):
            return None
        return [here, *last_cycle[len(begun) :]]


def _remaining_of(last: Pass, mine: Pass, in_order: bool) -> Pass | None:
    """The rest of a pass that repeats `last`; None where it has begun in another way."""
    done = Counter(mine.log)
    left = [entry for entry in last.log if not _take(done, entry)]
    begins_alike = mine.events == last.events[: len(mine.events)] and not +done
    if in_order:
        begins_alike = mine.log == last.log[: len(mine.log)]
    return Pass(last.kind, new_step=False, log=left) if begins_alike and mine.kind == last.kind else None


def _take(counts: Counter[LogEntry], entry: LogEntry) -> bool:
    """Takes one entry, if there is one left; returns whether there was."""
    if counts[entry] < 1:
        return False
    counts[entry] -= 1
    return True
