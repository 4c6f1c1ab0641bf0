"""traffic.py: what each collective sends, and which buffers do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scale_check.simulate import simulate
from scale_check.simulate.traffic import read_collective
from scale_core import compat
from scale_core.comm.collectives import all_gather, reduce_scatter
from scale_core.comm.group import group_of

pytestmark = pytest.mark.simulation

WORLD = 4


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


# The table of the module's docstring, for W = 4 and parts of 6 elements of 4 bytes, as rank 1 sees it.
@pytest.mark.parametrize(
    "op, run, sent",
    [
        ("all_gather", lambda: compat.all_gather_single(zeros(24), zeros(6), world()), 3 * 24),
        ("all_gather", lambda: dist.all_gather([zeros(6) for _ in range(4)], zeros(6)), 3 * 24),
        ("reduce_scatter", lambda: compat.reduce_scatter_single(zeros(6), zeros(24), world()), 3 * 24),
        ("reduce_scatter", lambda: dist.reduce_scatter(zeros(6), [zeros(6) for _ in range(4)]), 3 * 24),
        ("all_reduce", lambda: dist.all_reduce(zeros(24)), 2 * 3 * 24),
        ("all_to_all", lambda: dist.all_to_all_single(zeros(24), zeros(24)), 3 * 24),
        ("all_to_all", lambda: dist.all_to_all_single(zeros(8), zeros(10), [2] * 4, [1, 2, 3, 4]), (1 + 3 + 4) * 4),
        ("all_to_all", lambda: dist.all_to_all([zeros(2)] * 4, [zeros(1), zeros(2), zeros(3), zeros(4)]), 8 * 4),
        ("broadcast", lambda: dist.broadcast(zeros(24), src=0), 96),
        ("broadcast", lambda: dist.broadcast(zeros(24), src=2), 0),
        ("reduce", lambda: dist.reduce(zeros(24), dst=0), 96),
        ("reduce", lambda: dist.reduce(zeros(24), dst=1), 0),
        ("scatter", lambda: dist.scatter(zeros(6), [zeros(6)] * 4, src=1), 3 * 24),
        ("scatter", lambda: dist.scatter(zeros(6), src=0), 0),
        ("gather", lambda: dist.gather(zeros(6), dst=0), 24),
        ("gather", lambda: dist.gather(zeros(6), [zeros(6) for _ in range(4)], dst=1), 0),
        ("send", lambda: dist.send(zeros(6), dst=2), 24),
        ("receive", lambda: dist.recv(zeros(6), src=0), 0),
        ("barrier", lambda: dist.barrier(), 0),
    ],
)
def test_each_collective_sends_what_its_ring_sends(op: str, run: Callable[[], object], sent: int) -> None:
    with simulate(rank=1, world_size=WORLD) as simulation:
        run()
    (record,) = simulation.collectives
    assert (record.op, record.bytes_sent, len(record.ranks)) == (op, sent, WORLD)


@pytest.mark.parametrize(
    "run, message",
    [
        (lambda: compat.all_gather_single(zeros(25), zeros(6), world()), r"all_gather among 4 .* \[24\] .* got \[25\]"),
        (lambda: dist.all_gather([zeros(5), zeros(6), zeros(6), zeros(6)], zeros(6)), r"got \[5, 6, 6, 6\]"),
        (lambda: compat.reduce_scatter_single(zeros(6), zeros(20), world()), r"reduce_scatter .* \[24\] .* got \[20\]"),
        (lambda: dist.all_to_all_single(zeros(24), zeros(20)), "20 elements of output, got 24"),
        (lambda: dist.all_to_all_single(zeros(6), zeros(6)), "rows of the output that divide into 4 parts, got 6"),
        (lambda: dist.all_to_all_single(zeros(8), zeros(8), [2] * 4, [2, 2, 2, 1]), r"8 rows of the input, got \[2, 2"),
        (lambda: dist.all_to_all([zeros(1)] * 3, [zeros(1)] * 4), "4 output tensors, got 3"),
    ],
)
def test_buffers_that_do_not_fit_are_an_error_with_both_sizes(run: Callable[[], object], message: str) -> None:
    with simulate(world_size=WORLD), pytest.raises(ValueError, match=message):
        run()


def test_lists_may_be_of_other_sizes_on_other_ranks() -> None:
    """As they may be for NCCL; only what is this rank's own has to fit."""
    with simulate(world_size=WORLD) as simulation:
        dist.all_gather([zeros(6), zeros(5), zeros(0), zeros(7)], zeros(6))
        dist.reduce_scatter(zeros(6), [zeros(6), zeros(5), zeros(0), zeros(7)])
    assert [collective.op for collective in simulation.collectives] == ["all_gather", "reduce_scatter"]


def test_a_buffer_with_gaps_is_an_error() -> None:
    with simulate(world_size=WORLD), pytest.raises(ValueError, match="expected contiguous buffers, got strides"):
        compat.all_gather_single(zeros(24), zeros(6, 2)[:, 0], world())


def test_without_the_check_wrong_sizes_pass_as_they_do_in_torch() -> None:
    with simulate(world_size=WORLD, check=False) as simulation:
        compat.all_gather_single(zeros(25), zeros(6), world())
    assert len(simulation.collectives) == 1


def test_our_collectives_are_native_and_send_the_least() -> None:
    with simulate(rank=3, world_size=8) as simulation:
        group = group_of()
        all_gather(torch.empty(80, dtype=torch.bfloat16), torch.empty(10, dtype=torch.bfloat16), group).wait()
        reduce_scatter(torch.empty(80), group).wait()
    assert [(each.op, each.bytes_sent) for each in simulation.collectives] == [
        ("all_gather", 7 * 10 * 2),
        ("reduce_scatter", 7 * 10 * 4),
    ]


def test_a_subgroup_counts_its_own_ranks() -> None:
    with simulate(rank=6, world_size=8) as simulation:
        dist.all_reduce(zeros(30), group=dist.new_group([2, 4, 6]))
    (record,) = simulation.collectives
    assert (record.ranks, record.bytes_sent) == ((2, 4, 6), 2 * 2 * 120 // 3)


def test_a_message_keeps_its_tag() -> None:
    with simulate(rank=0, world_size=2) as simulation:
        dist.send(zeros(2), dst=1, tag=77)
    assert simulation.collectives[0].tag == 77


def test_functional_collectives_are_counted_as_well() -> None:
    from torch.distributed import _functional_collectives as functional

    with simulate(rank=1, world_size=WORLD) as simulation:
        group = world()
        reduced = functional.all_reduce(zeros(24), "sum", group)
        before = simulation.current_bytes
        functional.wait_tensor(reduced)
        assert simulation.current_bytes == before
        functional.reduce_scatter_single(zeros(24), "sum", 0, group)
        functional.all_to_all_single(zeros(10), [2] * 4, [1, 2, 3, 4], group)
        functional.all_gather_single(zeros(5), 0, group)
    sent = {"all_reduce": 2 * 3 * 24, "reduce_scatter": 3 * 24, "all_to_all": 8 * 4, "all_gather": 3 * 5 * 4}
    assert simulation.bytes_sent == sent


def test_an_unknown_operator_is_refused_and_not_free() -> None:
    with pytest.raises(NotImplementedError, match="c10d::new_thing_"):
        read_collective("c10d::new_thing_", [], rank=0, phase="forward", check=True)
