"""Each rank's last events, published in the rendezvous store when a wait fails, and the texts of errors made of them.

The group may be dead then, and the store needs only the process that hosts it. So each rank keeps its last events,
publishes them when it fails, and reads there why the others did not come. Where that process is frozen, torch's store
waits without a limit; so it is asked in a thread, which is left behind.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.consistency.flight_record_files import write_flight_record

# How long a rank that has failed waits for the records of the others.
_GRACE_SECONDS = 5.0
# And for one that has closed the connection: it has published already, does so at once, or is dead.
_GONE_GRACE_SECONDS = 0.5
# The time limit of the store itself, and the text if it does not answer.
_STORE_SECONDS = 2.0
_NO_STORE = "not known: the rendezvous store does not answer; its host (torchrun's agent, or rank 0) is gone or frozen"
# How many events a rank keeps, and how many of them an error quotes.
_LAST_EVENTS = 12
_TOLD_EVENTS = 4
_TOLD_NCCL = 2  # Of NCCL's unfinished collectives: the others wait behind them.


class FlightRecorder:
    """The ring buffer of one group's last events on this rank."""

    # Ranks create these in one order, so the number of each is a name that all of them know.

    def __init__(self, group: Group) -> None:
        self._group = group
        self.events: deque[object] = deque(maxlen=_LAST_EVENTS)  # Texts are made of them only when they are read.
        self._name = f"scale/{'.'.join(map(str, group.ranks))}/{next_unique_id('recorder', group)}"

    @property
    def recent(self) -> list[str]:
        """The last few events, as text."""
        return [str(event) for event in self.events][-_TOLD_EVENTS:]

    def publish(self, *, goes_on: bool = False) -> None:
        """Writes this rank's events to the store, if it can be reached, and to the disk, where that is asked for.

        Unless this rank `goes_on`, ranks that wait for it in something else read them, too.
        """
        events = [str(event) for event in self.events]
        events += unfinished_on_nccl() if self._group.backend == "nccl" else []
        write_flight_record(self._group.ranks, self._group.rank, self._name, events)
        store = compat.default_store()
        if store is None:
            return

        def write() -> None:
            store.set(f"{self._name}/{self._group.rank}", json.dumps(events))
            if not goes_on:
                store.set(_any_record_of(self._group.ranks[self._group.rank]), json.dumps(events))

        _run_for(_STORE_SECONDS, write)

    def dump_all_ranks(self, gone: int | None = None) -> dict[int, str]:
        """Every rank's last events, by rank; waits some seconds for those that have published none yet."""
        store = compat.default_store()
        began = time.monotonic()
        found: dict[int, str] = {}

        def read() -> None:
            assert store is not None
            for rank in range(self._group.size):
                left = began + (_GONE_GRACE_SECONDS if rank == gone else _GRACE_SECONDS) - time.monotonic()
                try:
                    store.wait([f"{self._name}/{rank}"], timedelta(seconds=max(0.05, left)))
                    found[rank] = _told(store.get(f"{self._name}/{rank}"))
                except dist.DistNetworkError:
                    return
                except Exception:
                    other = _any_record_of(self._group.ranks[rank])
                    is_elsewhere = rank != self._group.rank and store.check([other])
                    found[rank] = f"elsewhere: {_told(store.get(other))}" if is_elsewhere else _no_record(rank, gone)

        if store is None:
            return {rank: _no_record(rank, gone) for rank in range(self._group.size)}
        _run_for(_GRACE_SECONDS + _STORE_SECONDS, read)
        own = {self._group.rank: "; then ".join(self.recent)} if self._group.rank not in found else {}
        return dict.fromkeys(range(self._group.size), _NO_STORE) | own | found


def _any_record_of(rank: int) -> str:
    """The key of the last record of a rank, by its number among all, in any contract."""
    return f"scale/last/{rank}"


def _told(published: bytes) -> str:
    return "; then ".join(json.loads(published)[-_TOLD_EVENTS:])


