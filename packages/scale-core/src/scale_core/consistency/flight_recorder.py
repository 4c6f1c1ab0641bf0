"""The last words of ranks: what each did last, told through the store by which the ranks found each other.

Where a wait fails, the group may be dead, and nothing can be learned through it any more. The store needs only the rank
that hosts it. So each rank keeps the end of its history at hand, leaves it there when it fails, and reads there why
the others did not come.
"""

from __future__ import annotations

import json
import time
from collections import deque
from datetime import timedelta

from scale_core import compat
from scale_core.comm.group import Group

# How long a rank that has failed waits for the others to say what they did.
_GRACE_SECONDS = 5.0
# And for one that has closed the connection: it has said it by now, says it at once, or is dead.
_GONE_GRACE_SECONDS = 0.5
# What a rank keeps for the others, and what of it an error quotes.
_LAST_EVENTS = 12
_TOLD_EVENTS = 4


class LastWords:
    """What the ranks of a group tell each other when they can't meet.

    Ranks create these in one order, so the number of each is a name that all of them know.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._words: deque[object] = deque(maxlen=_LAST_EVENTS)
        self._name = f"scale/{'.'.join(map(str, group.ranks))}/{_next_number(group)}"

    @property
    def recent(self) -> list[str]:
        """The last few of this rank's words."""
        return self._all[-_TOLD_EVENTS:]

    def add(self, words: object) -> None:
        """Keeps what this rank does, for the case that it is the last; made a text only then."""
        self._words.append(words)

    def publish(self) -> None:
        """Leaves this rank's words in the store, if there is one and it can be reached."""
        store = compat.default_store()
        if store is not None:
            try:
                store.set(f"{self._name}/{self._group.rank}", json.dumps(self._all))
            except Exception:  # The store may have died with the rank that hosts it; the error at hand matters more.
                return

    def of_all(self, gone: int | None = None) -> dict[int, str]:
        """Every rank's last few words, by rank; waits some seconds for those that have left none yet.

        Args:
            gone: A rank that has closed its connection to this one.
        """
        store = compat.default_store()
        began = time.monotonic()
        words = {}
        for rank in range(self._group.size):
            words[rank] = f"left no word: it has died{'' if rank == gone else ', or is busy with something else'}"
            if store is None:
                continue
            left = began + (_GONE_GRACE_SECONDS if rank == gone else _GRACE_SECONDS) - time.monotonic()
            try:
                store.wait([f"{self._name}/{rank}"], timedelta(seconds=max(0.05, left)))
                words[rank] = "; then ".join(json.loads(store.get(f"{self._name}/{rank}"))[-_TOLD_EVENTS:])
            except Exception:  # As above: no word from this rank.
                continue
        return words

    @property
    def _all(self) -> list[str]:
        return [str(words) for words in self._words]


_snapshots: list[str] = []


def note_snapshot(path: str) -> None:
    """A whole snapshot was written or read: where to go on from, should the ranks lose each other."""
    _snapshots[:] = [path]


def way_on() -> str:
    """What is left to do when the ranks have lost each other."""
    end = "end this process and start from the last checkpoint"
    return f"{end}, {_snapshots[0]}" if _snapshots else end


_numbers: dict[tuple[int, ...], int] = {}


def _next_number(group: Group) -> int:
    _numbers[group.ranks] = _numbers.get(group.ranks, -1) + 1
    return _numbers[group.ranks]
