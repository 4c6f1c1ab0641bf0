"""One sentence from the texts that ranks left behind.

In the order of what explains most: an error that a rank raised by itself; a rank that was killed or exited; ranks that
were about to do different things; ranks that waited for one that never came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scale_tools.why.evidence import Ended, LogEvidence, Waited, evidence_of


@dataclass(frozen=True)
class Verdict:
    """Why a training ended.

    Attributes:
        sentence: The answer; "" where the texts do not say.
        kind: "raised", "ended", "desync", "missing", "crossed" or "unknown".
        rank: The rank that ended first, or never came; None where it is not known.
        step: The step, 0 where it is not known.
        details: What each rank did last, as lines.
    """

    sentence: str
    kind: str
    rank: int | None = None
    step: int = 0
    details: tuple[str, ...] = ()


def verdict(texts: Mapping[str, str]) -> Verdict:
    """Says which rank ended first and how, and who waited where; a pure function of the texts, by their names.

    >>> print(verdict({"launcher": "rank 1 was killed by SIGKILL; the others are ended"}).sentence)
    rank 1 was killed by SIGKILL
    """
    evidence = evidence_of(texts)
    details = tuple(
        f"rank {rank}: {'; then '.join(events[-4:])}" for rank, events in sorted(evidence.last_events.items())
    )
    for answer in (_of_own_error(evidence), _of_end(evidence), _of_desync(evidence), _of_waits(evidence)):
        if answer is not None:
            return Verdict(answer.sentence, answer.kind, answer.rank, answer.step, details)
    return Verdict("", "unknown", details=details)


def _of_own_error(found: LogEvidence) -> Verdict | None:
    errors = [ended for ended in found.ended if ended.is_own and ended.how.startswith(("raised", "failed"))]
    if not errors:
        return None
    first = _first(errors)
    same = [ended for ended in errors if ended.how == first.how]
    step = first.step or max((ended.step for ended in same), default=0)
    rank = next((ended.rank for ended in [first, *same] if ended.rank is not None), None)
    ranks = sorted({ended.rank for ended in same if ended.rank is not None})
    subject = "a rank" if rank is None else _ranks(ranks)
    return Verdict(f"{subject} {first.how}{_in(step)}{_while_others(found, ranks)}", "raised", rank, step)


def _of_end(found: LogEvidence) -> Verdict | None:
    ends = [ended for ended in found.ended if ended.is_own and not _was_late(found, ended.rank)]
    if not ends:
        return None
    # A signal says more than a code, which may have been given after another rank's end was seen.
    killed = [ended for ended in ends if ended.how.startswith("was killed")] or ends
    first = _first(killed)
    ranks = sorted({ended.rank for ended in killed if ended.how == first.how and ended.rank is not None})
    step = max((waited.step for waited in found.waited), default=0)
    return Verdict(
        f"{_ranks(ranks) if ranks else 'a rank'} {first.how}{_while_others(found, ranks)}", "ended", first.rank, step
    )


def _of_desync(found: LogEvidence) -> Verdict | None:
    if not found.desyncs:
        return None
    first = min(found.desyncs, key=lambda desync: desync.step or 1 << 62)
    return Verdict(f"the ranks {first.what}{_in(first.step)}: {first.places}", "desync", None, first.step)


def _of_waits(found: LogEvidence) -> Verdict | None:
    if not found.waited:
        return None
    earliest = min(waited.step for waited in found.waited)
    waits = [waited for waited in found.waited if waited.step == earliest]
    waiting = {waited.rank for waited in waits if waited.rank is not None}
    missing = _missing(found, waits, waiting)
    places = Counter(waited.place for waited in waits if waited.rank != missing).most_common(1)
    where, step = (places[0][0], earliest) if places else ("", earliest)
    if missing is None or not where:
        return Verdict(
            f"{_ranks(waiting) or 'a rank'} waited in vain in {_the(waits[0].place)}{_in(step)}",
            "missing",
            None,
            step,
        )
    others = sorted(waiting - {missing})
    for_it = f", where {_ranks(others)} waited for it" if others else ""
    missing_wait = next((waited for waited in waits if waited.rank == missing and waited.place != where), None)
    if missing_wait is not None:
        for_whom = f" for rank {missing_wait.peer}" if missing_wait.peer is not None else ""
        text = (
            f"{_ranks(others)} waited for rank {missing} in {_the(where)}{_in(step)}, while rank {missing} waited"
            f"{for_whom} in {_the(missing_wait.place)}: they ran different things"
        )
        return Verdict(text, "crossed", missing, step)
    if any(waited.timed_out for waited in waits):
        how = f"rank {missing} never entered {_the(where)}{_in(step)}{for_it}"
        last = _last_of(found, missing)
        return Verdict(f"{how}; {last}" if last else how, "missing", missing, step)
    return Verdict(
        f"rank {missing} ended without an error before {_the(where)}{_in(step)}{for_it}", "missing", missing, step
    )


def _missing(found: LogEvidence, waits: Sequence[Waited], waiting: set[int]) -> int | None:
    """The rank that did not come: one that was waited for and has said nothing, or else has waited elsewhere."""
    peers = Counter(waited.peer for waited in waits if waited.peer is not None)
    silent = [rank for rank, _ in peers.most_common() if rank in found.silent or rank not in waiting]
    if silent:
        return silent[0]
    if found.silent:
        return min(found.silent)
    return peers.most_common(1)[0][0] if peers else None


def _was_late(found: LogEvidence, rank: int | None) -> bool:
    """Whether the others had timed out waiting for this rank before it ended: then its end is not the cause."""
    waits = [waited for waited in found.waited if waited.peer == rank]
    return bool(waits) and all(waited.timed_out for waited in waits)


def _while_others(found: LogEvidence, ranks: Iterable[int]) -> str:
    """Where the others waited for it, of the first step in which they did."""
    other_waits = [waited for waited in found.waited if waited.rank not in set(ranks)]
    if not other_waits:
        return ""
    step = min(waited.step for waited in other_waits)
    first = [waited for waited in other_waits if waited.step == step]
    common_place = Counter(waited.place for waited in first).most_common(1)[0][0]
    waiting_ranks = sorted(
        {waited.rank for waited in first if waited.place == common_place and waited.rank is not None}
    )
    return f"; {_ranks(waiting_ranks) or 'another rank'} waited for it in {_the(common_place)}{_in(step)}"


def _last_of(found: LogEvidence, rank: int) -> str:
    events = found.last_events.get(rank)
    return f"the last that it did is {events[-1]}" if events else ""


def _first(ended: Sequence[Ended]) -> Ended:
    """The earliest by the clock; where that is not known, one with a rank and a step."""
    timed = [end for end in ended if end.at]
    if timed:
        return min(timed, key=lambda each: each.at)
    return max(ended, key=lambda each: (each.rank is not None, each.step > 0))


def _in(step: int) -> str:
    return f" in step {step}" if step else ""


def _the(place: str) -> str:
    return place if place.startswith(("the ", "saving", "loading", "verifying", "a ")) else f"the {place}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else ""
