"""split.py: numbers and tensors cut by hand, by FairScale's names."""

from __future__ import annotations

import pytest
import torch

from scale_tp.split import (
    Split,
    VocabUtility,
    divide,
    ensure_divisibility,
    split_tensor_along_last_dim,
)


@pytest.mark.fault(90)
def test_a_remainder_is_refused() -> None:
    assert divide(12, 4) == 3
    for numerator, denominator in ((7, 2), (7, 0)):
        for act in (ensure_divisibility, divide):
            with pytest.raises(ValueError, match=f"7 is not divisible by {denominator}"):
                act(numerator, denominator)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_tensor_is_cut_into_equal_parts(contiguous: bool) -> None:
    whole = torch.arange(12).view(2, 6)
    parts = split_tensor_along_last_dim(whole, 3, contiguous)
    assert torch.equal(torch.cat(parts, -1), whole) and [part.shape for part in parts] == [(2, 2)] * 3
    assert all(part.is_contiguous() == contiguous for part in parts)
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(whole, 4)


def test_words_are_those_of_the_layers() -> None:
    for rank in range(3):
        found = VocabUtility.vocab_range_from_global_vocab_size(11, rank, 3)
        assert (found,) == Split.even(11, 3).ranges[rank]
        assert VocabUtility.vocab_range_from_per_partition_vocab_size(4, rank, 3) == (4 * rank, 4 * rank + 4)
    with pytest.raises(ValueError, match="expected world_size to be at least 4, got 3"):
        VocabUtility.vocab_range_from_global_vocab_size(11, 3, 3)
