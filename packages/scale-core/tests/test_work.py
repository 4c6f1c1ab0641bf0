"""work.py: a handle owns its buffers until it is waited for, and fails there and nowhere else."""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scale_core.comm import work as pending
from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import all_gather, all_reduce, broadcast, exchange, reduce_scatter
from scale_core.comm.group import Group, group_of
from scale_core.comm.work import LIMIT_VARIABLE, CollectiveWork, limit_of, wait_for
from scale_core.consistency.contract import Contract
from scale_core.errors import ScaleDistributedError, TransferError
from scale_core.launch import init_distributed
from scale_core.testing import run_ranks


@pytest.mark.gloo("ranks whose tags differ time out")
@pytest.mark.ranks(2)
def test_on_a_dead_group_every_operation_fails_in_its_wait() -> None:
    group = group_of()
    all_gather(torch.zeros(2), torch.zeros(1), group).wait()
    handle = all_gather(torch.zeros(2), torch.zeros(1), group, tag=30 + group.rank)
    messages = []
    with pytest.raises(TransferError):
        handle.wait(0.5)
    # The group is dead now: nothing may raise anything else than a TransferError, nor before it is waited for.
    operations: list[Callable[[], CollectiveWork]] = [
        lambda: all_gather(torch.zeros(2), torch.zeros(1), group),
        lambda: reduce_scatter(torch.zeros(2), group),
        lambda: all_reduce(torch.zeros(2), group),
        lambda: all_to_all(torch.zeros(2), torch.zeros(2), group),
        lambda: broadcast(torch.zeros(2), group, source=0),
    ]
    for begin in operations:
        dead = begin()
        with pytest.raises(TransferError) as caught:
            dead.wait(0.5)
        messages.append(str(caught.value))
    assert len(messages) == 5


@pytest.mark.ranks(2)
def test_a_handle_that_is_dropped_without_wait_warns() -> None:
    group = group_of()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_gather(torch.zeros(2 * group.size), torch.zeros(2), group)
        gc.collect()
    assert [str(warning.message) for warning in caught] == ["all_gather was dropped without wait()"]
    dist.barrier()  # The group still works.


@pytest.mark.ranks(2)
def test_a_canceled_handle_does_not_warn_and_has_no_result() -> None:
    group = group_of()
    handle = all_gather(torch.zeros(2 * group.size), torch.zeros(2), group)
    handle.cancel()
    with pytest.raises(TransferError, match="was canceled"):
        handle.wait()
    del handle
    gc.collect()
    dist.barrier()


class _Interrupting:
    """A message that has arrived; whoever waited for it is interrupted, if that is asked for. Counts waits."""

    def __init__(self, interruption: BaseException | None = None) -> None:
        self.interruption, self.num_waits, self.limit = interruption, 0, timedelta(0)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.num_waits, self.limit = self.num_waits + 1, timeout
        if self.interruption is not None:
            raise self.interruption
        return True


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeWarning("that is an error")])
def test_an_interrupted_wait_ends_when_nobody_writes_any_more(
    interruption: BaseException,
) -> None:
    works = [_Interrupting(), _Interrupting(interruption), _Interrupting(), _Interrupting()]
    handle = CollectiveWork("all_gather", list(enumerate(works)), torch.zeros(2))
    with pytest.raises(type(interruption)):
        handle.wait(1.0)
    assert [work.num_waits for work in works] == [1, 1, 1, 1]


def test_an_operation_that_is_canceled_has_some_seconds_to_end() -> None:
    work = _Interrupting()
    CollectiveWork("all_reduce", [(0, work)], torch.zeros(1)).cancel()
    assert work.num_waits == 1 and work.limit > timedelta(seconds=1)


