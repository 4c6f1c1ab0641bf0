"""One error on all ranks in place of one rank's error and the others' timeout.

Where one rank can fail alone (a full disk, a file that it can't see) the others would wait for it in the next
collective until their limit, and then report the wait. These functions exchange the outcome first, so that all ranks
go on or all raise.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

import torch

from scale_core.comm.collectives import all_gather, exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.comm.work import limit_of
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import END, Event
from scale_core.consistency.flight_recorder import FlightRecorder, by_rank
from scale_core.errors import ScaleDistributedError, TransferError, recovery_hint

T = TypeVar("T")

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that were written or read since the last call."""

_STILL_WORKING = -1  # In the place of the length of a result.
_REPORTS_WITHIN_LIMIT = 4


class _Outcome(NamedTuple):
    result: Any
    error: Exception | None


@dataclass
class CollectiveCall:
    """A function that all ranks of a group call together and that fails on all of them.

    Where a rank does not come, or does something else, the others raise a `ScaleDistributedError`.
    """

    group: Group  # The ranks that take part
    doing: str  # Their action, for the error: "saving runs/1/step-00000012"; the same on all of them
    error: type[Exception]  # The type of the error that all of them raise if one fails
    limit_seconds: float | None = None  # The longest wait for a rank; None: see `limit_of`
    on_lost: Callable[[], object] | None = None  # Called if a rank is lost, before the error

    def __post_init__(self) -> None:
        self._recorder = FlightRecorder(self.group)

    def all_ranks(self, act: Callable[[], T]) -> list[T]:
        """Calls `act` on each rank; returns every rank's (picklable) result, by rank."""
        return self._results(_outcome_of(act))

    def all_ranks_with_progress(self, act: Callable[[Progress], T]) -> list[T]:
        """`all_ranks` of a call that may take longer than any limit: the others wait while `act` reports progress."""
        if self.group.size == 1:
            return self.all_ranks(lambda: act(lambda count: None))
        seconds = self._limit / _REPORTS_WITHIN_LIMIT
        with _StillWorking(lambda: self._exchange_sizes(_STILL_WORKING), seconds) as working:
            mine = _outcome_of(lambda: act(working.progress))
        if isinstance(working.error, TransferError):
            raise self._explained(working.error) from working.error
        if working.error is not None:
            raise working.error
        return self._results(mine)

    def _results(self, mine: _Outcome) -> list[Any]:
        outcomes = [mine] if self.group.size == 1 else self._all_gather(mine)
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if failed:
            first = outcomes[failed[0]].error
            others = f" (and so did ranks {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
            where = f" on rank {failed[0]} of {self.group.size}{others}" if self.group.size > 1 else ""
            kind = type(first) if isinstance(first, self.error) else self.error  # One of its subclasses says more.
            raise kind(f"{self.doing} failed{where}: {type(first).__name__}: {first}") from first
        return [outcome.result for outcome in outcomes]

    def each_rank(self, act: Callable[[], T]) -> T:
        """Calls `act` on each rank and returns this rank's own result, which is not sent."""
        results: list[T] = []
        self.all_ranks(lambda: results.append(act()))
        return results[0]

    def rank0(self, act: Callable[[], T]) -> T:
        """Calls `act` on rank 0 alone and returns its result on every rank."""
        acts = self.group.rank == 0 or self.group.backend == "fake"
        result = self.all_ranks(lambda: act() if acts else None)[0]
        return cast(T, result)

    def _all_gather(self, mine: _Outcome) -> list[_Outcome]:
        group, limit = self.group, self._limit
        if group.backend == "fake":  # One process plays one of the ranks: the others are taken to have the same.
            return [mine] * group.size
        sent = pickle.dumps(mine if _can_be_sent(mine.error) else _Outcome(None, _as_text(mine.error)))
        try:
            sizes = self._exchange_sizes(len(sent))
            while _STILL_WORKING in sizes:
                sizes = self._exchange_sizes(len(sent))
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            shard = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            parts = all_gather(packed, shard, group, sizes=sizes).wait(limit).split(sizes)
        except TransferError as error:
            raise self._explained(error) from error
        outcomes = [pickle.loads(ctypes.string_at(part.data_ptr(), part.nbytes)) for part in parts]  # Without numpy.
        outcomes[group.rank] = mine  # with its traceback
        return outcomes

    @property
    def _limit(self) -> float:
        return limit_of(self.group.process_group, self.limit_seconds)

    def _exchange_sizes(self, size: int) -> list[int]:
        # No other record has six integers, so that none of another call is taken for this one.
        record = [size, zlib.crc32(self.doing.encode(errors="replace")), 0, 0, 0, 0]
        rows = exchange(record, self.group, limit_seconds=self._limit)
        if len({row[1] for row in rows}) > 1:
            raise _different_calls(exchange_text(self.doing, self.group, limit_seconds=self._limit), self.group)
        return [row[0] for row in rows]

    def _explained(self, error: TransferError) -> ScaleDistributedError:
        if self.on_lost is not None:
            self.on_lost()
        self._recorder.events.append(f"failed in {self.doing} ({error.fact})")
        self._recorder.publish()
        lines = [f"{self.doing} failed: {error.fact}", "What each rank did last:"]
        lines += [f"  rank {rank}: {last}" for rank, last in self._recorder.dump_all_ranks(error.gone).items()]
        lines.append(
            "All ranks have to make this call together; what was saved before is as it was. The process group can't be "
            f"used any more: {recovery_hint()}"
        )
        return ScaleDistributedError("\n".join(lines), rank=self.group.rank, peer=error.peer, op=self.doing)


