"""A rank whose forward or backward fails tells the others of its group, which wait for it in the middle of theirs.

Tensor parallel ranks compare nothing at the end of a step, so they can't abort a step together. The rank that fails
publishes its error, and asks the others whether they have failed, too. Those that have go on as before. Those that wait
for something else do not answer, which ends the connections: they raise at once, with this rank's error, and this rank
can't run the pass again while the others are in the middle of it and take its messages for those that they wait for.

NCCL has no connections that the others would see closed, and matches what this rank sends next with what they wait for.
There this rank aborts its communicator and says so in the rendezvous store, which a thread of each rank looks into: it
aborts the communicator of its rank, and the next collective raises.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from scale_core import compat
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_core.compat import ends_recomputation, graph_task_id
from scale_core.consistency.flight_recorder import FlightRecorder, next_unique_id
from scale_core.errors import TransferError, recovery_hint
from scale_core.hooks.autograd import before_backward, in_autograds_thread, register_post_backward
from scale_core.hooks.module_parts import ForEachShardHook

# How long the other ranks may take to fail as well, where all of them do.
_GRACE_SECONDS = 5.0
# How often a rank looks whether another one has aborted the communicator, as torch's own watchdog does.
_POLL_SECONDS = 1.0
# No other record has so many integers, so that none of another check is taken for this one.
_RECORD = [0] * 9
# How an event begins that says that a collective of the group has failed.
_LOST = "failed in "


class _PassRecorder:
    """The flight recorder of the last model that is divided over a group."""

    recorder: ReferenceType[FlightRecorder] | None = None
    abort: CommunicatorAbort | None = None


class CommunicatorAbort:
    """Aborts the communicator of a group on all its ranks once one of them says so; for backends other than gloo.

    torch has no such function of its own (as of 2.13): `ProcessGroupNCCL.abort` ends what this rank has started, and
    its peers wait until their limit.
    """

    def __init__(self, group: Group) -> None:
        assert group.process_group is not None
        self._process_group = ref(group.process_group)
        self._key = f"scale/abort/{'.'.join(map(str, group.ranks))}/{next_unique_id('abort', group)}"
        threading.Thread(target=self._watch, name="scale communicator abort", daemon=True).start()

    @staticmethod
    def of(group: Group) -> CommunicatorAbort | None:
        """That of a group, made at the first call, which all ranks make; None where connections end by themselves."""
        if group.process_group is None or group.backend in ("fake", "gloo"):
            return None
        state = group.state.get_or_create(_PassRecorder)
        state.abort = state.abort or CommunicatorAbort(group)
        return state.abort

    def abort_on_all_ranks(self) -> None:
        """Aborts it on this rank at once, and on the others within seconds."""
        store, process_group = compat.default_store(), self._process_group()
        if store is not None and process_group is not None:
            store.set(self._key, "aborted")
            compat.abort_communicators(process_group)

    def _watch(self) -> None:
        is_over = threading.Event()
        while not is_over.wait(_POLL_SECONDS):
            store, process_group = compat.default_store(), self._process_group()
            try:
                if store is None or process_group is None:
                    return
                if store.check([self._key]):
                    compat.abort_communicators(process_group)
                    return
            except RuntimeError:  # The store is gone, and with it the job.
                return
            del store, process_group  # Neither is to outlive its last user.


class FailedPass(ForEachShardHook):
    """Forward hook of a divided model, to be called after an error, too; all ranks of the group make it together."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._recorder = FlightRecorder(group)
        self._abort = CommunicatorAbort.of(group)
        self._backward = -1  # autograd's number of the backward whose end is waited for
        self._is_failed = False  # A backward has failed, and the others have not heard it.
        group.state.get_or_create(_PassRecorder).recorder = ref(self._recorder)

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._is_failed:
            self._is_failed = False
            self._fail_backward()
        if output is not None:
            if torch.is_grad_enabled():
                before_backward(output, self._begin_backward)
            return
        error = sys.exception()
        if error is None or ends_recomputation(error) or not _comes_out_of(model, error):
            return
        failed = f"raised {type(error).__name__}: {_first_line(error)}"
        if isinstance(error, TransferError):  # The others hear it by the connection, too.
            self._publish(failed)
            self._abort_communicator()
        elif not self._all_have_failed(failed):
            error.add_note(
                f"other ranks of {list(self._group.ranks)} are in the middle of this pass, and end with this error, "
                f"too. Their process group can't be used any more: {recovery_hint()}"
            )

    def _begin_backward(self) -> None:
        if self._backward != graph_task_id():
            self._backward = graph_task_id()
            register_post_backward(lambda: None, self._fail_backward)

    def _fail_backward(self) -> None:
        """Autograd gives the error to nobody but the caller of the backward."""
        self._is_failed = in_autograds_thread()
        if self._is_failed:
            return  # The next call tells the others.
        if not any(str(event).startswith(_LOST) for event in self._recorder.events):
            self._all_have_failed("its backward pass failed, with an error that is raised there")

    def _all_have_failed(self, what: str) -> bool:
        """Reports the failure of this rank, and ends the connections unless all ranks have failed in this pass."""
        self._publish(what)
        try:
            exchange(_RECORD, self._group, limit_seconds=_GRACE_SECONDS)
        except TransferError:
            self._recorder.publish()
            self._abort_communicator()
            return False
        self._recorder.events.clear()
        self._recorder.publish(goes_on=True)
        return True

    def _abort_communicator(self) -> None:
        if self._abort is not None:
            self._abort.abort_on_all_ranks()

    def _publish(self, what: str) -> None:
        self._recorder.events.append(what)
        self._recorder.publish(goes_on=True)


def add_explanation(error: TransferError, group: Group) -> None:
    """Adds to the error of a transfer the last operation of each rank of the group, if it has reported one."""
    recorder_ref = group.state.get_or_create(_PassRecorder).recorder
    recorder = None if recorder_ref is None else recorder_ref()
    if recorder is None:
        return
    recorder.events.append(f"{_LOST}{error.fact}")
    recorder.publish()
    records = [f"  rank {rank}: {last}" for rank, last in recorder.dump_all_ranks(error.gone).items()]
    error.args = ("\n".join([str(error), "What each rank did last:", *records]),)


def _comes_out_of(model: nn.Module, error: BaseException) -> bool:
    """Whether the error is one of this model's pass, and not one that is handled around it."""
    return any(frame.f_locals.get("self") is model for frame, _ in traceback.walk_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]
