"""Checks that all ranks run the same events in the same order, and the errors that say which rank did not.

Sharded training goes wrong silently when two ranks run units in different orders: the same operation, the same shape,
other parameters. torch's FSDP2 then returns wrong numbers without an error. So each rank records its events and
compares them with the events of the other ranks:

1. before the first pass, the model: names, shapes, dtypes, wrapping (`check_equal`);
2. in the first two passes of a kind, and as soon as a pass leaves the order of the last one, each event *before* its
   collective (`record`); later events are kept apart by the tags of their messages;
3. at the end of every pass, a fingerprint of all its events (`end_checked`), and of the steps that optimizers have
   taken since the last one (`RecordedSteps`);
4. at the end of every pass, the calls of layers that are parallel over some of these ranks (`compare_calls`);
5. when a wait fails, through the flight recorder in the rendezvous store, since the group may be dead (`waiting`).

`History` records the passes of this rank. Their order predicts the next ones: by it scale-fsdp prefetches, and a rank
that has failed knows what the others expect. One that fails in a pass in which each event is compared says so at the
next comparison (`abort`).
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from torch import Tensor

from scale_core.comm.collectives import exchange, exchange_text, fingerprint_of
from scale_core.comm.group import Group
from scale_core.comm.group_state import CallLog
from scale_core.comm.work import limit_of
from scale_core.consistency.contract_errors import (
    SAME_MODEL,
    broken_group,
    failed_transfer,
    unequal_calls,
    unequal_events,
    unequal_lines,
)
from scale_core.consistency.execution_order import END, Event, LogEntry, Pass, PassKind
from scale_core.consistency.flight_recorder import FlightRecorder, RankRecord, format_failures
from scale_core.consistency.late_ranks import late_ranks_by_environment
from scale_core.consistency.recorded_steps import RecordedSteps
from scale_core.consistency.same_call import calls_that_differ, forget_calls
from scale_core.errors import ContractError, ScaleDistributedError, StepError, TransferError

_CHECKED_PASSES = 2
# In this many passes of a cycle that is not predicted, ranks compare whether forwards or backwards follow.
_COMPARED_DIRECTIONS = 8
# All events since the last comparison, to name the first difference; that may be after very many passes.
_KEPT_EVENTS = 10_000
# All records have one length: gloo can't take a message of another one, and ranks may be at different places.
_NOTES = 4
_FAILED = fingerprint_of("this rank has failed")
_LONGEST_REASON = 300


class History:
    """This rank's passes: the last complete one of each kind, and the cycle between two comparisons.

    Training repeats itself: a forward, a backward, perhaps several of both until gradients are reduced. So the order of
    the last pass of a kind predicts the next event in this one, and the last complete cycle of passes predicts the
    events that all ranks run until they compare again.

    Args:
        in_order: Transfers match by their order, and not by tags. Then one pass of a kind predicts nothing: the second
            one prefetches units that the first one has gathered late, so the order of transfers settles there.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self.in_order = in_order
        self.order: list[Event] = []  # The events of the last complete pass of the current kind; empty before the first
        self.position = 0  # How many events the current pass has had
        self.matches_last_order = False  # Whether it has kept to that order, so that its next event is predicted
        self.num_completed = 0  # The number of complete passes of the current kind
        self.orders: dict[PassKind, list[Event]] = {}  # The events of the last complete pass of each kind
        self.log: list[LogEntry] = []  # That of the current pass; whoever starts a transfer adds it here
        self._current: Pass | None = None
        self._num_completed: dict[PassKind, int] = {}
        self.cycle: list[Pass] = []  # The complete passes since the last comparison
        self.predicts_nothing = False  # There is such a pass, and nothing says whether a forward or a backward is next
        self.unpredictable: set[PassKind] = set()  # First passes after which programs go on in several ways
        self.last_cycles: dict[PassKind, list[Pass]] = {}  # by the kind of the first pass

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
        since = itertools.takewhile(lambda entry: entry.is_transfer, reversed(self.log))
        return [entry.event for entry in since][::-1]

    @property
    def current(self) -> Pass:
        """The current pass."""
        assert self._current is not None, "recorded an event outside of a pass"
        return self._current

    def begin(self, kind: PassKind, new_step: bool) -> None:
        """Begins a pass; one that was left in the middle is forgotten."""
        self._current = Pass(kind, new_step)
        self.log = self._current.log
        self.order = self.orders.get(kind, [])
        self.position = 0
        self.num_completed = self._num_completed.get(kind, 0)
        self.matches_last_order = self.num_completed > 0

    def add(self, event: Event) -> None:
        """Records a phase of a unit."""
        assert self._current is not None, "recorded an event outside of a pass"
        expected = self.order[self.position] if self.position < len(self.order) else None
        self.matches_last_order = self.matches_last_order and event == expected
        self.position += 1
        self._current.events.append(event)
        self.log.append(LogEntry(event, is_transfer=False))

    def end(self, *, closes: bool) -> None:
        """Ends the current pass; `closes` ends the cycle as well."""
        ended, kind = self.current, self.current.kind
        self._num_completed[kind] = self.num_completed + 1
        self.cycle.append(ended)
        if closes:
            self.last_cycles[self.cycle[0].kind], self.cycle = self.cycle, []
        self._current, self.log = None, []
        first = self.cycle[0].kind if self.cycle else None
        self.predicts_nothing = (
            first is not None
            and (first in self.unpredictable or not self.is_settled(self.last_cycles.get(first, [])))
            and len(self.cycle) <= _COMPARED_DIRECTIONS
        )
        self.orders[kind] = ended.events

    def is_settled(self, passes: Sequence[Pass]) -> bool:
        """Whether these passes predict the order of transfers in the next ones of their kinds."""
        num_needed = 2 if self.in_order else 1
        return bool(passes) and all(self._num_completed.get(each.kind, 0) >= num_needed for each in passes)

    def reset(self) -> None:
        """Drops the current cycle; the last complete one stays."""
        self.cycle, self._current, self.log = [], None, []
        self.predicts_nothing = False


