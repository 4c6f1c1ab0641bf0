"""What is said when ranks were compared and are not alike: who differs, where first, and who has failed.

Pure words: each function takes what every rank has told, by rank, and returns a sentence that all ranks raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Standing(NamedTuple):
    """Where some rank stands, as it tells the others.

    Attributes:
        place: What it is about to do.
        came_by: What it has done since the ranks were last found equal.
        ran_last: Its last few words.
        of: What it is about to do that with; "" where there is but one.
    """

    place: str
    came_by: list[str]
    ran_last: list[str]
    of: str = ""


def disagreement(standings: Sequence[Standing], what: str) -> str:
    """How ranks differ that were found not to be alike.

    >>> at_a, at_b = Standing("forward of unit 'a'", [], []), Standing("forward of unit 'b'", [], ["step 1"])
    >>> disagreement([at_a, at_b, at_a], "what they ran")  # doctest: +NORMALIZE_WHITESPACE
    "the ranks are about to run different things: ranks 0, 2: forward of unit 'a'; rank 1: forward of unit 'b'. What
    they ran last: ranks 0, 2: nothing; rank 1: step 1"

    Args:
        standings: Of every rank, by rank.
        what: What was compared, where they stand at one place and came there in different ways.
    """
    if are_apart(standings):
        return f"the ranks are about to run different units: {by_rank([standing.of for standing in standings])}"
    here = [standing.place for standing in standings]
    if len(set(here)) == 1:
        return _first_difference(what, [standing.came_by for standing in standings])
    last = by_rank(["; then ".join(standing.ran_last) or "nothing" for standing in standings])
    return f"the ranks are about to run different things: {by_rank(here)}. What they ran last: {last}"


def are_apart(standings: Sequence[Standing]) -> bool:
    """Whether ranks have come to different things, each of which may be built alike on all of them."""
    return len({standing.of for standing in standings}) > 1


def some_have_failed(reasons: Sequence[str]) -> str:
    """That a step was given up, given what each rank has raised, by rank; "" where it has not."""
    failed = (f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    return f"the step was given up on all ranks, because some have failed: {'; '.join(failed)}"


def by_rank(texts: Sequence[str]) -> str:
    """Who says what, those who say the same together.

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
