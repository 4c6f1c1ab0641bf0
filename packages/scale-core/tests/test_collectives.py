"""collectives.py: every operation at every size and dtype, and no wrong data when ranks differ."""

from __future__ import annotations

import gc
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scale_core.collectives import (
    Pending,
    TransferError,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exchange,
    exchange_text,
    reduce_scatter,
)
from scale_core.group import Group, group_of
from scale_core.testing import run_ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
SIZES = (0, 1, 5)


def of_rank(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings along; every rank can work out what the others have."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (numbers * 100).to(dtype) if dtype is not torch.bool else numbers > 0


def every_operation() -> None:
    group = group_of()
    for dtype in DTYPES:
        for size in SIZES:
            parts = [of_rank(rank, size, dtype) for rank in range(group.size)]
            fulls = [of_rank(rank, size * group.size, dtype) for rank in range(group.size)]
            check_moves(group, parts, fulls)
            check_sums(group, fulls)
            check_reductions(group, parts)


def check_moves(group: Group, parts: list[Tensor], fulls: list[Tensor]) -> None:
    size = parts[0].numel()
    output = torch.empty_like(fulls[0])
    assert all_gather(output, parts[group.rank], group).wait() is output
    assert torch.equal(output, torch.cat(parts))

    within = torch.zeros_like(output)
    own = within.narrow(0, group.rank * size, size).copy_(parts[group.rank])
    assert torch.equal(all_gather(within, own, group, tag=77).wait(), torch.cat(parts))

    received = all_to_all(torch.empty_like(output), fulls[group.rank], group).wait()
    assert torch.equal(received, torch.cat([full.narrow(0, group.rank * size, size) for full in fulls]))

    for source in range(group.size):
        spread = broadcast(parts[group.rank].clone(), group, source=source).wait()
        assert torch.equal(spread, parts[source])


def check_sums(group: Group, fulls: list[Tensor]) -> None:
    size = fulls[0].numel() // group.size
    mine = [full.narrow(0, group.rank * size, size) for full in fulls]
    floating = fulls[0].is_floating_point()
    for dtype in (None, torch.float32, torch.bfloat16) if floating else (None,):
        target = dtype or fulls[0].dtype
        wide = torch.promote_types(target, fulls[0].dtype)
        expected = mine[0].to(wide)
        for summand in mine[1:]:
            expected = expected + summand  # In rank order, one after the other.
        summed = reduce_scatter(fulls[group.rank].clone(), group, dtype=dtype, average=False).wait()
        assert summed.dtype == target and torch.equal(summed, expected.to(target))
        if floating:
            averaged = reduce_scatter(fulls[group.rank].clone(), group, dtype=dtype).wait()
            assert averaged.dtype == target and torch.equal(averaged, (expected / group.size).to(target))


def check_reductions(group: Group, parts: list[Tensor]) -> None:
    stacked = torch.stack(parts)
    if parts[0].dtype in (torch.int64, torch.float64):
        total = all_reduce(parts[group.rank].clone(), group).wait()
        assert torch.allclose(total, stacked.sum(dim=0))
    assert torch.equal(all_reduce(parts[group.rank].clone(), group, op="max").wait(), stacked.amax(dim=0))
    assert torch.equal(all_reduce(parts[group.rank].clone(), group, op="min").wait(), stacked.amin(dim=0))


def refuse_what_does_not_fit() -> None:
    group = group_of()
    three, four = torch.zeros(3), torch.zeros(2 * group.size)
    refusals: list[tuple[str, Callable[[], object]]] = [
        (
            rf"output of {group.size} x 3 elements.*\({2 * group.size},\).*\(3,\)",
            lambda: all_gather(four, three, group),
        ),
        ("one dtype and device", lambda: all_gather(four, four[:2].double(), group)),
        ("contiguous", lambda: all_gather(four, torch.zeros(4)[::2], group)),
        ("one contiguous dimension", lambda: reduce_scatter(torch.zeros(group.size, 2), group)),
        ("one contiguous dimension", lambda: reduce_scatter(torch.zeros(4 * group.size)[::2], group)),
        ("average=False", lambda: reduce_scatter(four.long(), group)),
        ("equal sizes and dtypes", lambda: all_to_all(four, torch.zeros(3 * group.size), group)),
        ("one dimension", lambda: all_to_all(torch.zeros(2, group.size), torch.zeros(2, group.size), group)),
        (rf"0 to {group.size - 1}, got {group.size}", lambda: broadcast(three, group, source=group.size)),
        ("'sum', 'max', 'min', got 'mean'", lambda: all_reduce(three, group, op="mean")),  # type: ignore[arg-type]
        ("at most 1048576 integers", lambda: exchange(range((1 << 20) + 1), group)),
    ]
    if group.size > 1:
        refusals.append(
            (f"divides into {group.size} parts", lambda: reduce_scatter(torch.zeros(group.size + 1), group))
        )
    for message, call in refusals:
        with pytest.raises(ValueError, match=message):
            call()


def exchange_records_and_words() -> None:
    group = group_of()
    largest, everyone = (1 << 63) - 1, range(group.size)
    assert exchange([group.rank, -group.rank, largest], group) == [[rank, -rank, largest] for rank in everyone]
    assert exchange([], group) == [[] for _ in everyone]
    texts = ["", "größer als 8 Bytes: 🦕", "x" * 1000, "a lone \udcff surrogate"][: group.size]
    assert exchange_text(texts[group.rank], group) == texts
    assert exchange_text("", group) == [""] * group.size


def bytes_written(call: Callable[[], object]) -> int:
    """Bytes that this process hands to the system, sockets included."""
    before = written()
    call()
    dist.barrier()  # What is still under way in another thread has been written then.
    return written() - before


def written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def bytes_on_the_wire() -> list[float]:
    """Bytes sent by a gather and a reduction, in parts of the full buffer."""
    group = group_of()
    size = 1 << 16
    output, part, full = torch.zeros(size * group.size), torch.zeros(size), torch.zeros(size * group.size)
    bytes_written(lambda: all_gather(output, part, group).wait())  # Connections are made by the first.
    sent = [
        bytes_written(lambda: all_gather(output, part, group).wait()),
        bytes_written(lambda: reduce_scatter(full, group).wait()),
        bytes_written(lambda: reduce_scatter(full.bfloat16(), group, dtype=torch.float32).wait()) * 2,
    ]
    return [count / (4 * size * group.size) for count in sent]


def differ_in_their_tags() -> str:
    group = group_of()
    output = torch.full((4,), -1.0)
    pending = all_gather(output, torch.full((2,), float(group.rank)), group, tag=5 + group.rank)
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        pending.wait(1.0)
    assert time.monotonic() - began < 20
    other = 1 - group.rank
    assert output[2 * other : 2 * other + 2].tolist() == [-1, -1]  # Nothing of the other's arrived.
    with pytest.raises(TransferError, match="has failed before"):
        pending.wait()
    assert caught.value.op == "all_gather" and caught.value.peer == other
    return str(caught.value)


def differ_in_their_records() -> str:
    group = group_of()
    with pytest.raises(TransferError) as caught:
        exchange([1] if group.rank == 0 else [1, 2, 3], group, limit_seconds=1.0)
    return str(caught.value)


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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_operation_is_right_to_the_bit_and_sums_in_rank_order(num_ranks: int) -> None:
    run_ranks(every_operation, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sizes_that_do_not_fit_are_refused_with_both_values(num_ranks: int) -> None:
    run_ranks(refuse_what_does_not_fit, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_records_and_words_of_all_ranks_arrive_in_order(num_ranks: int) -> None:
    run_ranks(exchange_records_and_words, num_ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_more_bytes_are_sent_than_any_algorithm_needs(num_ranks: int) -> None:
    floor = (num_ranks - 1) / num_ranks
    for sent in run_ranks(bytes_on_the_wire, num_ranks):
        assert sent == pytest.approx([floor] * 3, rel=0.01)
        assert all(part >= floor for part in sent)


def test_ranks_with_different_tags_time_out_and_get_no_wrong_data() -> None:
    for rank, message in enumerate(run_ranks(differ_in_their_tags, 2, timeout=30.0)):
        assert message.startswith(f"all_gather with rank {1 - rank} failed: ")


def test_records_of_different_lengths_are_an_error_and_no_abort() -> None:
    for message in run_ranks(differ_in_their_records, 2, timeout=30.0):
        assert message.startswith("exchange with rank ")


def test_on_a_dead_group_every_operation_fails_when_it_is_waited_for() -> None:
    for messages in run_ranks(begin_on_a_group_whose_peer_has_left, 2, timeout=30.0):
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
