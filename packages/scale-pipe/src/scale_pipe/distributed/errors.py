"""What goes wrong in a step: told to all ranks in the place of tensors, and raised by all of them alike."""

from __future__ import annotations

import json
import struct
import traceback
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from scale_core import ScaleDistributedError, StepError, exchange_text
from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.consistency.flight_recorder import LastWords
from scale_core.microbatch_grads import Terms
from scale_pipe.distributed.comm.messages import Content, Failure, Pass, Share
from scale_pipe.distributed.comm.p2p import LinkError
from scale_pipe.distributed.program.plan import Slot
from scale_pipe.schedules.action import EVERY_MICRO_BATCH, Kind

DOING = {
    Kind.FORWARD: "the forward",
    Kind.INPUT_GRADIENT: "the gradient of the input",
    Kind.WEIGHT_GRADIENT: "the gradients of the parameters",
    Kind.BACKWARD: "the backward",
    Kind.STEP: "the optimizer's step",
}
"""What a rank does in each action, in words."""

_LONGEST_TEXT = 20_000


class StageError(StepError):
    """A stage has failed, so all ranks gave the step up; each of them raises this, with the first traceback.

    Gradients are as before the step, and training can go on with the next batch.

    Attributes:
        rank: Where it was raised.
        stage: In which stage.
        micro_batch: On which micro-batch; -1 where it was on none.
    """

    def __init__(
        self, message: str, *, step: int = 0, unit: str = "", rank: int = -1, stage: int = -1, micro_batch: int = -1
    ) -> None:
        super().__init__(message, step=step, unit=unit)
        self.rank = rank
        self.stage = stage
        self.micro_batch = micro_batch


def of_error(
    error: Exception,
    *,
    rank: int,
    stage: int,
    micro_batch: int,
    doing: str,
    arrived: Sequence[tuple[str, Content]] = (),
) -> Failure:
    """Puts an exception into words that can be sent.

    Args:
        error: What was raised.
        rank: Here.
        stage: In which stage.
        micro_batch: On which micro-batch.
        doing: What was done.
        arrived: What the stage had got, and from where.
    """
    text = str(error)[:_LONGEST_TEXT]
    text += "".join(f"\n  it was given {content} by {source}" for source, content in arrived)
    trace = "".join(traceback.format_exception(error))[-_LONGEST_TEXT:]
    return Failure(rank, stage, micro_batch, doing, type(error).__name__, text, trace)


def of_link(error: LinkError, *, rank: int, stage: int) -> Failure:
    """Puts the loss of another rank into words.

    Args:
        error: What a transfer has raised.
        rank: Here.
        stage: The stage that needed it, or had sent it.
    """
    slot = error.slot
    other = slot.source if slot.target == stage else slot.target
    way = "waited for" if slot.target == stage else "had sent"
    text = f"rank {rank} {way} the {slot} (stage {other} stands on rank {error.peer}): {error.cause}"
    return Failure(rank, stage, slot.micro_batch, "a transfer", type(error).__name__, text, "", lost=True)


def passed_on(failure: Failure, *, rank: int, slot: Slot, peer: int) -> Failure:
    """Returns what a rank says that was told of a loss: it names whom it waited for itself.

    Args:
        failure: What it was told.
        rank: Here.
        slot: What it waited for.
        peer: Who told it.
    """
    text = f"rank {rank} waited for the {slot} (stage {slot.source} stands on rank {peer}), which said: {failure.text}"
    return failure._replace(rank=rank, stage=slot.target, micro_batch=slot.micro_batch, text=text[:_LONGEST_TEXT])


def of_other_pass(mine: Pass, theirs: Pass, *, rank: int, stage: int, peer: int) -> Failure:
    """Puts into words that the ranks were called for different passes.

    Args:
        mine: What this rank was called for.
        theirs: What the rank was called for that the first message has come from.
        rank: Here.
        stage: The first of this rank.
        peer: Who has sent the message.
    """
    calls = {Pass.STEP: "pipe.step(...)", Pass.EVALUATION: "pipe.evaluate(...)"}
    text = (
        f"rank {rank} began {mine} with {calls[mine]}, and rank {peer} {theirs} with {calls[theirs]}: all ranks make "
        "the same calls in the same order; look for a condition around one of them that is not the same on all ranks"
    )
    return Failure(rank, stage, EVERY_MICRO_BATCH, "what it was called with", "RuntimeError", text, "")


def of_end(error: TransferError, rank: int) -> Failure:
    """Puts into words that the ranks did not meet at the end of a pass.

    Args:
        error: What the exchange has raised.
        rank: Here.
    """
    text = f"rank {rank} was through with its stages and waited for the others at the end: {error}"
    return Failure(rank, -1, EVERY_MICRO_BATCH, "the end", type(error).__name__, text, "", lost=True)


