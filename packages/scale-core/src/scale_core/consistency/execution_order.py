"""Events, the tags of their messages, and passes: what `Contract` records and compares."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from scale_core.comm.collectives import UNIT_TAGS, fingerprint_of


class Event(NamedTuple):
    """One phase of one unit, for example its forward, with all its collectives.

    Examples:
        >>> from scale_core.consistency.execution_order import Event
        >>> Event("forward", "layers.0")
        Event(phase='forward', unit='layers.0')

    See also: [the guide to debugging](../guides/debugging.md).
    """

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


@functools.cache
def message_tag(event: Event) -> int:
    """The tag of an event's messages: two ranks at different events never read each other's data."""
    return UNIT_TAGS[fingerprint_of(*event) % len(UNIT_TAGS)]


class LogEntry(NamedTuple):
    """One entry of a pass's log."""

    event: Event  # The work
    is_transfer: bool  # It began to move data between ranks; otherwise it was announced, as a phase of a unit


@dataclass
class Pass:
    """One pass through a model."""

    kind: PassKind
    new_step: bool  # Whether a step began with it
    log: list[LogEntry] = field(default_factory=list)  # The work of this rank in it, in order
    events: list[Event] = field(default_factory=list)  # The recorded phases of units in it, without transfers
