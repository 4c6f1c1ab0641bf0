"""The errors that scale raises of its own accord while a program runs, in one tree.

    ScaleError (a RuntimeError)
    |-- LaunchError                the ranks did not find each other, or do not belong together
    |-- ScaleDistributedError      the ranks run different things, or can't reach each other
    |   |-- ContractError          they run, or are about to run, different things
    |   |   `-- DivergenceError    they hold different values of equal tensors
    |   |-- StepError              another rank failed, so all aborted the step; training can go on
    |   |   `-- StageError         scale_pipe: the same, with the stage and the micro-batch that failed
    |   `-- TransferError          one collective failed or timed out
    |       `-- P2PError           scale_pipe: one message between two stages failed or timed out
    |-- SnapshotError              scale_snapshot: saving or loading failed on all ranks; the group still works
    |   |-- DamagedSnapshotError   the files differ from those written
    |   |-- NewerSnapshotError     a newer version of scale-snapshot wrote it
    |   `-- ForeignCheckpointError another library wrote it; says which, and how it is converted
    |-- StateMismatch              a state does not fit the model; also a ValueError
    |-- ShardedTensorError         a function needs elements of a tensor that other ranks have
    |-- UseAfterReleaseError       scale_check.simulate: memory was read after it had been freed
    |-- RaceError                  scale_check.simulate: two accesses of the same memory have no order
    |-- RankError                  scale_core.testing: a rank ended without a result
    |-- RecomputationError         scale_checkpoint: the recomputed forward differs from the first one
    |-- BudgetError                scale_checkpoint: no plan fits the memory; also a ValueError
    |-- SplitError                 scale_pipe: a model can't be cut into stages there
    |-- PlaceholderTensorError     scale_pipe: a value was asked of a tensor that another stage computes
    |-- InputError                 scale_train, exit code 2: the request can't be done; also a ValueError
    |-- Interrupted                scale_train, exit code 128 + n: signal n asked to stop, and all is saved
    |-- TrainingDiverged           scale_train, exit code 1: the loss or the weights are not finite
    `-- RanksLost                  scale_train, exit code 1: another rank ended, or can't be reached

A wrong argument is a `ValueError` or a `TypeError`, as anywhere in Python; so is a wrong schedule, scale_pipe's
`ScheduleError`. The text of a transport (gloo, NCCL) is the cause of such an error, never its message.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ScaleError(RuntimeError):
    """The base class of all errors here; each can be pickled, with its attributes and notes.

    See also: [all error classes](../guides/troubleshooting.md#error-classes).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[ScaleError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ScaleError:
    error = kind.__new__(kind, *args)  # Without __init__, whose arguments are others than the text.
    error.args = args
    error.__dict__.update(attributes)
    return error


class LaunchError(ScaleError):
    """The ranks did not find each other, or do not belong together; the message lists the variables that this rank saw.

    Also raised where a launcher has started several ranks and a function is called before their process group exists.

    See also: [what to do about a LaunchError](../guides/troubleshooting.md#launcherror).
    """


_last_snapshot: str | None = None


def set_last_snapshot(path: str) -> None:
    """Records the last complete snapshot, which every later `ScaleDistributedError` names."""
    global _last_snapshot
    _last_snapshot = path


def recovery_hint() -> str:
    """The advice when the group is broken, for errors."""
    end = "end this process and start from the last checkpoint"
    return end if _last_snapshot is None else f"{end}, {_last_snapshot}"


class ScaleDistributedError(ScaleError):
    """The ranks of a group run different things, or can't reach each other.

    Ranks are numbers in the group that took part. Unknown values are None, 0 or "".

    Attributes:
        rank: The rank that found it; in a `StepError` that names one, the rank that failed.
        peer: The rank that was waited for.
        step: The pass in which it was seen, counted from 1.
        unit: The unit (module, bucket, stage) at which it was seen.
        op: The common operation, for example "all_gather" or "saving runs/1/step-00000012".
        last_snapshot: The last complete snapshot that this process has written or read, to start again from.

    See also: [what to do about a ScaleDistributedError](../guides/troubleshooting.md#scaledistributederror).
    """

    def __init__(
        self,
        message: str,
        *,
        step: int = 0,
        unit: str = "",
        rank: int | None = None,
        peer: int | None = None,
        op: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.step = step
        self.unit = unit
        self.op = op
        self.last_snapshot = _last_snapshot


class ContractError(ScaleDistributedError):
    """The ranks have run, or are about to run, different things.

    See also: [what to do about a ContractError](../guides/troubleshooting.md#contracterror).
    """


class DivergenceError(ContractError):
    """The ranks hold different values of a parameter, a buffer or an input that must be the same on all of them.

    Attributes:
        names: The differences, by qualified name and shape.
        ranks: The ranks of the group that hold other values than most ranks do.

    See also: [what to do about a DivergenceError](../guides/troubleshooting.md#divergenceerror).
    """

    def __init__(
        self, message: str, *, step: int = 0, names: tuple[str, ...] = (), ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message, step=step)
        self.names = names
        self.ranks = ranks


class StepError(ScaleDistributedError):
    """A different rank failed in this step, so all ranks aborted it; the failed rank raises its own error.

    Parameters and the optimizer's state are the same as before the step, and training can continue with the next batch.
    For gradients accumulated before it, see the guide of the technique.

    See also: [what to do about a StepError](../guides/troubleshooting.md#steperror).
    """


# All errors of a transport are of one type; only their texts differ.
_CLOSED_BY_PEER = re.compile("(closed|reset) by peer|broken pipe", re.IGNORECASE)
_GIVEN_UP = re.compile("pair closure", re.IGNORECASE)
_TIMED_OUT = re.compile(r"timed? ?out(?: waiting (\d+) ?ms)?", re.IGNORECASE)


class TransferError(ScaleDistributedError):
    """A collective failed or timed out; the group can't be used any more.

    Attributes:
        gone: `peer`, where that rank has closed the connection, as it does by ending; otherwise None.
        fact: The message without the advice.

    See also: [what to do about a TransferError](../guides/troubleshooting.md#transfererror).
    """

    def __init__(self, op: str, peer: int | None, cause: str, *, rank: int | None = None) -> None:
        whom, subject = ("the group", "a rank") if peer is None else (f"rank {peer}", "it")
        reason, is_broken = _reason_of(cause, subject)
        self.fact = f"{op} with {whom} failed: {reason}"
        next_thing = f". The process group can't be used any more: {recovery_hint()}" if is_broken else ""
        super().__init__(self.fact + next_thing, op=op, peer=peer, rank=rank)
        self.gone = peer if _CLOSED_BY_PEER.search(cause) else None


def _reason_of(cause: str, who: str) -> tuple[str, bool]:
    """The reason in a transport's text, and whether it is one: the group can't be used then."""
    if _CLOSED_BY_PEER.search(cause):
        return f"{who} has closed the connection, as a process does that ends or times out", True
    if _GIVEN_UP.search(cause):
        return "an earlier wait in this process group timed out, which closed its connections", True
    if match := _TIMED_OUT.search(cause):
        limit = f"{int(match[1]) / 1000:g} s" if match[1] else "the limit"
        return f"no answer within {limit}", True
    return cause, False


class ShardedTensorError(ScaleError):
    """A function of torch needs elements of a tensor that other ranks have; nothing was changed.

    See also: [what to do about a ShardedTensorError](../guides/troubleshooting.md#shardedtensorerror).
    """


def renamed_arguments(**lines: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse these keyword arguments by a TypeError with the arguments to write in their place.

    >>> @renamed_arguments(group="process_group=")
    ... def average(process_group=None):
    ...     pass
    >>> average(group=None)
    Traceback (most recent call last):
    TypeError: average: there is no argument group=; write process_group=
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in lines.keys() & kwargs.keys():
                raise TypeError(f"{function.__qualname__}: there is no argument {name}=; write {lines[name]}")
            return function(*args, **kwargs)

        return call

    return decorate
