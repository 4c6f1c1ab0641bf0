"""Texts of the errors raised where ranks differ or have failed, from every rank's record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankRecord(NamedTuple):
    """One rank's entry in a desync report."""

    place: str  # What it is about to do
    events: list[str]  # What it has done since the ranks were last found equal
    last_event: list[str]  # Its last few words
    of: str = ""  # What it is about to do that with; "" where there is but one


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
    """Whether ranks are in different contracts, each of which may be equal on all of them."""
    return len({standing.of for standing in standings}) > 1


def format_failures(reasons: Sequence[str]) -> str:
    """Says that a step was given up, from every rank's error; "" where it has none."""
    failed = (f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    return f"the step was given up on all ranks, because some have failed: {'; '.join(failed)}"


def by_rank(texts: Sequence[str]) -> str:
    """Formats one text per rank, equal ones together.

    >>> by_rank(["a", "b", "a"])
    'ranks 0, 2: a; rank 1: b'
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}" for text, who in ranks.items()
    )


def _first_difference(what: str, lists: Sequence[Sequence[str]]) -> str:
    for place in range(max(map(len, lists))):
        here = [lines[place] if place < len(lines) else "nothing more" for lines in lists]
        if len(set(here)) > 1:
            return f"the ranks differ in {what}, first at place {place + 1}: {by_rank(here)}"
    return f"the ranks differ in {what}"
