"""Times of blocks that were tried by themselves, made to fit those of the step."""

from __future__ import annotations

import pytest
import torch

from scale_checkpoint.planner.block_benchmark import BlockCost, BlockMemory
from scale_checkpoint.planner.cost_model import _backward_starts, _boundary_tensors, _fit_to_step, pool_seconds
from scale_checkpoint.planner.timeline import BoundaryTensor, StrategyCost
from scale_checkpoint.planner.trace import StepTrace, TracedPass, Visit

BLOCK = {"keep": 2.0, "recompute": 3.0}


def strategies(**seconds: float) -> dict[str, StrategyCost]:
    return {name: StrategyCost(each, 0, 0, 0) for name, each in seconds.items()}


def timed(blocks: list[dict[str, float]], seconds: float) -> list[dict[str, float]]:
    segments = [strategies(keep=0.0), *(strategies(**block) for block in blocks), strategies(keep=0.0)]
    return [{name: cost.seconds for name, cost in options.items()} for options in _fit_to_step(segments, seconds)]


def test_what_the_blocks_do_not_take_lies_before_them() -> None:
    assert timed([BLOCK, BLOCK], 8.0) == [{"keep": 2.0}, BLOCK, BLOCK, {"keep": 0.0}]


def test_what_trials_take_more_is_taken_off_each_way() -> None:
    assert timed([BLOCK, BLOCK], 5.4) == [
        {"keep": 0.0},
        {"keep": pytest.approx(1.7), "recompute": pytest.approx(2.7)},
        {"keep": pytest.approx(1.7), "recompute": pytest.approx(2.7)},
        {"keep": 0.0},
    ]


@pytest.mark.parametrize("seconds", [2.0, 0.1, 1e-9])
def test_no_time_is_negative_and_the_step_is_what_it_took(seconds: float) -> None:
    """Trials on a machine that was busy meanwhile: by much the slower, or noise alone."""
    found = timed([BLOCK, {"keep": 0.1, "recompute": 9.0, "selective": 12.0}], seconds)
    assert all(each > 0 for block in found[1:3] for each in block.values())
    assert all(block["keep"] < block["recompute"] for block in found[1:3])
    assert sum(block["recompute"] for block in found[1:3]) == pytest.approx(seconds)


def test_blocks_of_equal_memory_have_their_least_time() -> None:
    small, large = (BlockMemory(kept, 0, 0, 0, (), (), ()) for kept in (1, 2))
    tried = [{"keep": BlockCost(trial, seconds, 0)} for trial, seconds in ((small, 3.0), (large, 1.0), (small, 2.0))]
    assert [each["keep"].seconds for each in pool_seconds(tried)] == [2.0, 1.0, 2.0]


def visit(
    backward: tuple[int, int] | None = None, inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = ()
) -> Visit:
    """A visit whose forward ends at 100 bytes. The arguments have the bytes at the start and end of its backward."""
    forward = TracedPass(start_bytes=0, peak_bytes=0, end_bytes=100)
    traced = None if backward is None else TracedPass(backward[0], backward[0], backward[1])
    return Visit("block" if outputs else "", 0, forward, traced, inputs=list(inputs), outputs=list(outputs))


def test_a_tensor_between_blocks_lives_to_its_last_reader() -> None:
    """A block reads its inputs. If no later block reads its output, the code after the block does."""
    trace = StepTrace(torch.device("cpu"))
    trace.visits = [visit(), visit(inputs=(1,), outputs=(2,)), visit(), visit(inputs=(2,), outputs=(3,)), visit()]
    trace.producer, trace.sizes = {1: 0, 2: 1, 3: 3}, {1: 10, 2: 20, 3: 30}
    indices, tensors = _boundary_tensors(trace)
    found = {number: tensors[index] for number, index in indices.items()}
    assert found == {1: BoundaryTensor(10, 0, 1), 2: BoundaryTensor(20, 1, 3), 3: BoundaryTensor(30, 3, 4)}


def test_a_visit_without_backward_starts_where_the_next_ended() -> None:
    assert _backward_starts([visit((5, 2)), visit(), visit((9, 7)), visit()]) == [5, 7, 9, 100]
