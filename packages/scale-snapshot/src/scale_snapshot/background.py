"""A save that goes on in a thread during the training; no failure of it is lost.

The thread has a gloo group of its own, so its messages are never taken for messages of a step. At most one save is
under way in a process. Its failure is known on all ranks, and raised on them by whatever comes first: `wait`, the next
save or load, or an optimizer's step. If a program ends without any of these, its last line says so.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_core import compat
from scale_core.comm.collectives import torch_group
from scale_core.comm.group import Group
from scale_core.comm.group_state import group_state
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.errors import ScaleError
from scale_snapshot.errors import SnapshotError

LIMIT = timedelta(minutes=30)
"""The limit of the groups that write."""

_last: AsyncSave | None = None  # The save that is under way, or that has failed and nobody has heard of


class AsyncSave:
    """A snapshot that is being written in the background, as `async_save` returns it.

    Attributes:
        path: The snapshot's directory, which is there when the save is over.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import async_save
        >>> saving = async_save(tempfile.mkdtemp(), 1, {"model": torch.nn.Linear(4, 3)})
        >>> saving.wait().name  # training goes on until here
        'step-00000001'

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    def __init__(self, path: Path, write: Callable[[], object], group: Group) -> None:
        self.path = path
        self._group = group
        self._error: BaseException | None = None
        self._is_raised = False
        self._steps = 0  # How many optimizers' steps have begun since
        self._lock = threading.Lock()  # For the number of steps and whether the others have it
        self._told_steps = False
        self._raise_at = 0  # The step that raises the error, the same one on all ranks
        self._settled = threading.Event()  # The save is over, and `_raise_at` and `_error` are known
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"saving {path.name}", daemon=False)
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        global _last
        _last = self
        self._thread.start()

    def done(self) -> bool:
        """Whether it is over, in whatever way; `wait` then returns, or raises, at once."""
        return not self._thread.is_alive()

    def wait(self, limit_seconds: float | None = None) -> Path:
        """Returns the snapshot's directory when it is complete.

        Args:
            limit_seconds: The longest wait; None waits until every rank has written its shard.

        Raises:
            SnapshotError: It failed, on every rank. Earlier snapshots are still there.
            TimeoutError: It is not over yet, and goes on.
        """
        self._thread.join(limit_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is still being written after {limit_seconds} s: wait longer, or train on")
        self._forget()
        if self._error is not None:
            self._is_raised = True
            raise self._error
        return self.path

    def _run(self, write: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            write()
        except BaseException as raised:
            error = raised
        try:
            together = CollectiveCall(self._group, f"saving {self.path}", SnapshotError)
            outcomes = together.all_ranks(lambda: "" if error is None else str(error) or type(error).__name__)
            failed = [rank for rank, text in enumerate(outcomes) if text]
            if failed:
                if error is None:
                    error = SnapshotError(f"saving {self.path} failed on rank {failed[0]}: {outcomes[failed[0]]}")
                self._raise_at = max(together.all_ranks(self._tell_steps)) + 1
        except Exception as raised:  # Others are gone.
            error = error or raised
        if error is not None and not isinstance(error, ScaleError):
            cause, error = (
                error,
                SnapshotError(
                    f"saving {self.path} in the background failed with {type(error).__name__}, and is not there: load "
                    "an earlier snapshot, or save again"
                ),
            )
            error.__cause__ = cause
        self._error = error
        self._settled.set()

    def _tell_steps(self) -> int:
        with self._lock:
            self._told_steps = True
            return self._steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Installed while the save is under way: raises its failure, before the same step on all ranks.

        That is the step after the last one that any rank had begun when they exchanged it. So a rank that has sent
        begins no further one before it knows which, which it does within a message: all of them have written by then.
        """
        with self._lock:
            self._steps += 1
            notified_steps = self._told_steps
        if notified_steps:
            self._settled.wait()
        if self._error is not None and not self._is_raised and self._steps >= self._raise_at:
            self._is_raised = True
            raise self._error

    def _forget(self) -> None:
        # Not by the thread, nor inside of a step: torch goes through its hooks there.
        self._hook.remove()
        global _last
        if _last is self:
            _last = None


def finish_pending() -> None:
    """Returns when no save is under way; raises the error of the last one, if nothing has raised it yet."""
    if _last is None:
        return
    if _last._is_raised:
        _last._forget()
    else:
        _last.wait()


class _SaveGroup:
    """The gloo group for background saves of a group."""

    group: Group | None = None


def background_group(group: Group) -> Group:
    """Returns the gloo group for background saves; created at the first call, which all ranks make together.

    torch does not list this group, so `destroy_process_group` does not end a running save.
    """
    if group.size == 1:
        return Group()
    saves = group.state.get_or_create(_SaveGroup)
    if saves.group is None:
        process_group = compat.gloo_twin(torch_group(group), LIMIT, "saves", LIMIT)
        state = group_state(process_group)
        state.is_host_group = True
        saves.group = replace(group, process_group=process_group, backend="gloo", state=state)
    return saves.group


@atexit.register
def _report() -> None:
    """Says at the end of a process, when threads have ended, that a save has failed and nothing has raised it."""
    if _last is not None and _last._error is not None and not _last._is_raised:
        # Not by a logger, which drops it where the program has set none up.
        print(f"{_last._error}. It was saved in the background, and the program has ended since", file=sys.stderr)
