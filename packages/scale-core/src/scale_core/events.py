"""What ranks compare: the events of a pass, and the numbers and words that stand for them.

An event is a phase of one unit, whatever collectives it takes. Its number is the same in every process, so it can be
compared in eight bytes and tell messages apart; its words are what an error says to people.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

from scale_core.messages import UNIT_TAGS

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
