"""collectives.py: every operation at every size and dtype, right to the bit, and no byte more than needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import _divisor_before, all_gather, all_reduce, broadcast, reduce_scatter
from scale_core.comm.group import Group, group_of
from scale_core.comm.rank_order_sum import all_reduce_in_rank_order

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
SIZES = (0, 1, 5)


def of_rank(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings along; every rank can work out what the others have."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (numbers * 100).to(dtype) if dtype is not torch.bool else numbers > 0


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

    check_uneven_parts(group, parts[0].dtype, size)

    for source in range(group.size):
        spread = broadcast(parts[group.rank].clone(), group, source=source).wait()
        assert torch.equal(spread, parts[source])


def check_uneven_parts(group: Group, dtype: torch.dtype, size: int) -> None:
    """Rank r sends rank q `size` * r + q elements: none from rank 0 to itself, more to the last ones."""
    sent = [[of_rank(10 * r + q, size * r + q, dtype) for q in range(group.size)] for r in range(group.size)]
    mine, expected = torch.cat(sent[group.rank]), torch.cat([sent[r][group.rank] for r in range(group.size)])
    output_sizes = [sent[r][group.rank].numel() for r in range(group.size)]
    input_sizes = [part.numel() for part in sent[group.rank]]
    output = torch.empty_like(expected)
    pending = all_to_all(output, mine, group, output_sizes=output_sizes, input_sizes=input_sizes, tag=78)
    assert pending.wait() is output and torch.equal(output, expected)


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


def check_sums_on_all_ranks(group: Group, parts: list[Tensor]) -> None:
    dtype, sent = parts[0].dtype, parts[group.rank].clone()
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    expected = parts[0].to(wide)
    for summand in parts[1:]:
        expected = expected + summand
    assert torch.equal(all_reduce_in_rank_order(sent, group, tag=79).wait(), expected.to(dtype))
    if dtype.is_floating_point:
        average = all_reduce_in_rank_order(sent, group, average=True, tag=79).wait()
        assert torch.equal(average, (expected / group.size).to(dtype))
    assert torch.equal(sent, parts[group.rank]), "the argument was written to"


def bytes_written(call: Callable[[], object]) -> int:
    """Bytes that this process hands to the system, sockets included."""
    before = written()
    call()
    dist.barrier()  # What is still under way in another thread has been written then.
    return written() - before


def written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.gloo("sums in rank order and in the wider dtype")
@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_operation_is_right_to_the_bit_in_rank_order(num_ranks: int) -> None:
    group = group_of()
    for dtype in DTYPES:
        for size in SIZES:
            parts = [of_rank(rank, size, dtype) for rank in range(group.size)]
            fulls = [of_rank(rank, size * group.size, dtype) for rank in range(group.size)]
            check_moves(group, parts, fulls)
            check_sums(group, fulls)
            check_reductions(group, parts)
            if dtype is not torch.bool:
                check_sums_on_all_ranks(group, parts)


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sizes_that_do_not_fit_are_refused_with_both_values(num_ranks: int) -> None:
    group = group_of()
    three, four = torch.zeros(3), torch.zeros(2 * group.size)
    refusals: list[tuple[str, Callable[[], object]]] = [
        (
            rf"shard \(2,\) for an output \({2 * group.size},\) on {group.size} ranks, got \(3,\)",
            lambda: all_gather(four, three, group),
        ),
        ("one dtype and device", lambda: all_gather(four, four[:2].double(), group)),
        ("contiguous", lambda: all_gather(four, torch.zeros(4)[::2], group)),
        ("one contiguous dimension", lambda: reduce_scatter(torch.zeros(group.size, 2), group)),
        ("one contiguous dimension", lambda: reduce_scatter(torch.zeros(4 * group.size)[::2], group)),
        ("average=False", lambda: reduce_scatter(four.long(), group)),
        ("equal sizes", lambda: all_to_all(four, torch.zeros(3 * group.size), group)),
        ("one contiguous dimension", lambda: all_to_all(torch.zeros(2, group.size), torch.zeros(2, group.size), group)),
        ("one dtype and device", lambda: all_to_all(four, four.double(), group)),
        (
            rf"output of one contiguous dimension that divides into {group.size} parts of \[1",
            lambda: all_to_all(four, four, group, output_sizes=[1] * group.size, input_sizes=[2] * group.size),
        ),
        (
            rf"input of one contiguous.* in.* {group.size} parts of \[{', '.join(['2'] * (group.size + 1))}\]",
            lambda: all_to_all(four, torch.zeros(2 * group.size + 2), group, input_sizes=[2] * (group.size + 1)),
        ),
        (rf"0 to {group.size - 1}, got {group.size}", lambda: broadcast(three, group, source=group.size)),
        ("'sum', 'max', 'min', got 'mean'", lambda: all_reduce(three, group, op="mean")),  # type: ignore[arg-type]
    ]
    if group.size > 1:
        refusals.append(
            (f"divides into {group.size} parts", lambda: reduce_scatter(torch.zeros(group.size + 1), group))
        )
    for message, call in refusals:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.ranks("num_ranks")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_more_bytes_are_sent_than_any_algorithm_needs(num_ranks: int) -> None:
    """Bytes sent by a gather and a reduction, in parts of the full buffer."""
    floor = (num_ranks - 1) / num_ranks
    group = group_of()
    size = 1 << 16
    output, part, full = torch.zeros(size * group.size), torch.zeros(size), torch.zeros(size * group.size)
    bytes_written(lambda: all_gather(output, part, group).wait())  # Connections are made by the first.
    sent = [
        bytes_written(lambda: all_gather(output, part, group).wait()),
        bytes_written(lambda: reduce_scatter(full, group).wait()),
        bytes_written(lambda: reduce_scatter(full.bfloat16(), group, dtype=torch.float32).wait()) * 2,
    ]
    sent = [count / (4 * size * group.size) for count in sent]
    assert sent == pytest.approx([floor] * 3, rel=0.01)
    assert all(part >= floor for part in sent)


def test_halves_are_divided_by_a_power_of_two_before_the_sum() -> None:
    before = [_divisor_before(torch.float16, size) for size in (1, 2, 3, 4, 8, 16, 64, 1024)]
    assert before == [1, 2, 2, 2, 4, 4, 8, 32]
    assert {_divisor_before(dtype, 8) for dtype in (torch.float32, torch.bfloat16, torch.float64)} == {1}