def _no_record(rank: int, gone: int | None) -> str:
    return f"no flight record: it has exited{'' if rank == gone else ', or is blocked elsewhere'}"


def unfinished_on_nccl() -> list[str]:
    """The collectives that NCCL has begun on this rank and not ended, by torch's own flight recorder, if it runs."""
    return [
        f"NCCL: {str(entry.get('profiling_name', 'a collective')).removeprefix('nccl:')} number "
        f"{entry.get('collective_seq_id', '?')} of {list(entry.get('input_sizes', []))} is {entry.get('state', 'open')}"
        for entry in compat.nccl_trace()
        if entry.get("state") != "completed"
    ][-_TOLD_NCCL:]


def _run_for(seconds: float, act: Callable[[], object]) -> None:
    """Calls `act` with a time limit; its exception is dropped, because the error at hand matters more."""

    def run() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=run, name="scale flight recorder", daemon=True)
    thread.start()
    thread.join(seconds)


_next_ids: Counter[tuple[str, tuple[int, ...]]] = Counter()


def next_unique_id(what: str, group: Group) -> int:
    """Numbers the objects of a kind in a group from 0; equal on all its ranks, which create them in one order."""
    _next_ids[what, group.ranks] += 1
    return _next_ids[what, group.ranks] - 1


class RankRecord(NamedTuple):
    """One rank's entry in a desync report."""

    place: str  # Its next action
    events: list[str]  # Its actions since the ranks were last found equal
    last_event: list[str]  # Its last few words
    of: str = ""  # The object of this action; "" if there is only one
    trained: Sequence[str] = ()  # Parameters that it trains, or does not, otherwise than at first


def format_desync(standings: Sequence[RankRecord], what: str) -> str:
    """Says how ranks differ, from every rank's record; `what` was compared.

    >>> at_a, at_b = RankRecord("forward of unit 'a'", [], []), RankRecord("forward of unit 'b'", [], ["step 1"])
    >>> format_desync([at_a, at_b, at_a], "what they ran")  # doctest: +NORMALIZE_WHITESPACE
    "the ranks are about to run different things: ranks 0, 2: forward of unit 'a'; rank 1: forward of unit 'b'. What
    they ran last: ranks 0, 2: nothing; rank 1: step 1"
    """
    if are_at_different_places(standings):
        return f"the ranks are about to run different units: {by_rank([standing.of for standing in standings])}"
    here = [standing.place for standing in standings]
    if len(set(here)) == 1:
        return _first_difference(what, [standing.events for standing in standings])
    last = by_rank(["; then ".join(standing.last_event) or "nothing" for standing in standings])
    return f"the ranks are about to run different things: {by_rank(here)}. What they ran last: {last}"


def are_at_different_places(standings: Sequence[RankRecord]) -> bool:
    """Whether ranks are in different contracts, and each may be equal on all of its ranks."""
    return len({standing.of for standing in standings}) > 1


def format_failures(reasons: Sequence[str]) -> str:
    """Says that a step was aborted, from every rank's error; "" where it has none."""
    failed = (f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    return f"the step was aborted on all ranks, because some have failed: {'; '.join(failed)}"


def title_of_ranks(ranks: Sequence[int]) -> str:
    """Names ranks, for example as `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_rank(texts: Sequence[str]) -> str:
    """Formats one text per rank, equal ones together.

    >>> by_rank(["a", "b", "a"])
    'ranks 0, 2: a; rank 1: b'
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{title_of_ranks(who)}: {text}" for text, who in ranks.items())


def _first_difference(what: str, lists: Sequence[Sequence[str]]) -> str:
    for place in range(max(map(len, lists))):
        here = [lines[place] if place < len(lines) else "nothing more" for lines in lists]
        if len(set(here)) > 1:
            return f"the ranks differ in {what}, first at place {place + 1}: {by_rank(here)}"
    return f"the ranks differ in {what}"
