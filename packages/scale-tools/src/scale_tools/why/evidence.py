"""What the logs of ranks say, as facts: who ended and how, who waited where for whom, what each rank did last.

The texts come from scale's own errors, its launcher, torchrun's report, and Python's tracebacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

_WAIT = re.compile(r"step (\d+): ([^:\n]+): (\w+) with (?:rank (\d+)|the group) failed: (.*)")
_JOINT_WAIT = re.compile(
    r"((?:saving|loading|verifying) [^:\n]*?) failed: (\w+) with (?:rank (\d+)|the group) failed: (.*)"
)
_LAST = re.compile(r"^\s*rank (\d+): (.+)$")
_EVENT = re.compile(r"(?:step (\d+): )?(failed in |raised )?(.+)", re.DOTALL)
_FAILED_IN = re.compile(r"(.+?) \((\w+) with (?:rank (\d+)|the group) failed: (.*)\)$", re.DOTALL)
_DESYNC = re.compile(
    r"(?:step (\d+): )?the ranks (are about to run different (?:units|things)|do different things|differ in [^:]*?): "
    r"(ranks? .+?)(?:\. [A-Z]|$)"
)
_ABORTED = re.compile(r"step (\d+) was aborted on all ranks, because ranks? [\d, ]+ failed\..*What rank (\d+) raised:")
_LAUNCHER = re.compile(r"^rank (\d+) (was killed by \w+|was killed by signal \d+|exited with code \d+); the others are")
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_TORCHRUN_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) ")
_ERROR = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Lost|Diverged)\w*)(?:: (.*))?$"
)
_TAG = re.compile(r"^(?:\[(?:rank|default)(\d+)\]:\s?|scale-train, rank (\d+): )")
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[-_]?0*(\d+)(?:$|\D)")
_TIMED_OUT = re.compile(r"timed? ?out|no answer within", re.IGNORECASE)
_SIGNALS = {2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
# They say what the rank saw of another one, and not what happened.
CONSEQUENCES = {
    *("ScaleDistributedError", "ContractError", "StepError", "TransferError", "P2PError", "StageError", "RanksLost"),
    *("ChildFailedError", "DistBackendError", "DistNetworkError", "RankFailure", "SignalException"),
}
_TRANSPORT = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|ProcessGroup", re.IGNORECASE)


@dataclass(frozen=True)
class Ended:
    """A rank ended, or failed by itself: "raised ValueError: no such token", "was killed by SIGKILL"."""

    rank: int | None
    how: str
    step: int = 0  # 0 where it is not known
    is_own: bool = True  # Whether it is no consequence of what another rank did
    at: float = 0.0  # In seconds since 1970, 0 where it is not known


@dataclass(frozen=True)
class Waited:
    """A rank waited in vain at a place, such as "gather of unit 'layers.3'", for a rank of its group."""

    rank: int | None
    step: int
    place: str
    op: str
    peer: int | None
    timed_out: bool  # Otherwise the connection was closed


@dataclass(frozen=True)
class Desync:
    """Ranks differed: in what, and each of them, by the text "ranks 0, 2: ...; rank 1: ..."."""

    step: int
    what: str  # "are about to run different things", "differ in the settings, first at place 1"
    places: str


@dataclass
class LogEvidence:
    """All that was found."""

    ended: list[Ended] = field(default_factory=list)
    waited: list[Waited] = field(default_factory=list)
    desyncs: list[Desync] = field(default_factory=list)
    last_events: dict[int, list[str]] = field(default_factory=dict)  # Of each rank, oldest first
    silent: set[int] = field(default_factory=set)  # Ranks of which others say that there is no flight record
    records: set[int] = field(default_factory=set)  # Ranks that left a flight record on the disk


def evidence_of(texts: Mapping[str, str]) -> LogEvidence:
    """Reads all texts, by their names; a name may say the rank ("rank1.log", torchrun's "attempt_0/1/stderr.log")."""
    evidence = LogEvidence()
    for name, text in texts.items():
        rank = rank_of(name)
        if name.endswith(".json") and _add_json(evidence, text, rank):
            continue
        _add_text(evidence, text, rank)
    evidence.silent -= evidence.last_events.keys() | evidence.records
    return evidence


def rank_of(name: str) -> int | None:
    """The rank that a file's name says, if it does.

    >>> rank_of("logs/rank-00002.txt"), rank_of("run/attempt_0/1/stderr.log"), rank_of("train.log")
    (2, 1, None)
    """
    path = PurePath(name)
    if len(path.parts) >= 3 and path.parts[-3].startswith("attempt_") and path.parts[-2].isdecimal():
        return int(path.parts[-2])
    match = _RANK_IN_NAME.search(path.name.lower())
    return int(match[1]) if match else None


def _add_json(found: LogEvidence, text: str, rank: int | None) -> bool:
    """A flight record, or what torchrun's error handler wrote; False if it is neither."""
    try:
        document: Any = json.loads(text)
        if document.get("format") == "scale-flight-record":
            timestamp = float(document.get("time", 0.0))
            _add_record(found, int(document["rank"]), [str(event) for event in document["events"]], timestamp)
            return True
        message = document["message"]
        first_line = str(message["message"]).partition("\n")[0]
        stamp = str(message.get("extraInfo", {}).get("timestamp", ""))
        timestamp = float(stamp) if stamp.isdecimal() else 0.0
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return False
    if error := _ERROR.match(first_line):
        found.ended.append(_raised(rank, error, 0, timestamp))
    return True


def _add_record(found: LogEvidence, rank: int, events: list[str], at: float) -> None:
    found.records.add(rank)
    if len(events) >= len(found.last_events.get(rank, [])):
        found.last_events[rank] = events
    _add_events(found, rank, events, at)


def _add_text(found: LogEvidence, text: str, of_file: int | None) -> None:
    lines = text.splitlines()
    failed_rank: int | None = None
    in_traceback = False
    raised: dict[int | None, Ended] = {}  # The last error of each rank
    causes: dict[int | None, Ended] = {}  # Of the traceback that follows
    number = 0
    while number < len(lines):
        tag = _TAG.match(lines[number])
        rank = int(tag[1] or tag[2]) if tag else of_file
        line = lines[number][tag.end() :] if tag else lines[number]
        number += 1
        if given_up := _ABORTED.search(line):
            block, number = _indented(lines, number)
            _add_given_up(found, given_up, block)
            in_traceback = False
        elif wait := _WAIT.search(line):
            found.waited.append(_wait(rank, int(wait[1]), *wait.groups()[1:]))
            in_traceback = False
        elif wait := _JOINT_WAIT.search(line):
            found.waited.append(_wait(rank, 0, *wait.groups()))
            in_traceback = False
        elif desync := _DESYNC.search(line):
            found.desyncs.append(Desync(int(desync[1] or 0), desync[2], desync[3].rstrip(".")))
            in_traceback = False
        elif line.strip() == "What each rank did last:":
            number = _add_last_events(found, lines, number)
        elif launched := _LAUNCHER.match(line):
            found.ended.append(Ended(int(launched[1]), launched[2], is_own=launched[2] != "exited with code 1"))
        elif torchrun := _TORCHRUN_RANK.match(line):
            failed_rank = int(torchrun[1])
        elif (code := _TORCHRUN_CODE.match(line)) and failed_rank is not None:
            found.ended.append(_exit(failed_rank, int(code[1])))
        elif line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif line.startswith("The above exception was the direct cause") and rank in raised:
            causes[rank] = raised[rank]
        elif in_traceback and (error := _ERROR.match(line)):
            raised[rank] = _raised(rank, error, 0)
            found.ended.append(raised[rank])
            if (cause := causes.pop(rank, None)) is not None and raised[rank].is_own:
                found.ended.remove(cause)  # The error that names what it was.
            in_traceback = False


def _indented(lines: list[str], number: int) -> tuple[list[str], int]:
    """The lines of another rank's traceback, which are indented by two more, and where they end."""
    block = []
    while number < len(lines):
        line = _TAG.sub("", lines[number])
        if line and not line.startswith("  "):
            break
        block.append(line[2:])
        number += 1
    return block, number


def _add_given_up(found: LogEvidence, given_up: re.Match[str], block: list[str]) -> None:
    errors = [error for line in block if (error := _ERROR.match(line))]
    how = _how(errors[-1]) if errors else "failed"
    found.ended.append(Ended(int(given_up[2]), how, int(given_up[1])))


def _add_last_events(found: LogEvidence, lines: list[str], number: int) -> int:
    while number < len(lines) and (last := _LAST.match(_TAG.sub("", lines[number]))):
        rank, text = int(last[1]), last[2]
        if text.startswith(("no flight record", "not known")):
            found.silent.add(rank)
        else:
            events = text.split("; then ")
            if rank not in found.records:
                found.last_events[rank] = max(found.last_events.get(rank, []), events, key=len)
            _add_events(found, rank, events)
        number += 1
    return number


def _add_events(found: LogEvidence, rank: int, events: list[str], at: float = 0.0) -> None:
    """What a rank's events say of its end: "failed in ..." is a wait, "raised ..." is an error of its own."""
    for text in events:
        event = _EVENT.fullmatch(text)
        if event is None or event[2] is None:
            continue
        if event[2] == "raised ":
            error = _ERROR.match(event[3].splitlines()[0])
            if error:
                found.ended.append(_raised(rank, error, int(event[1] or 0), at))
        elif wait := _FAILED_IN.fullmatch(event[3]):
            found.waited.append(_wait(rank, int(event[1] or 0), *wait.groups()))


def _wait(rank: int | None, step: int, place: str, op: str, peer: str | None, reason: str) -> Waited:
    return Waited(rank, step, place, op, int(peer) if peer else None, bool(_TIMED_OUT.search(reason)))


def _raised(rank: int | None, error: re.Match[str], step: int, at: float = 0.0) -> Ended:
    kind, text = error[1].rpartition(".")[2], error[2] or ""
    is_own = kind not in CONSEQUENCES and not (kind == "RuntimeError" and _TRANSPORT.search(text))
    return Ended(rank, _how(error), step, is_own and kind != "KeyboardInterrupt", at)


def _how(error: re.Match[str]) -> str:
    kind = error[1].rpartition(".")[2]
    return f"raised {kind}: {error[2]}" if error[2] else f"raised {kind}"


def _exit(rank: int, code: int) -> Ended:
    if code < 0:
        # torchrun ends the others by SIGTERM when one has failed.
        return Ended(rank, f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}", is_own=code != -15)
    return Ended(rank, f"exited with code {code}", is_own=code != 1)