def raise_lost(failure: Failure, step: int, words: LastWords) -> NoReturn:
    """Raises that the ranks have lost each other.

    Args:
        failure: How it was seen here.
        step: Counted from 1.
        words: To leave and to find what each rank did last.

    Raises:
        ScaleDistributedError: Always.
    """
    words.add(f"step {step}: {failure.text}")
    words.publish()
    lines = [f"step {step}: {failure.text}", "What each rank did last:"]
    lines += [f"  rank {rank}: {text}" for rank, text in words.of_all().items()]
    lines.append("End this process and start from the last checkpoint")
    raise ScaleDistributedError("\n".join(lines), step=step, unit=f"stage {failure.stage}")


def raise_together(
    failure: Failure | None,
    group: Group,
    step: int,
    cause: Exception | None,
    limit_seconds: float | None,
    note: str = "",
) -> NoReturn:
    """Raises the same error on all ranks, which are all here: the one of the earliest stage that has failed by itself.

    Args:
        failure: What this rank knows of; None where it has heard of nothing.
        group: The ranks.
        step: Counted from 1.
        cause: What was raised on this rank, if it was.
        limit_seconds: How long to wait for another rank.
        note: What can't be taken back.

    Raises:
        StageError: Always.
        TransferError: A rank is lost.
    """
    texts = exchange_text(json.dumps([failure, note]), group, limit_seconds=limit_seconds)
    told = [json.loads(text) for text in texts]
    first = min((Failure(*entry) for entry, _ in told if entry), key=lambda one: (one.stage, one.micro_batch, one.rank))
    notes = "".join(f"\n{note}" for _, note in told if note)
    batch = "" if first.micro_batch < 0 else f" of micro-batch {first.micro_batch}"
    where = f"stage {first.stage} on rank {first.rank}" if first.stage >= 0 else f"rank {first.rank}"
    # Raised unnamed: a name in this frame would be a cycle, which keeps what the traceback holds until it is collected.
    raise StageError(
        f"step {step}: {where} raised {first.kind} in {first.doing}{batch}: {first.text}\n"
        f"All ranks gave the step up; gradients are as before it.{notes}\n{first.trace}".rstrip(),
        step=step,
        unit=f"stage {first.stage}",
        rank=first.rank,
        stage=first.stage,
        micro_batch=first.micro_batch,
    ) from (cause if first.rank == group.rank else None)


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Verdict(NamedTuple):
    """What all ranks know after a pass.

    Attributes:
        failed: The ranks on which it was given up.
        loss: Its mean loss; None where nobody has one.
        dtype: That of the loss.
        heard: The ranks on which somebody measures gradients by micro-batch.
        is_heard_alike: It is done on the same terms on all ranks.
        steps_late: Some rank is to step its stages now that all are through.
    """

    failed: list[int]
    loss: float | None
    dtype: torch.dtype
    heard: list[int]
    is_heard_alike: bool
    steps_late: bool

    def loss_on(self, device: torch.device) -> Tensor | None:
        """Returns the loss as a scalar.

        Args:
            device: Where it is wanted.
        """
        return None if self.loss is None else torch.tensor(self.loss, dtype=self.dtype, device=device)


def agree_on_end(
    group: Group,
    *,
    failed: bool,
    loss: Tensor | None,
    heard: bool,
    terms: Sequence[Terms],
    steps_late: bool,
    limit_seconds: float | None,
) -> Verdict:
    """Tells all ranks how the pass went here; the one place where a step waits for what a device has computed.

    Args:
        group: All ranks, which are all here.
        failed: It was given up here.
        loss: A scalar, on the rank of the last stage.
        heard: Somebody measures gradients by micro-batch here.
        terms: Of those who do.
        steps_late: Stages of this rank are to be stepped when all are through.
        limit_seconds: How long to wait for another rank.

    Raises:
        TransferError: A rank did not come.
    """
    bits, dtype = 0, -1  # Records of other lengths, as those of a contract, are never taken for these five integers.
    if loss is not None and not failed:
        (bits,) = struct.unpack("<q", struct.pack("<d", float(loss)))
        dtype = _DTYPES.index(loss.dtype) if loss.dtype in _DTYPES else 0
    fingerprint = zlib.crc32(repr([tuple(each) for each in terms]).encode()) if terms else 0
    rows = exchange(
        [int(failed), bits, dtype, int(heard) + 2 * int(steps_late), fingerprint], group, limit_seconds=limit_seconds
    )
    known = next((row for row in rows if row[2] >= 0), None)
    value = None if known is None else struct.unpack("<d", struct.pack("<q", known[1]))[0]
    return Verdict(
        failed=[rank for rank, row in enumerate(rows) if row[0]],
        loss=value,
        dtype=_DTYPES[known[2]] if known else torch.float32,
        heard=[rank for rank, row in enumerate(rows) if row[3] & 1],
        is_heard_alike=len({row[4] for row in rows}) == 1,
        steps_late=any(row[3] & 2 for row in rows),
    )


def mean_loss(losses: Mapping[int, Tensor], shares: Mapping[int, Share]) -> Tensor:
    """Returns the mean over the samples of all micro-batches, added up in their order.

    Args:
        losses: Means of one element, by micro-batch; one at least.
        shares: Which parts of the mini-batch these are.
    """
    total: Tensor | None = None
    for number in sorted(losses):
        part = losses[number].reshape(()) * shares[number].weight
        total = part if total is None else total + part
    assert total is not None
    return total
