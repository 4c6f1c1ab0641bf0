"""The contract that all ranks do the same, and the error that says who did not.

Sharded training goes wrong silently when two ranks run units in different orders: the same operation, the same shape,
other parameters. torch's FSDP2 then returns wrong numbers without an error. So each rank keeps the order of its
events and compares it with the others':

1. before the first pass, what was built: names, shapes, dtypes, wrapping (`agree`);
2. in the first two passes of a kind, and as soon as a pass leaves the order of the last one of its kind, each event
   *before* its collective (`announce`); later ones are kept apart by the tags of their messages;
3. at the end of every pass, a fingerprint of all its events (`close`);
4. when a wait fails, the ranks tell each other what they did through the rendezvous store, never through the group,
   which may be dead (`waiting`).

Where all ranks compare each event, one that fails has only to come to the next comparison and say so (`give_up`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from scale_core import compat
from scale_core.comm.control_plane import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.consistency.desync_report import Standing, are_apart, disagreement, some_have_failed
from scale_core.consistency.execution_order import END, Event, History, PassKind, identity
from scale_core.consistency.flight_recorder import LastWords, way_on

# Where the group's own limit is longer: torch's default of half an hour is longer than anybody wants to look at a
# machine that stands still.
_LIMIT_SECONDS = 600.0
_CHECKED_PASSES = 2
# For the first difference all is kept since the ranks were last found equal, unless gradients are accumulated over very
# many passes.
_KEPT_EVENTS = 10_000
# Ranks may meet at different places, and gloo can't take a message of another length: all their records have one.
_NOTES = 3
_FAILED = identity("this rank has failed")
_LONGEST_REASON = 300

_SAME_MODEL = (
    "Build the same model on every rank, and wrap it in the same order: nothing before the first step may depend on "
    "the rank"
)
_SAME_ORDER = (
    "All ranks must run the same units in the same order; where the data decides which of them is used, make one "
    "unit of all that can be chosen: fully_shard(the module that holds them)"
)


class ScaleDistributedError(RuntimeError):
    """The ranks of a group no longer do the same, or can't reach each other.

    Attributes:
        step: The pass in which it was seen, counted from 1.
        unit: The unit at which it was seen.
    """

    def __init__(self, message: str, *, step: int = 0, unit: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.unit = unit


class ContractError(ScaleDistributedError):
    """The ranks have done, or are about to do, different things."""


class StepError(ScaleDistributedError):
    """Another rank failed in this step, so all ranks gave it up; a rank that failed itself raises its own error.

    Parameters and the optimizer's state are as they were before the step, and training can go on with the next batch.
    What becomes of gradients that were accumulated before it, the guide of the technique says.
    """


class _Here(NamedTuple):
    """Where this rank stands when it meets the others; how it came there is put into words only if they differ."""

    place: str
    unit: str
    came_by: Callable[[], Sequence[str]]


class _Ran(NamedTuple):
    """What this rank did; put into words only if somebody asks."""

    step: int
    event: Event

    def __str__(self) -> str:
        return f"step {self.step}: {self.event}"


class Contract:
    """What one model's ranks have promised each other.

    Args:
        group: The ranks.
        limit_seconds: The longest wait for another rank; None is the group's own limit, at most ten minutes.
        in_words: Says that a step was given up, given what each rank has raised, by rank; "" where it has not.
        of: What the ranks have promised it about, in words that are the same on all of them and no other contract's:
            so that ranks that have come to two things alike are told apart.
    """

    def __init__(
        self,
        group: Group,
        limit_seconds: float | None = None,
        in_words: Callable[[Sequence[str]], str] = some_have_failed,
        of: str = "",
    ) -> None:
        self.group = group
        if limit_seconds is not None and not limit_seconds > 0:
            raise ValueError(f"expected limit_seconds above 0, or None for the group's own, got {limit_seconds}")
        self.limit_seconds = _limit_of(group) if limit_seconds is None else limit_seconds
        self.step = 0
        self.history = History()
        self._checking = False
        self._chain = 0  # what the fingerprint of the next `close` starts from
        self._unsettled: deque[tuple[int, Event]] = deque(maxlen=_KEPT_EVENTS)  # since the ranks were last found equal
        self._broken: str | None = None
        self._words = LastWords(group)
        self._in_words = in_words
        self._of = of

    @property
    def alone(self) -> bool:
        """Whether there is nobody to disagree with."""
        return self.group.size == 1

    def agree(self, what: str, lines: Sequence[str]) -> None:
        """Checks that every rank has these lines.

        Raises:
            ContractError: They differ; names the first line that does, by rank.
        """
        if self.alone:
            return
        here = _Here(f"the check of {what}", "", lambda: lines)
        _, places = self._meet(here, identity(*lines))
        if places:
            raise ContractError(f"{disagreement(places, what)}. {_SAME_ORDER if are_apart(places) else _SAME_MODEL}")

    def begin(self, kind: PassKind, *, new_step: bool) -> None:
        """A pass begins; forgets one that was left in the middle.

        Raises:
            ScaleDistributedError: The ranks have lost each other in an earlier one.
        """
        self._check_usable()
        self.step += new_step
        self.history.begin(kind, new_step)
        self._checking = self.history.times_seen < _CHECKED_PASSES

    def announce(self, event: Event) -> None:
        """This rank is about to do `event`.

        Raises:
            ContractError: The ranks are compared here, and another one is about to do something else.
            StepError: They are, and another one has come to give the step up.
        """
        self.history.add(event)
        if self.alone:
            return
        ran = _Ran(self.step, event)
        self._words.add(ran)
        self._unsettled.append(ran)
        self._checking = self._checking or not self.history.on_course
        if self._checking:
            self._compare(_Here(str(event), event.unit, self._ran), identity(*event))

    def meet(self, event: Event) -> None:
        """All ranks are about to do `event` together, outside of a pass: checks it where the transport can't tell.

        Messages over gloo carry tags, so that a rank alone waits until its limit and no data is mixed. Others take the
        next collective for this one, whatever it is: there the ranks are compared first.

        Raises:
            ScaleDistributedError: Another rank is about to do something else, or does not come.
        """
        if not self.alone and self.group.backend != "gloo":
            self._compare(_Here(str(event), event.unit, self._ran), identity("together", *event))

    def close(self, *notes: int) -> list[list[int]]:
        """Ends the pass: all ranks compare what they did in it.

        Args:
            notes: What the others should know at this point, three integers at most.

        Returns:
            Every rank's notes, by rank.

        Raises:
            ContractError: The events differ; names the first one that does, by rank.
            StepError: Another rank has come to give the step up.
        """
        rows = [list(notes)]
        if not self.alone:
            # The pass is over only then: one that is given up here was none, on any rank.
            rows = self._compare(_Here(str(END), "", self._ran), self._fingerprint(), notes)
        self.history.end(closes=True)
        self._chain = 0
        self._unsettled.clear()
        return rows

    def leave(self) -> None:
        """Ends the pass without comparing yet: the next `close` covers it."""
        self.announce(END)
        self._chain = self._fingerprint()
        self.history.end(closes=False)

    @contextmanager
    def waiting(self, event: Event) -> Iterator[None]:
        """Inside, this rank waits for others; a transfer that fails is explained by what every rank last did.

        Raises:
            ScaleDistributedError: In place of a `TransferError`.
        """
        try:
            yield
        except TransferError as error:
            raise self._fail(self._explain(_Here(str(event), event.unit, list), error)) from error

    @property
    def compares_all(self) -> bool:
        """Whether a pass runs now in which all ranks compare each event, so that the next they do is to compare."""
        return not self.alone and self.history.is_open and self.history.times_seen < _CHECKED_PASSES

    def give_up(self, reason: str) -> str:
        """Comes to the next comparison of a pass in which all are compared, and says that this rank has failed.

        Whatever the last event is made of, the others wait for before they compare: it must be under way. All ranks
        then give the step up, and are where they were before it.

        Args:
            reason: What it has raised; not "".

        Returns:
            That the step was given up, in words, and why on which ranks.

        Raises:
            ScaleDistributedError: The others did not come.
        """
        assert self.compares_all, "a rank gives a step up alone only where all are compared"
        try:
            self._meet(_Here("a failure", "", list), _FAILED, reason=reason)
        except StepError as told:
            return str(told)
        raise AssertionError("a rank that has failed finds that one has")

    def report_failure(self, error: BaseException) -> None:
        """Leaves word for the others that this rank failed by itself; they find it when their wait ends."""
        if not self.alone:
            reason = next(iter(str(error).splitlines()), "")
            self._words.add(f"step {self.step}: raised {type(error).__name__}: {reason[:_LONGEST_REASON]}")
            self._words.publish()

    def fall_behind(self) -> None:
        """This rank has failed when the others had heard already that all is well, and went on without it.

        The next comparison finds that, before anybody uses what came of the pass. Ranks that have all failed so go on.
        """
        failure = Event("failure after the comparison", "")
        self._chain = identity(self._chain, failure)
        self._unsettled.append((self.step, failure))

    @property
    def is_broken(self) -> bool:
        """Whether the ranks have lost each other."""
        return self._broken is not None

    def _fingerprint(self) -> int:
        """Of all events since the ranks last compared."""
        return identity(self._chain, self.history.current.kind, *self.history.current.events)

    def _ran(self) -> list[str]:
        return [f"step {step}: {event}" for step, event in self._unsettled]

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise ScaleDistributedError(
                f"the process group is broken since an earlier error and can't be used again:\n{self._broken}\n"
                f"{way_on()}, or create a new process group",
                step=self.step,
            )

    def _compare(self, here: _Here, fingerprint: int, notes: Sequence[int] = ()) -> list[list[int]]:
        """Returns every rank's notes, or raises where the ranks stand at different places or came there otherwise."""
        rows, places = self._meet(here, fingerprint, notes)
        if places:
            message = f"step {self.step}: {disagreement(places, 'what they ran')}. {_SAME_ORDER}"
            raise self._fail(ContractError(message, step=self.step, unit=here.unit))
        return rows

    def _meet(
        self, here: _Here, fingerprint: int, notes: Sequence[int] = (), reason: str = ""
    ) -> tuple[list[list[int]], list[Standing]]:
        """All ranks tell each other their fingerprints and notes.

        Returns:
            Every rank's notes, and where the fingerprints differ also every rank's place and how it came there.

        Raises:
            StepError: One of them has come only to say that it has failed (`reason`); on all ranks.
            ScaleDistributedError: One did not come.
        """
        self._check_usable()
        if self._of and fingerprint != _FAILED:
            fingerprint = identity(self._of, fingerprint)
        record = [fingerprint, *notes, *[0] * (_NOTES - len(notes))]
        try:
            rows = exchange(record, self.group, limit_seconds=self.limit_seconds)
            told = [row[1 : 1 + len(notes)] for row in rows]
            if fingerprint != _FAILED and all(row[0] == fingerprint for row in rows):
                return told, []
            if any(row[0] == _FAILED for row in rows):
                self._raise_given_up(exchange_text(reason, self.group, limit_seconds=self.limit_seconds))
            words = json.dumps([here.place, here.came_by(), self._words.recent, self._of])
            texts = exchange_text(words, self.group, limit_seconds=self.limit_seconds)
        except TransferError as error:
            raise self._fail(self._explain(here, error)) from error
        return told, [Standing(*json.loads(text)) for text in texts]

    def _raise_given_up(self, reasons: Sequence[str]) -> NoReturn:
        self._chain = 0
        self._unsettled.clear()
        raise StepError(self._in_words(reasons), step=self.step)

    def _fail(self, error: ScaleDistributedError) -> ScaleDistributedError:
        self._broken = str(error)
        return error

    def _explain(self, here: _Here, error: TransferError) -> ScaleDistributedError:
        self._words.add(f"step {self.step}: waited in vain in {here.place} ({error})")
        self._words.publish()
        lines = [f"step {self.step}: {here.place}: {error}", "What each rank did last:"]
        lines += [f"  rank {rank}: {history}" for rank, history in self._words.of_all(error.gone).items()]
        lines.append(
            f"{_SAME_ORDER}. A rank that skips a batch, an evaluation or a checkpoint, or that has died, leaves the "
            f"others waiting. The group is of no more use: {way_on()}"
        )
        return ScaleDistributedError("\n".join(lines), step=self.step, unit=here.unit)


def _limit_of(group: Group) -> float:
    if group.process_group is None or group.backend == "fake":
        return _LIMIT_SECONDS
    return min(compat.time_limit(group.process_group).total_seconds(), _LIMIT_SECONDS)


_next_number = 0


def next_number(what: str, contract: Contract) -> int:
    """Returns a number that no rank of the group has given to anything yet; all ranks call it together.

    Args:
        what: What is to be numbered, for those who wait in vain.
        contract: What the ranks have promised each other.

    Raises:
        ScaleDistributedError: A rank did something else.
    """
    global _next_number  # Each rank may have made others of the kind in other groups.
    with contract.waiting(Event(what, "")):
        rows = exchange([_next_number], contract.group, limit_seconds=contract.limit_seconds)
    number = max(row[0] for row in rows)
    _next_number = number + 1
    return number
