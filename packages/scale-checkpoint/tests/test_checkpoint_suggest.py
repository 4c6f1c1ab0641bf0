"""Where to checkpoint: cuts whose largest part is as small as can be."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import Transformer

from scale_checkpoint import LayerMemoryTracker, suggest_checkpoint_location
from scale_checkpoint.memory_tracker import find_best_reset_points


def test_the_suggested_splits_lie_between_equal_blocks() -> None:
    model = Transformer(num_blocks=4)
    with LayerMemoryTracker(model) as tracker:
        model(torch.randint(0, 128, (2, 32))).backward()
    suggested = suggest_checkpoint_location(tracker.memory_traces, num_checkpoints=3)
    assert len(suggested.split_modules) == 3
    assert {name.split(".")[1] for name in suggested.split_modules if name.startswith("blocks")} == {"1", "2", "3"}
    with pytest.raises(ValueError, match="run a forward inside"):
        suggest_checkpoint_location([], 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.data())
def test_no_cut_has_a_smaller_largest_part(sizes: list[int], data: st.DataObject) -> None:
    num_cuts = data.draw(st.integers(0, len(sizes) - 1))

    def largest(cuts: tuple[int, ...] | list[int]) -> int:
        ends = [0, *cuts, len(sizes)]
        return max(sum(sizes[start:end]) for start, end in itertools.pairwise(ends))

    found, cuts = find_best_reset_points(sizes, num_cuts)
    assert len(cuts) == num_cuts
    assert largest(cuts) == found
    assert found == min(largest(each) for each in itertools.combinations(range(1, len(sizes)), num_cuts))