class _StillWorking:
    """While a call lasts, tells the other ranks now and then that it has gone on; they wait again each time.

    In a thread, because the long part is a call of the system, for example a write.

    Attributes:
        error: The error of these messages: another rank is lost, or does something else.
    """

    def __init__(self, tell: Callable[[], object], seconds: float) -> None:
        self.error: Exception | None = None
        self._tell, self._seconds = tell, seconds
        self._has_moved = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scale still working", daemon=True)

    def progress(self, count: int = 1) -> None:
        """The call goes on; raises where the others don't wait any more."""
        self._has_moved = True
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._seconds):
            if self._has_moved:
                self._has_moved = False
                try:
                    self._tell()
                except Exception as error:
                    self.error = error
                    return


def _outcome_of(act: Callable[[], object]) -> _Outcome:
    try:
        return _Outcome(act(), None)
    except Exception as error:
        return _Outcome(None, error)


def _can_be_sent(error: Exception | None) -> bool:
    """Whether an exception can be pickled and unpickled; many with their own constructor can't."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _as_text(error: Exception | None) -> Exception:
    return RuntimeError(f"{type(error).__name__}: {error}")


def _different_calls(calls: Sequence[str], group: Group) -> ScaleDistributedError:
    return ScaleDistributedError(
        f"the ranks do different things: {by_rank(calls)}. All ranks have to make this call together, with the same "
        "directory and step: let rank 0 decide, and broadcast it",
        rank=group.rank,
        op=calls[group.rank],
    )


def all_gather_json(value: T, contract: Contract, event: Event | str = END) -> list[T]:
    """Returns every rank's `value`, a JSON value, by rank; raises if a rank is at a different event."""
    with contract.waiting(event):
        text = json.dumps([str(event), value])
        texts = exchange_text(text, contract.group, limit_seconds=contract.limit_seconds)
    events, values = zip(*map(json.loads, texts), strict=True)
    if len(set(events)) > 1:
        raise _different_calls(events, contract.group)
    return list(values)


def all_gather_failures(error: BaseException | None, contract: Contract) -> list[str]:
    """Returns every rank's error with its traceback, by rank; "" of one that has not failed."""
    return all_gather_json("" if error is None else format_traceback(error), contract)


def call_on_all_ranks(act: Callable[[], T], what: str, contract: Contract) -> T:
    """Returns the result of `act` on this rank; raises on every rank if it raises on one, see `raise_on_all_ranks`."""
    done: list[T] = []
    refusal = None
    try:
        done.append(act())
    except Exception as error:
        refusal = error
    raise_on_all_ranks(refusal, what, contract)
    return done[0]


def raise_on_all_ranks(
    refusal: Exception | None, what: str, contract: Contract, error: type[Exception] = ValueError
) -> None:
    """Raises `refusal` on the rank that has one, and `error` with its text on all others; `what` names the event."""
    own = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    texts = all_gather_json(own, contract, what)
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(texts):
        if text:
            raise error(f"{text} (on rank {rank})")


def format_traceback(error: BaseException) -> str:
    """An error with its traceback, as the other ranks print it."""
    return "".join(traceback.format_exception(error)).rstrip()


def format_abort(what: str, reasons: Sequence[str], what_now: str) -> str:
    """Returns a text: which ranks failed in `what`, the state afterwards (`what_now`), and the first rank's error.

    >>> print(format_abort("step 3", ["", "ValueError: no such token"], "Nothing has changed."))
    step 3 was aborted on all ranks, because rank 1 failed. Nothing has changed. What rank 1 raised:
      ValueError: no such token
    """
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    first = "\n".join(f"  {line}" for line in reasons[failed[0]].splitlines())
    return f"{what} was aborted on all ranks, because {who} failed. {what_now} What rank {failed[0]} raised:\n{first}"
