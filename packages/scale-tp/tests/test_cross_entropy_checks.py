"""cross_entropy.py: what the loss refuses, and how many words each rank has."""

from __future__ import annotations

import pytest
import torch

from scale_core.comm.group import Group
from scale_tp.layers.cross_entropy import LossTerms, check_not_gathered, check_options, check_weight, vocab_split

TWO = Group(1, 2, ranks=(0, 1))


def test_words_are_divided_evenly_where_their_number_is_given() -> None:
    assert vocab_split(4, 9, TWO).sizes == (5, 4) and vocab_split(7, None, Group()).sizes == (7,)
    with pytest.raises(ValueError, match="expected logits of 4 words on rank 1, of the 9 that 2 ranks have, got 9"):
        vocab_split(9, 9, TWO)


def test_options_of_a_loss_are_accepted_as_any_kind_of_number() -> None:
    check_options(0, 1, -100, "mean")
    with pytest.raises(TypeError, match="label_smoothing to be a number, got True"):
        check_options(True, 0.0, -100, "mean")


@pytest.mark.parametrize("weight", [torch.ones(5), torch.ones(1, 9), torch.ones(9, dtype=torch.int64)])
def test_a_weight_is_one_number_for_each_word_of_all_ranks(weight: torch.Tensor) -> None:
    terms = LossTerms(TWO, 5, 9, -100, 0.0, 0.0, 16)
    check_weight(torch.ones(9), terms)
    with pytest.raises(ValueError, match=r"expected weight to be \[9\] of floating point, one number for each word"):
        check_weight(weight, terms)


def test_ranks_that_have_the_same_logits_have_all_of_them() -> None:
    stats = torch.rand(2, 4, 3)
    check_not_gathered(stats, 5, TWO)
    stats[1] = stats[0]
    with pytest.raises(
        ValueError, match=r"of the words that rank 1 of 2 has, got the same logits on all ranks, of 5 wo"
    ):
        check_not_gathered(stats, 5, TWO)
    stats[:, 1] = 5.0  # All logits are equal, as of a head of zeros: that tells nothing.
    check_not_gathered(stats, 5, TWO)
    check_not_gathered(stats[..., :0], 5, TWO)
