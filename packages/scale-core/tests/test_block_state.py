"""block_state.py: scales of blocks, as a rank holds those of its elements."""

from __future__ import annotations

import pytest
import torch

from scale_core.state.block_state import block_shard, num_blocks, whole_shape
from scale_core.state.param_ownership import ParamSlice


def part(start: int, stop: int, **more: object) -> ParamSlice:
    return ParamSlice("w", torch.empty(stop - start), (10, 60), start, stop, local_shape=(stop - start,), **more)


@pytest.mark.parametrize(
    ("start", "stop", "first", "held"),
    [(0, 512, 0, 2), (512, 600, 2, 1), (256, 600, 1, 2), (0, 600, 0, 3), (7, 7, 0, 0)],
)
def test_scales_are_a_shard_of_those_of_the_whole_parameter(start: int, stop: int, first: int, held: int) -> None:
    holding, scales = part(start, stop), torch.arange(float(held))
    shard = block_shard("absmax1", scales, holding)
    assert (shard.shape, shard.start, shard.stop) == ((3,), first, first + held)
    assert shard.tensor.data_ptr() == scales.data_ptr()
    assert whole_shape("absmax1", holding) == (3,) and num_blocks("absmax2", holding) == held


@pytest.mark.parametrize("holding", [part(100, 356), part(0, 256, shares_owner=True), part(0, 256, ranges=((0, 256),))])
def test_a_part_cut_within_a_block_is_refused_with_a_fix(holding: ParamSlice) -> None:
    with pytest.raises(ValueError, match=r"w.absmax1 has one value for 256 elements.*atom=BlockAtom\(256\)"):
        block_shard("absmax1", torch.zeros(1), holding)


def test_another_number_of_scales_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer state w.absmax1 has shape \(3,\)"):
        block_shard("absmax1", torch.zeros(3), part(0, 512))