class _OldNcclWork(_Interrupting):
    """Was enqueued long ago; like NCCL's, it aborts its communicator at a limit, which it counts from then."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert timeout == timedelta(0), "the communicator would be aborted"
        return super().wait(timeout)


def test_an_operation_on_a_device_is_canceled_without_a_limit() -> None:
    work = _OldNcclWork()
    on_device: Any = SimpleNamespace(device=torch.device("cuda", 0))
    CollectiveWork("reduce_scatter", [(None, work)], on_device).cancel()
    assert work.num_waits == 1


def test_waiting_twice_returns_the_same_result() -> None:
    handle = reduce_scatter(torch.tensor([1.0, 2.0]), Group())
    assert handle.wait() is handle.wait()


def test_what_follows_two_collectives_comes_after_the_second() -> None:
    second = [_Interrupting(), _Interrupting()]

    def follow(_: torch.Tensor) -> CollectiveWork:
        return CollectiveWork("all_gather", list(enumerate(second)), torch.ones(2))

    handle = CollectiveWork("all_reduce", [], torch.zeros(1)).then(follow)
    doubled = handle.then(lambda result: result * 2 * sum(work.num_waits for work in second))
    assert doubled.wait(1.0).tolist() == [4, 4]


def test_in_a_world_of_one_a_handle_must_be_waited_for_as_well() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_reduce(torch.ones(1), Group())
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]


def test_a_finished_handle_keeps_no_buffer_but_its_result() -> None:
    kept = torch.ones(2)
    handle = CollectiveWork("all_gather", [], torch.zeros(2), keep=[kept])
    handle.wait()
    assert handle._keep == []


def test_a_transfer_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(TransferError("all_gather", 1, "Connection closed by peer", rank=0)))
    assert str(error).startswith("all_gather with rank 1 failed: it has closed the connection, as a process does that")
    assert (error.op, error.peer) == ("all_gather", 1)


class Slow:
    """An operation that ends after a while."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        time.sleep(0.06)
        return True


@pytest.mark.fault(19)
def test_a_rank_that_nearly_lets_a_wait_fail_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for("all_gather", 3, Slow(), 0.1)  # Under load a fraction of a second says nothing.
    monkeypatch.setattr(pending, "_LONG_SECONDS", 0.01)
    words = r"all_gather waited \d+ ms for rank 3, more than half of limit_seconds=0.1"
    with pytest.warns(RuntimeWarning, match=words):
        wait_for("all_gather", 3, Slow(), 0.1)
    with pytest.warns(RuntimeWarning, match="for the group"):
        CollectiveWork("all_reduce", [(None, Slow())], torch.zeros(1)).wait(0.1)
    wait_for("all_gather", 3, Slow(), 60.0)
    wait_for("all_gather", 3, Slow(), None)
    CollectiveWork("all_reduce", [(0, Slow())], torch.zeros(1)).cancel()


def wait_with_the_limit_of_the_process() -> list[str]:
    group, told = group_of(), []
    exchange([1], group)  # The first meeting has a wait of its own.
    os.environ[LIMIT_VARIABLE] = "0.5"
    if group.rank == 0:
        for wait in (
            lambda: all_gather(torch.zeros(2), torch.zeros(1), group).wait(),
            lambda: exchange([1], group),
            lambda: Contract(group).check_equal("models", ["a"]),
        ):
            with pytest.raises(ScaleDistributedError) as caught:
                wait()
            told.append(str(caught.value).partition("\n")[0])
    return told


@pytest.mark.gloo("data and control messages share a group, which a limit ends")
def test_one_variable_limits_every_wait_without_a_limit() -> None:
    first, *later = run_ranks(wait_with_the_limit_of_the_process, 2)[0]
    assert first.startswith(
        "all_gather with rank 1 failed: no answer within 0.5 s. The process group can't be used any"
    )
    assert all("an earlier wait in this process group timed out" in told for told in later), later


def test_a_limit_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        with pytest.raises(
            ValueError, match=f"expected a number of seconds above 0 in SCALE_LIMIT_SECONDS, got {text!r}"
        ):
            limit_of(None, None)
        with pytest.raises(ValueError, match="SCALE_LIMIT_SECONDS"):
            init_distributed()
    monkeypatch.setenv(LIMIT_VARIABLE, "2.5")
    assert limit_of(None, None) == 2.5 and limit_of(None, 1.0) == 1.0
    monkeypatch.delenv(LIMIT_VARIABLE)
    assert limit_of(None, None) == 600.0
