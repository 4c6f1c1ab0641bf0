"""async_gloo.py: programs that are right on gloo and wrong on NCCL are wrong on this transport, on every machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.collectives import HOST, all_reduce, exchange, group_for
from scale_core.comm.group import group_of
from scale_core.testing import RankError, run_ranks
from scale_core.testing.async_gloo import BACKEND, BACKEND_VARIABLE
from scale_core.testing.communicator import EXIT_VARIABLE, UnorderedAccessError

MINUTE = timedelta(minutes=1)


def meet() -> None:
    """Waits for all ranks, past the transport."""
    exchange([0], group_of())


@pytest.mark.ranks(2, backend=BACKEND)
def test_a_result_is_nan_until_it_is_waited_for() -> None:
    floats, integers = torch.ones(3), torch.ones(3, dtype=torch.int32)
    reductions = [dist.all_reduce(tensor, async_op=True) for tensor in (floats, integers)]
    gathered = torch.zeros(2, dtype=torch.float8_e5m2)
    reductions.append(dist.all_gather(list(gathered.chunk(2)), gathered[:1].clone(), async_op=True))
    assert floats.isnan().all() and integers.tolist() == [2**31 - 1] * 3 and gathered.float().isnan().all()
    for work in reductions:
        work.wait()
    assert floats.tolist() == [2.0] * 3 and integers.tolist() == [2] * 3 and gathered.float().tolist() == [0.0] * 2


def receive_in_another_order_of_tags() -> list[float]:
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    start: Callable[..., dist.Work | None] = dist.isend if dist.get_rank() == 0 else dist.irecv
    messages = [(first, 1), (second, 2)] if dist.get_rank() == 0 else [(second, 2), (first, 1)]
    for work in [start(tensor, 1 - dist.get_rank(), tag=tag) for tensor, tag in messages]:
        assert work is not None
        work.wait()
    return [first.item(), second.item()]


@pytest.mark.parametrize(("backend", "received"), [("gloo", [1.0, 2.0]), (BACKEND, [2.0, 1.0])])
def test_messages_match_by_their_order_and_not_by_tags(backend: str, received: list[float]) -> None:
    assert run_ranks(receive_in_another_order_of_tags, 2, backend=backend)[1] == received


@pytest.mark.ranks(2, backend=BACKEND)
def test_ranks_in_different_orders_add_different_tensors() -> None:
    a, b = torch.tensor([1.0, 1.0]), torch.tensor([10.0, 10.0])
    tensors = [a, b] if dist.get_rank() == 0 else [b, a]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    assert [a[0].item(), b[0].item()] == [11.0, 11.0]


def change_the_input(tensor: Tensor, gathered: Tensor) -> None:
    tensor.add_(1)


def write_the_result(tensor: Tensor, gathered: Tensor) -> None:
    gathered.zero_()


def free_the_input(tensor: Tensor, gathered: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def touch_before_the_wait(touch: Callable[[Tensor, Tensor], None]) -> str:
    tensor, gathered = torch.ones(2), torch.zeros(4)
    work = dist.all_gather(list(gathered.chunk(2)), tensor, async_op=True)
    assert work is not None
    touch(tensor, gathered)
    with pytest.raises(UnorderedAccessError) as caught:
        work.wait()
    return str(caught.value)


@pytest.mark.parametrize(
    ("touch", "fact"),
    [
        (change_the_input, "an input changed"),
        (write_the_result, "a result was written by somebody else"),
        (free_the_input, "the memory of a tensor was freed"),
    ],
)
def test_a_tensor_that_is_touched_before_the_wait_is_named(touch: Callable[[Tensor, Tensor], None], fact: str) -> None:
    for error in run_ranks(touch_before_the_wait, 2, touch, backend=BACKEND):
        assert error.startswith(f"all_gather number 1 on all ranks: {fact} before wait(): shape (2,), torch.float32. ")


def add_in_half_precision() -> tuple[list[float], float]:
    value = 256.0 if dist.get_rank() == 0 else 1.0
    everywhere, mine = torch.full((4,), value, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    dist.all_reduce(everywhere)
    work = compat.reduce_scatter_single(mine, torch.full((4,), value, dtype=torch.bfloat16), compat.process_groups()[0])
    work.wait()
    return everywhere.tolist(), mine.item()


def test_sums_round_to_their_dtype_after_each_rank_of_the_ring() -> None:
    # 259 is no bfloat16: 1 + 1 + 1 + 256 is 260, and 256 + 1 + 1 + 1 is 256. A ring begins after the chunk's rank.
    results = run_ranks(add_in_half_precision, 4, backend=BACKEND)
    assert results == [([260.0, 260.0, 256.0, 256.0], mine) for mine in (260.0, 260.0, 256.0, 256.0)]


def with_a_communicator(program: Callable[..., str], *args: object) -> str:
    dist.barrier()
    meet()
    return program(*args)


def wait_when_the_limit_is_over() -> str:
    """Rank 0 waits for an operation of long ago; the other one has never come."""
    if dist.get_rank() == 1:
        meet()
        return ""
    part, work = torch.ones(1), dist.all_reduce(torch.ones(1), async_op=True)
    work.enqueued -= 100.0
    with pytest.raises(RuntimeError) as caught:
        work.wait(MINUTE)
    with pytest.raises(RuntimeError, match="number 2 on all ranks timed out"):  # the communicator is gone
        dist.all_reduce(part)
    meet()
    return str(caught.value)


def test_a_limit_counts_from_the_call_and_ends_the_communicator() -> None:
    error, _ = run_ranks(with_a_communicator, 2, wait_when_the_limit_is_over, backend=BACKEND)
    assert error == "all_reduce number 2 on all ranks timed out waiting 60000ms since its call"


@pytest.mark.ranks(2, backend=BACKEND)
def test_operations_after_an_abort_fail_at_once() -> None:
    dist.barrier()
    meet()
    if dist.get_rank() == 0:
        waiting = dist.all_reduce(torch.ones(1), async_op=True)  # Rank 1 does not come.
        while not waiting._communicator._queue.empty():
            time.sleep(0.01)  # Until the thread of the communicator waits for rank 1.
        compat.abort_communicators(dist.group.WORLD)
        for work in (waiting, dist.all_reduce(torch.ones(1), async_op=True)):
            with pytest.raises(RuntimeError, match="the communicator was aborted"):
                work.wait()
    meet()


def outlive_a_limit() -> None:
    if dist.get_rank() == 0:
        wait_when_the_limit_is_over()
    dist.distributed_c10d._get_default_store().wait(["never"], MINUTE)


def test_the_process_ends_some_time_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXIT_VARIABLE, "0")
    with pytest.raises(RankError, match="rank 0 of 2 was killed by SIGABRT") as caught:
        run_ranks(with_a_communicator, 2, outlive_a_limit, backend=BACKEND)
    assert any("ending the process, as NCCL's watchdog does" in note for note in caught.value.__notes__)


@pytest.mark.ranks(2, backend=BACKEND)
def test_neither_groups_nor_calls_wait_for_late_ranks() -> None:
    """Rank 1 comes late to the default group, after an operation of another one."""
    other, late, early = dist.new_group(), torch.ones(1), torch.ones(1)
    dist.barrier()
    if dist.get_rank() == 0:
        work = dist.all_reduce(late, async_op=True)
        dist.all_reduce(early, group=other)
        assert not work.is_completed()
        meet()
        work.wait()
    else:
        dist.all_reduce(early, group=other)
        meet()
        dist.all_reduce(late)
    assert early.item() == 2.0
    assert late.item() == 2.0


@pytest.mark.ranks(2, backend=BACKEND)
def test_messages_that_cross_wait_for_each_other() -> None:
    """Both ranks send before they receive, and nobody waits for a send before its receive."""
    peer, received = 1 - dist.get_rank(), torch.zeros(1)
    sent = dist.isend(torch.ones(1), peer)
    work = dist.irecv(received, peer)
    assert sent is not None and work is not None
    meet()
    assert not (sent.is_completed() or work.is_completed())


def make_a_group_with_a_bound_device(new_group: Callable[[list[int]], dist.ProcessGroup]) -> str:
    """Ranks 0 and 1 of three make a group of their own, as `subgroup_of` does."""
    default = dist.group.WORLD
    assert default is not None
    default._set_default_timeout(timedelta(seconds=1))
    default.bound_device_id = torch.device("cuda", 0)  # as after init_process_group(device_id=...)
    if dist.get_rank() == 2:
        return ""
    try:
        group, tensor = new_group([0, 1]), torch.ones(1)
    except RuntimeError as error:
        return str(error)
    dist.all_reduce(tensor, group=group)
    return str(tensor.item())


def new_group_by_torch(ranks: list[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


def new_group_by_scale(ranks: list[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = compat.new_group_of_members(ranks, MINUTE)
    return group


def test_a_bound_device_makes_a_new_group_wait_for_outsiders() -> None:
    error, *_ = run_ranks(with_a_communicator, 3, make_a_group_with_a_bound_device, new_group_by_torch, backend=BACKEND)
    assert error.startswith("the split of the default group's communicator number 2 on all ranks timed out waiting")


def test_groups_of_scale_split_no_communicator_of_a_bound_device() -> None:
    assert run_ranks(with_a_communicator, 3, make_a_group_with_a_bound_device, new_group_by_scale, backend=BACKEND) == [
        "2.0",
        "2.0",
        "",
    ]


@pytest.mark.ranks(2, backend=BACKEND)
def test_callers_in_cpp_get_complete_results() -> None:
    """Two callers in C++: DistributedDataParallel, and a functional collective."""
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    (value,) = work.get_future().wait()
    assert value is tensor
    module = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    module(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
    grad = module.module.weight.grad
    everyone = dist._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert [value.item(), grad.item()] == [2.0, 0.5]
    assert (everyone + 0).tolist() == [2.0, 2.0]


def use_collectives_of_scale() -> tuple[str, bool, float]:
    group = group_of()
    tensor = torch.ones(1)
    pending = all_reduce(tensor, group)
    is_nan = bool(tensor.isnan())
    return group.backend, is_nan and group_for(HOST, group) is group.process_group, pending.wait().item()


def test_an_environment_variable_puts_it_in_place_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, BACKEND)
    assert run_ranks(use_collectives_of_scale, 2) == [(BACKEND, True, 2.0)] * 2
    monkeypatch.delenv(BACKEND_VARIABLE)
    assert run_ranks(use_collectives_of_scale, 2) == [("gloo", False, 2.0)] * 2
