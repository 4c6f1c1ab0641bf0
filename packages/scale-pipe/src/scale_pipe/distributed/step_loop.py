"""The passes of one rank, one after the other: each ends on all ranks alike, with a result or with an error."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from torch import nn

from scale_core import ScaleDistributedError
from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.consistency.flight_recorder import LastWords
from scale_pipe.distributed import errors as failures
from scale_pipe.distributed.comm.messages import Failure, Pass
from scale_pipe.distributed.comm.p2p import LinkError, Links
from scale_pipe.distributed.data_parallel import gradients_of
from scale_pipe.distributed.errors import Verdict, agree_on_end, mean_loss
from scale_pipe.distributed.microbatch_grads import Samples
from scale_pipe.distributed.profile import spans_of
from scale_pipe.distributed.program.channels import Traffic
from scale_pipe.distributed.runtime import Run
from scale_pipe.distributed.shared_params import Shared
from scale_pipe.distributed.stage import Stage
from scale_pipe.distributed.step_inputs import Given, OnStep
from scale_pipe.schedules.simulation import TimedAction


class Passes:
    """What a rank knows of its passes.

    Args:
        group: The ranks of the pipeline.
        limit_seconds: The longest wait for another rank.

    Attributes:
        last: What the last one has computed, in seconds from its begin, and when that was; None before the first.
    """

    def __init__(self, group: Group, limit_seconds: float | None) -> None:
        self.last: tuple[tuple[TimedAction, ...], float] | None = None
        self._group = group
        self._limit = limit_seconds
        self._words = LastWords(group)
        self._number = 0
        self._kind = Pass.STEP
        self._broken: str | None = None

    def begin(self, kind: Pass) -> None:
        """Another one begins.

        Args:
            kind: Of which kind.

        Raises:
            ScaleDistributedError: The ranks have lost each other before.
        """
        if self._broken is not None:
            raise ScaleDistributedError(
                f"the ranks of the pipeline have lost each other in an earlier step:\n{self._broken}\n"
                "end this process and start from the last checkpoint",
                step=self._number,
            )
        self._number += 1
        self._kind = kind

    def run(self, traffic: Traffic, stages: Mapping[int, Stage], given: Given, shared: Shared) -> tuple[Run, Verdict]:
        """Goes through a list, and returns what came of it here, and what all ranks know of it.

        Args:
            traffic: What this rank does in passes of each kind, and by which links.
            stages: Of this rank.
            given: What it is given.
            shared: The parameters that it shares with others.

        Raises:
            StageError: A stage has failed, on whichever rank.
            ScaleDistributedError: The ranks have lost each other.
        """
        heard = given.samples is not None and given.samples.is_heard
        on_step = given.on_step
        if heard:  # How far an optimizer goes all ranks know at the end of the step alone.
            given = given._replace(on_step=None)
        run = Run(self._group, self._kind, traffic.orders, stages, traffic.links, given, shared, self._limit)
        steps_late = heard and on_step is not None
        terms = () if given.samples is None else given.samples.terms
        began, clock = time.time(), time.perf_counter()
        try:
            run.go()
            if run.failure is not None and run.failure.lost:
                self._lose(run.failure)
            loss = mean_loss(run.losses, run.shares) if run.losses else None
            failed = run.failure is not None
            verdict = agree_on_end(
                self._group,
                failed=failed,
                loss=loss,
                heard=heard,
                terms=terms,
                steps_late=steps_late,
                limit_seconds=self._limit,
            )
            if verdict.failed:
                self._give_up(run)
        except TransferError as error:
            self._lose(failures.of_end(error, self._group.rank))
        except failures.StageError:
            raise
        except BaseException as error:  # The others may still wait for this rank, which has left its list.
            self._broken = self._broken or f"rank {self._group.rank} left step {self._number}: {error!r}"
            raise
        if given.samples is not None and verdict.heard:
            self._tell(given.samples, verdict, run, traffic.sample_links)
        if verdict.steps_late:
            self._step_late(run, on_step if steps_late else None)
        self.last = spans_of(run.times, self._group.rank, clock), began
        return run, verdict

    def _tell(self, samples: Samples, verdict: Verdict, run: Run, links: Links) -> None:
        """Tells those who measure gradients of a step that has gone well on all ranks."""
        shares = [run.shares[number] for number in sorted(run.shares)]
        try:
            samples.check_holders(verdict.heard)
            if not verdict.is_heard_alike:
                samples.check_terms(self._group, self._limit)
            samples.add_up(len(shares), links)
        except LinkError as error:
            self._lose(failures.of_link(error, rank=self._group.rank, stage=error.slot.target))
        except TransferError as error:
            self._lose(failures.of_end(error, self._group.rank))
        except RuntimeError as error:
            if run.stepped:
                error.add_note(_were_stepped(run))
            raise
        samples.end([share.weight for share in shares])

    def _step_late(self, run: Run, on_step: OnStep | None) -> None:
        """Steps stages when all ranks are through, and gives the step up on all of them if one fails."""
        try:
            if on_step is not None:
                run.step_all(on_step)
            rows = exchange([int(run.failure is not None)], self._group, limit_seconds=self._limit)
        except TransferError as error:
            self._lose(failures.of_end(error, self._group.rank))
        except BaseException as error:
            self._broken = f"rank {self._group.rank} left step {self._number}: {error!r}"
            raise
        if any(failed for (failed,) in rows):
            self._give_up(run)

    def _give_up(self, run: Run) -> NoReturn:
        """Raises on all ranks what was raised on one."""
        note = _were_stepped(run) if run.stepped else ""
        cause, run.cause = run.cause, None  # Its traceback leads to the run: what is a cycle outlives the error.
        failures.raise_together(run.failure, self._group, self._number, cause, self._limit, note)

    def _lose(self, failure: Failure) -> NoReturn:
        told = failure._replace(text=f"{failure.text} (in {self._kind})")
        try:
            failures.raise_lost(told, self._number, self._words)
        except ScaleDistributedError as error:
            self._broken = str(error)
            raise


def _were_stepped(run: Run) -> str:
    stages = ", ".join(map(str, run.stepped))
    return f"Stages {stages} had been stepped by then, which can't be taken back: load the last checkpoint"


@contextmanager
def kept_gradients(modules: Iterable[nn.Module], stages: Mapping[int, Stage]) -> Iterator[None]:
    """Around a step: gradients are afterwards as before it if it raises anything.

    Args:
        modules: Of this rank's stages: their parameters have gradients, and so may pieces of these in optimizers.
        stages: Likewise; what they hold is let go of.
    """
    held = dict.fromkeys(tensor for module in modules for pair in gradients_of(module) for tensor in pair)
    before = [(tensor, None if tensor.grad is None else tensor.grad.clone()) for tensor in held]
    try:
        yield
    except BaseException:
        for stage in stages.values():
            stage.discard()
        for tensor, grad in before:
            tensor.grad = grad
        raise
