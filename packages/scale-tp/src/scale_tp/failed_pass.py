"""What the ranks of a group hear of a rank that has failed in a pass: its error, and the end of their communicator.

NCCL has no connections that the others would see closed, and matches what this rank sends next with what they wait for.
There this rank aborts its communicator and says so in the rendezvous store, which a thread of each rank looks into: it
aborts the communicator of its rank, and the next collective raises.
"""

from __future__ import annotations

import threading
from weakref import ReferenceType, ref

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.consistency.flight_recorder import FlightRecorder, next_unique_id
from scale_core.errors import TransferError

# How often a rank looks whether another one has aborted the communicator, as torch's own watchdog does.
_POLL_SECONDS = 1.0
# How an event begins that says that a collective of the group has failed.
LOST_EVENT = "failed in "


class PassRecorder:
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
        """The object of a group, made at the first call of all ranks; None where connections end by themselves."""
        if group.process_group is None or group.backend in ("fake", "gloo"):
            return None
        state = group.state.get_or_create(PassRecorder)
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


def add_explanation(error: TransferError, group: Group) -> None:
    """Adds to the error of a transfer the last operation of each rank of the group, if it has reported one."""
    recorder_ref = group.state.get_or_create(PassRecorder).recorder
    recorder = None if recorder_ref is None else recorder_ref()
    if recorder is None:
        return
    recorder.events.append(f"{LOST_EVENT}{error.fact}")
    recorder.publish()
    records = [f"  rank {rank}: {last}" for rank, last in recorder.dump_all_ranks(error.gone).items()]
    error.args = ("\n".join([str(error), "What each rank did last:", *records]),)
