"""`StageError`, and the failures that are sent in the place of tensors so that all ranks raise it together."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from typing import NoReturn

from scale_core import StepError
from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import Group
from scale_core.errors import TransferError
from scale_pipe.distributed.message import Failure, Payload, Slot
from scale_pipe.distributed.p2p import P2PError
from scale_pipe.distributed.program import StepKind
from scale_pipe.schedules.action import EVERY_MICRO_BATCH, Kind

ACTION_NAMES = {
    Kind.FORWARD: "the forward",
    Kind.INPUT_GRADIENT: "the gradient of the input",
    Kind.WEIGHT_GRADIENT: "the gradients of the parameters",
    Kind.BACKWARD: "the backward",
    Kind.STEP: "the optimizer's step",
}

_LONGEST_TEXT = 20_000


class StageError(StepError):
    """A stage has failed, so all ranks aborted the step; each of them raises this, with the first traceback.

    Gradients are the same as before the step, and training can continue with the next batch.

    Attributes:
        rank: The rank where it was raised.
        stage: The stage in which it was raised.
        micro_batch: The micro-batch on which it was raised; -1 where it was on none.

    See also: [what to do about a StageError](../guides/troubleshooting.md#stageerror).
    """

    def __init__(
        self, message: str, *, step: int = 0, unit: str = "", rank: int = -1, stage: int = -1, micro_batch: int = -1
    ) -> None:
        super().__init__(message, step=step, unit=unit)
        self.rank = rank
        self.stage = stage
        self.micro_batch = micro_batch


def failure_from_error(
    error: Exception,
    *,
    rank: int,
    stage: int,
    action: str,
    micro_batch: int = EVERY_MICRO_BATCH,
    arrived: Sequence[tuple[str, Payload]] = (),
) -> Failure:
    """The failure for an exception; `arrived` are the inputs of the stage, each with its source."""
    text = str(error)[:_LONGEST_TEXT]
    text += "".join(f"\n  it was given {payload} by {source}" for source, payload in arrived)
    trace = "".join(traceback.format_exception(error))[-_LONGEST_TEXT:]
    return Failure(rank, stage, micro_batch, action, type(error).__name__, text, trace)


def failure_from_p2p(error: P2PError, *, rank: int, stage: int) -> Failure:
    """The failure for a transfer that did not complete; `stage` needed it, or had sent it."""
    slot = error.slot
    other = slot.source if slot.target == stage else slot.target
    verb = "waited for" if slot.target == stage else "had sent"
    text = f"rank {rank} {verb} the {slot} (stage {other} is on rank {error.peer}): {error.fact}"
    return Failure(rank, stage, slot.micro_batch, "a transfer", type(error).__name__, text, "", rank_lost=True)


def relayed_failure(failure: Failure, *, rank: int, slot: Slot, peer: int) -> Failure:
    """The failure of a rank to which `peer` has relayed a lost one: it names the rank that it waited for itself."""
    text = f"rank {rank} waited for the {slot} (stage {slot.source} is on rank {peer}), which said: {failure.text}"
    return failure._replace(rank=rank, stage=slot.target, micro_batch=slot.micro_batch, text=text[:_LONGEST_TEXT])


def mismatched_pass(mine: StepKind, theirs: StepKind, *, rank: int, stage: int, peer: int) -> Failure:
    """The failure for ranks that were called for different passes, found by the first message."""
    calls = {StepKind.STEP: "pipe.step(...)", StepKind.EVALUATION: "pipe.evaluate(...)"}
    text = (
        f"rank {rank} began {mine} with {calls[mine]}, and rank {peer} {theirs} with {calls[theirs]}. All ranks make "
        "the same calls in the same order: look for a condition around one of them that is not the same on all ranks"
    )
    return Failure(rank, stage, EVERY_MICRO_BATCH, "what it was called with", "RuntimeError", text, "")


def failure_at_end(error: TransferError, rank: int) -> Failure:
    """The failure for a rank that did not come to the exchange at the end of a pass."""
    text = f"rank {rank} had finished its stages and waited for the others at the end: {error.fact}"
    return Failure(rank, -1, EVERY_MICRO_BATCH, "the end", type(error).__name__, text, "", rank_lost=True)


def raise_on_all_ranks(
    failure: Failure | None,
    group: Group,
    step: int,
    cause: Exception | None,
    limit_seconds: float | None,
    note: str = "",
) -> NoReturn:
    """Raises the same StageError on all ranks: the error of the earliest stage that failed.

    `cause` was raised on this rank, and `note` tells changes that can't be undone.
    """
    texts = exchange_text(json.dumps([failure, note]), group, limit_seconds=limit_seconds)
    rows = [json.loads(text) for text in texts]
    first = min((Failure(*entry) for entry, _ in rows if entry), key=lambda one: (one.stage, one.micro_batch, one.rank))
    notes = "".join(f"\n{note}" for _, note in rows if note)
    batch = "" if first.micro_batch < 0 else f" of micro-batch {first.micro_batch}"
    where = f"stage {first.stage} on rank {first.rank}" if first.stage >= 0 else f"rank {first.rank}"
    # Raised unnamed: a name in this frame would be a cycle, which keeps the traceback's objects until it is collected.
    raise StageError(
        f"step {step}: {where} raised {first.error_type} in {first.action}{batch}: {first.text}\n"
        f"All ranks aborted the step; gradients are as before it.{notes}\n{first.traceback}".rstrip(),
        step=step,
        unit=f"stage {first.stage}",
        rank=first.rank,
        stage=first.stage,
        micro_batch=first.micro_batch,
    ) from (cause if first.rank == group.rank else None)
