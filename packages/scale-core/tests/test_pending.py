"""pending.py: a handle owns its buffers until it is waited for, and fails there and nowhere else."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from scale_core.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from scale_core.group import Group, group_of
from scale_core.pending import Pending, TransferError
from scale_core.testing import run_ranks


def begin_on_a_group_whose_peer_has_left() -> list[str]:
    group = group_of()
    all_gather(torch.zeros(2), torch.zeros(1), group).wait()
    pending = all_gather(torch.zeros(2), torch.zeros(1), group, tag=30 + group.rank)
    messages = []
    with pytest.raises(TransferError):
        pending.wait(0.5)
    # The group is dead now: nothing may raise anything else than a TransferError, nor before it is waited for.
    operations: list[Callable[[], Pending]] = [
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
    return messages


def dropped_without_wait() -> None:
    group = group_of()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_gather(torch.zeros(2 * group.size), torch.zeros(2), group)
        gc.collect()
    assert [str(warning.message) for warning in caught] == ["all_gather was dropped without wait()"]
    dist.barrier()  # The group still works.


def given_up() -> None:
    group = group_of()
    pending = all_gather(torch.zeros(2 * group.size), torch.zeros(2), group)
    pending.abandon()
    with pytest.raises(TransferError, match="given up"):
        pending.wait()
    del pending
    gc.collect()
    dist.barrier()


def test_on_a_dead_group_every_operation_fails_when_it_is_waited_for() -> None:
    for messages in run_ranks(begin_on_a_group_whose_peer_has_left, 2):
        assert len(messages) == 5


def test_a_handle_that_is_dropped_without_wait_warns() -> None:
    run_ranks(dropped_without_wait, 2)


def test_a_handle_that_is_given_up_does_not_warn_and_has_no_result() -> None:
    run_ranks(given_up, 2)


def test_waiting_twice_returns_the_same_result() -> None:
    pending = reduce_scatter(torch.tensor([1.0, 2.0]), Group())
    assert pending.wait() is pending.wait()


def test_in_a_world_of_one_a_handle_must_be_waited_for_as_well() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_reduce(torch.ones(1), Group())
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]


def test_a_finished_handle_keeps_no_buffer_but_its_result() -> None:
    kept = torch.ones(2)
    pending = Pending("all_gather", [], torch.zeros(2), keep=[kept])
    pending.wait()
    assert pending._keep == []


def test_a_transfer_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(TransferError("all_gather", 1, "closed by peer")))
    assert str(error) == "all_gather with rank 1 failed: closed by peer"
    assert (error.op, error.peer) == ("all_gather", 1)