class _RecordedEvent(NamedTuple):
    """An event of this rank; formatted only when it is read."""

    step: int
    event: Event

    def __str__(self) -> str:
        return f"step {self.step}: {self.event}"


class Contract:
    """The comparison of one model's events between its ranks.

    Args:
        group: The ranks.
        limit_seconds: The longest wait for a rank; None is the value of `SCALE_LIMIT_SECONDS`, or the
            group's own limit, at most ten minutes.
        abort_message: Says that a step was aborted, given each rank's exception, by rank; "" where it has not.
        of: A name that is the same on all ranks and no other contract's, by which ranks at two contracts differ.

    Examples:
        >>> from scale_core import Group
        >>> from scale_core.consistency.contract import Contract
        >>> from scale_core.consistency.execution_order import Event
        >>> from scale_core.consistency.execution_order import PassKind
        >>> contract = Contract(Group())  # a group of this rank only
        >>> contract.begin(PassKind("forward", grad=True, training=True), new_step=True)
        >>> contract.record(Event("forward", "layers.0"))  # compared with the other ranks before it runs

    See also: [the guide to debugging](../guides/debugging.md).
    """

    def __init__(
        self,
        group: Group,
        limit_seconds: float | None = None,
        abort_message: Callable[[Sequence[str]], str] = format_failures,
        of: str = "",
    ) -> None:
        self.group = group
        self.is_single_rank = group.size == 1  # There is nobody to disagree with.
        self.limit_seconds = limit_of(group.process_group, limit_seconds)
        self.step = 0
        self.history = History(in_order=group.backend not in ("gloo", "none"))
        self.recorded_steps: RecordedSteps | None = None  # Set where optimizers step on the model.
        # This rank's parameters, with names that are the same on all ranks; whose they are says so.
        self.named_params: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
        # Parameters that train, or do not, otherwise than when the ranks compared the model.
        self._changed_trains: dict[str, bool] = {}
        self._changed_trains_fingerprint: int | None = 0  # None where it is to be computed
        self._checking = False
        self._chain = 0  # the start of the fingerprint of the next `end_checked`
        # Since the ranks were last found equal.
        self._unchecked_events: deque[_RecordedEvent] = deque(maxlen=_KEPT_EVENTS)
        self._broken: str | None = None
        self._flight_recorder = FlightRecorder(group)
        self._abort_message = abort_message
        self._of = of
        self._late_ranks = late_ranks_by_environment(group)

    def check_equal(self, what: str, lines: Sequence[str], mending: str = SAME_MODEL) -> None:
        """Checks that every rank has these lines; `mending` is the advice of the error.

        Raises:
            ContractError: They differ; names the first line that does, by rank.
        """
        if self.is_single_rank:
            return
        _, places = self._exchange_fingerprints(f"the check of {what}", fingerprint_of(*lines), events=lines)
        if places:
            raise unequal_lines(places, what, mending)

    def begin(self, kind: PassKind, *, new_step: bool) -> None:
        """Begins a pass; forgets one that was left in the middle.

        Raises:
            ScaleDistributedError: The group was broken in an earlier pass.
        """
        self._check_usable()
        self.step += new_step
        self.history.begin(kind, new_step)
        self._checking = self.history.num_completed < _CHECKED_PASSES

    def record(self, event: Event, *, compares_all: bool = False) -> None:
        """Records an event before this rank runs it, and compares it with the other ranks' where events are compared.

        Args:
            event: The phase of a unit.
            compares_all: Compare all events since the last comparison, whatever the pass, because the result of this
                one can't be taken back.

        Raises:
            ContractError: A rank is about to run a different event.
            StepError: A different rank aborts the step.
        """
        self.history.add(event)
        if self.is_single_rank:
            return
        ran = _RecordedEvent(self.step, event)
        self._flight_recorder.events.append(ran)
        self._unchecked_events.append(ran)
        self._checking = self._checking or not self.history.matches_last_order
        if compares_all:
            self._compare(event, self._fingerprint())
        elif self._checking:
            self._compare(event, fingerprint_of(*event))

    def sync_point(self, event: Event, *, always: bool = False) -> None:
        """Compares that all ranks are about to run `event`, outside of a pass: always, or where messages have no tags.

        Raises:
            ScaleDistributedError: A rank is about to run a different event, or does not arrive.
            StepError: A different rank has failed and called `abort`.
        """
        if not self.is_single_rank and (always or self.group.backend != "gloo"):
            self._compare(event, fingerprint_of("together", *event))

    def directions(self, *, is_backward: bool) -> list[bool]:
        """Returns, by rank, whether a backward pass begins there; called where nothing predicts the next pass.

        Raises:
            ScaleDistributedError: A rank does something else, or does not arrive.
        """
        rows = self._compare(Event("the next pass", ""), fingerprint_of("the next pass"), (int(is_backward),))
        return [bool(row[0]) for row in rows]

    def note_trains(self, name: str, *, trains: bool) -> None:
        """Records that a parameter was frozen, or trains again: a part of the comparison at the end of each pass."""
        if self._changed_trains.pop(name, trains) == trains:
            self._changed_trains[name] = trains
        self._changed_trains_fingerprint = None

    def end_checked(self, *notes: int) -> list[list[int]]:
        """Ends the pass: all ranks compare their events in it, and give each other three integers at most, by rank.

        Raises:
            ContractError: The events differ; names the first one that does, by rank. Or optimizers have taken other
                steps on some ranks.
            StepError: A different rank aborts the step.
        """
        rows = [list(notes)]
        if not self.is_single_rank:
            # The pass is over only then: one that is aborted here was none, on any rank.
            rows = self._compare(END, self._fingerprint(), (self._step_status(), *notes))
            self._check_steps([row.pop(0) for row in rows])
            if self._late_ranks is not None:
                self._late_ranks.step()
        self.history.end(closes=True)
        self._chain = 0
        self._unchecked_events.clear()
        return rows

    def compare_steps(self) -> None:
        """Compares the steps of optimizers, where no pass does. Raises ContractError where they differ."""
        if not self.is_single_rank:
            with self.waiting("the step of an optimizer"):
                record = [self._step_status(), 0, 0]  # No other record has three integers.
                rows = exchange(record, self.group, limit_seconds=self.limit_seconds)
            self._check_steps([row[0] for row in rows])

    def compare_calls(self) -> None:
        """Compares the calls in context, expert and tensor parallel groups of these ranks since the last comparison.

        Called after `end_checked` where no rank has failed: one that has failed did not make them all.

        Raises:
            ContractError: On the ranks of a group in which they differ; names the first one that does, by rank.
        """
        if not self.is_single_rank:
            with self.waiting("the comparison of calls"):
                difference = calls_that_differ(self.group.ranks, self.limit_seconds)
            if difference:
                raise self._fail(unequal_calls(difference, self.step, self.group.rank))

    def _step_status(self) -> int:
        return 0 if self.recorded_steps is None else self.recorded_steps.status()

    def _check_steps(self, statuses: Sequence[int]) -> None:
        """Raises where ranks have taken different steps on one parameter, or on their parts after equal ones."""
        steps = self.recorded_steps
        if steps is None:
            return
        if steps.differ(statuses):
            with self.waiting("the comparison of optimizers' steps"):
                text = steps.difference(statuses, self.named_params(), self.group, self.limit_seconds)
            if text:
                where = f"step {self.step}: " if self.step else ""
                raise self._fail(ContractError(f"{where}{text}", step=self.step, rank=self.group.rank))
        steps.end(statuses)

    def end_unchecked(self) -> None:
        """Ends the pass without a comparison; the next `end_checked` covers it."""
        self.record(END)
        self._chain = self._fingerprint()
        self.history.end(closes=False)

    def wait(self, event: Event, *waits: Callable[[float | None], object]) -> None:
        """Calls each of `waits` with the limit; a failed transfer is explained as by `waiting`."""
        try:
            for wait in waits:
                wait(self.limit_seconds)
        except TransferError as error:
            raise self._explain(event, error) from error

    @contextmanager
    def waiting(self, event: Event | str) -> Iterator[None]:
        """A context in which this rank waits for others, at an event or in a call of that name.

        A failed transfer is explained by every rank's last events.

        Raises:
            ScaleDistributedError: In place of a `TransferError`.
        """
        try:
            yield
        except TransferError as error:
            raise self._explain(event, error) from error

    @property
    def checks_every_event(self) -> bool:
        """Whether the current pass compares each event, so that all ranks compare before their next one."""
        return not self.is_single_rank and self.history.is_open and self.history.num_completed < _CHECKED_PASSES

    def abort(self, reason: str) -> str:
        """Reports an error of this rank to the others when they next compare events, so that all ranks abort the step.

        The transfers of this rank's last event must have been started: the others wait for them before they compare.

        Args:
            reason: The error as text, not empty.

        Returns:
            The message of the StepError that the other ranks raise.
        """
        try:
            self._exchange_fingerprints("a failure", _FAILED, reason=reason)
        except StepError as error:
            return str(error)
        raise AssertionError("a comparison with a failed rank raises StepError")

    def report_failure(self, error: BaseException) -> None:
        """Publishes this rank's failure for the others; they read it when their wait fails."""
        if not self.is_single_rank:
            reason = next(iter(str(error).splitlines()), "")
            self._flight_recorder.events.append(
                f"step {self.step}: raised {type(error).__name__}: {reason[:_LONGEST_REASON]}"
            )
            self._flight_recorder.publish(goes_on=True)

    def forget_passes(self) -> None:
        """Drops the passes since the last comparison, and the calls in them: they were aborted, or have no backward."""
        self.history.reset()
        if CallLog.is_used and not self.is_single_rank:
            forget_calls(self.group.ranks)

    def mark_late_failure(self) -> None:
        """Makes the next comparison fail: this rank failed after the others had heard that all is well."""
        failure = Event("failure after the comparison", "")
        self._chain = fingerprint_of(self._chain, failure)
        self._unchecked_events.append(_RecordedEvent(self.step, failure))

    @property
    def is_broken(self) -> bool:
        """Whether the group can't be used any more after an earlier error."""
        return self._broken is not None

    def _fingerprint(self) -> int:
        """A fingerprint of all events since the last comparison."""
        current = self.history.current
        events = (part for event in current.events for part in event)
        if self._changed_trains_fingerprint is None:
            changed = sorted(self._changed_trains.items())
            self._changed_trains_fingerprint = fingerprint_of(*changed) if changed else 0
        return fingerprint_of(self._chain, self._changed_trains_fingerprint, *current.kind, *events)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise broken_group(self._broken, self.step, self.group.rank)

    def _compare(self, event: Event, fingerprint: int, notes: Sequence[int] = ()) -> list[list[int]]:
        """Returns every rank's notes; raises where the ranks are at other events than `event`, or differ before it."""
        rows, places = self._exchange_fingerprints(event, fingerprint, notes, self._unchecked_events)
        if places:
            raise self._fail(unequal_events(places, self.step, event.unit, self.group.rank))
        return rows

    def _exchange_fingerprints(
        self,
        place: Event | str,
        fingerprint: int,
        notes: Sequence[int] = (),
        events: Iterable[object] = (),
        reason: str = "",
    ) -> tuple[list[list[int]], list[RankRecord]]:
        """Returns every rank's notes and, where fingerprints differ, every rank's record; only then texts are made."""
        self._check_usable()
        if self._of and fingerprint != _FAILED:
            fingerprint = fingerprint_of(self._of, fingerprint)
        record = [fingerprint, *notes, *[0] * (_NOTES - len(notes))]
        try:
            rows = exchange(record, self.group, limit_seconds=self.limit_seconds)
            all_notes = [row[1 : 1 + len(notes)] for row in rows]
            if fingerprint != _FAILED and all(row[0] == fingerprint for row in rows):
                return all_notes, []
            if any(row[0] == _FAILED for row in rows):
                self._raise_aborted(exchange_text(reason, self.group, limit_seconds=self.limit_seconds))
            changed = sorted(self._changed_trains.items())
            trained = [f"'{name}' {'was unfrozen' if trains else 'was frozen'}" for name, trains in changed]
            mine = RankRecord(str(place), [*map(str, events)], self._flight_recorder.recent, self._of, trained)
            texts = exchange_text(json.dumps(mine), self.group, limit_seconds=self.limit_seconds)
        except TransferError as error:
            raise self._explain(place, error) from error
        return all_notes, [RankRecord(*json.loads(text)) for text in texts]

    def _raise_aborted(self, reasons: Sequence[str]) -> NoReturn:
        self._chain = 0
        self._unchecked_events.clear()
        failed = next((rank for rank, reason in enumerate(reasons) if reason), None)
        raise StepError(self._abort_message(reasons), step=self.step, rank=failed)

    def _fail(self, error: ScaleDistributedError) -> ScaleDistributedError:
        self._broken = str(error)
        return error

    def _explain(self, place: Event | str, error: TransferError) -> ScaleDistributedError:
        """The error of a failed transfer, with every rank's last events."""
        return self._fail(failed_transfer(error, place, self._flight_recorder, self.step, self.group.rank))
