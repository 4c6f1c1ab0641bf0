"""Act on every rank, and fail on every rank.

Where one rank can fail alone (a full disk, a file that it can't see) the others would wait for it in the next
collective until their limit, and then report the wait. Here they exchange what happened first: all go on, or all raise
the same error, which says what went wrong and where.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from scale_core.comm.control_plane import exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event

T = TypeVar("T")


@dataclass(frozen=True)
class Together:
    """One undertaking of a group, such as saving a snapshot.

    Attributes:
        group: The ranks that take part.
        doing: What they do, for the error: "saving runs/1/step-00000012".
        error: The type of the error that all of them raise if one fails.
    """

    group: Group
    doing: str
    error: type[Exception]

    def all_do(self, act: Callable[[], T]) -> list[T]:
        """Calls `act` on each rank and returns every rank's result, by rank; the results must be picklable.

        Raises:
            Exception: Of the type `error`, on all ranks, if it raised on one; the original is its `__cause__`.
        """
        outcomes = _exchange(_outcome(act), self.group)
        self._raise_if_failed(outcomes)
        return [outcome.result for outcome in outcomes]

    def each_does(self, act: Callable[[], T]) -> T:
        """Calls `act` on each rank and returns this rank's result, which the others don't get; else as `all_do`."""
        outcome = _outcome(act)
        self._raise_if_failed(_exchange(_Outcome(None, outcome.error), self.group))
        result: T = outcome.result
        return result

    def first_does(self, act: Callable[[], T]) -> T:
        """Calls `act` on rank 0 alone and returns its result on every rank; else as `all_do`."""
        outcomes = _exchange(_outcome(act) if self.group.rank == 0 else _Outcome(None, None), self.group)
        self._raise_if_failed(outcomes)
        result: T = outcomes[0].result
        return result

    def _raise_if_failed(self, outcomes: list[_Outcome]) -> None:
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if not failed:
            return
        first = outcomes[failed[0]].error
        others = f" (and so did ranks {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        where = f" on rank {failed[0]} of {self.group.size}{others}" if self.group.size > 1 else ""
        raise self.error(f"{self.doing} failed{where}: {type(first).__name__}: {first}") from first


@dataclass(frozen=True)
class _Outcome:
    result: Any
    error: Exception | None


def _outcome(act: Callable[[], T]) -> _Outcome:
    try:
        return _Outcome(act(), None)
    except Exception as error:
        return _Outcome(None, error)


def _exchange(mine: _Outcome, group: Group) -> list[_Outcome]:
    if group.size == 1:
        return [mine]
    try:
        pickle.loads(pickle.dumps(mine.error))  # Exceptions with their own constructor may fail to unpickle.
        sent = mine
    except Exception:
        sent = _Outcome(None, RuntimeError(f"{type(mine.error).__name__}: {mine.error}"))
    outcomes: list[Any] = [None] * group.size
    dist.all_gather_object(outcomes, sent, group=group.process_group)
    outcomes[group.rank] = mine  # with its traceback
    return outcomes


def do_alike(act: Callable[[], T], what: str, contract: Contract) -> T:
    """Does what this rank may refuse, for itself; raises on every rank if one does. All ranks call it together.

    Args:
        act: Called once; returns what this returns.
        what: As in `refuse_alike`.
        contract: As in `refuse_alike`.

    Raises:
        Exception: What `act` has raised; or `ValueError`, with the words of the first rank where it has.
        ScaleDistributedError: A rank did something else.
    """
    done: list[T] = []
    refusal = None
    try:
        done.append(act())
    except Exception as error:
        refusal = error
    refuse_alike(refusal, what, contract)
    return done[0]


def refuse_alike(refusal: Exception | None, what: str, contract: Contract, error: type[Exception] = ValueError) -> None:
    """Raises on every rank if one has something to refuse; all ranks call it together.

    Args:
        refusal: What this rank has to raise.
        what: What the ranks are doing, for those who wait in vain.
        contract: What they have promised each other.
        error: What the others raise.

    Raises:
        Exception: `refusal`; or `error`, with the words of the first rank that refuses.
        ScaleDistributedError: A rank did something else.
    """
    words = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    with contract.waiting(Event(what, "")):
        texts = exchange_text(words, contract.group, limit_seconds=contract.limit_seconds)
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(texts):
        if text:
            raise error(f"{text} (on rank {rank})")
