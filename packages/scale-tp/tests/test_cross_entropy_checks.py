"""cross_entropy.py: what the loss refuses, and how many words each rank has."""

from __future__ import annotations

import pytest
import torch

from scale_core.comm.group import Group
from scale_tp import mappings as regions
from scale_tp.layers.cross_entropy import check_options, refuse_gathered, words_of_all

TWO = Group(1, 2, ranks=(0, 1))


def test_words_are_divided_evenly_where_their_number_is_given() -> None:
    assert words_of_all(4, 9, TWO).sizes == (5, 4) and words_of_all(7, None, Group()).sizes == (7,)
    with pytest.raises(ValueError, match="expected logits of 4 words on rank 1, of the 9 that 2 ranks have, got 9"):
        words_of_all(9, 9, TWO)


def test_options_that_a_loss_can_have_are_accepted_as_any_kind_of_number() -> None:
    check_options(0, 1, -100, "mean")
    with pytest.raises(TypeError, match="label_smoothing to be a number, got True"):
        check_options(True, 0.0, -100, "mean")


def test_logits_that_nobody_gathered_are_those_of_the_rank() -> None:
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    for logits in (x, x * 2 + 1, torch.ones(3) * x, x @ weight.mT, x.detach()):
        refuse_gathered(logits, TWO)


def test_what_was_added_to_itself_often_is_looked_through_once() -> None:
    x = torch.ones(2, 3, requires_grad=True) * 2
    for _ in range(40):  # As many ways lead back as 2^40.
        x = x + x
    refuse_gathered(x, TWO)


def test_logits_that_were_gathered_are_found_behind_what_chooses_or_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "gather_along", lambda part, *_: torch.cat([part, part], -1))
    part = torch.ones(2, 3, requires_grad=True)
    all_words = regions.gather_from_model_parallel_region(part, TWO, sizes=(3, 3))
    pad, low = torch.arange(6) > 4, torch.tensor(-1e9)
    for logits in (
        torch.where(pad, -1e9, all_words),
        all_words.masked_fill(pad, -1e9),
        all_words.masked_fill(pad, low),
        torch.cat([all_words[:1] / 2, all_words[1:]]),
        torch.stack([all_words, all_words]),
        all_words[torch.tensor([True, False])],
        torch.maximum(all_words, low),
    ):
        with pytest.raises(ValueError, match="got all 6, from a layer that gathers its output"):
            refuse_gathered(logits, TWO)
    for fine in (torch.where(pad[:3], -1e9, part), torch.cat([all_words, all_words], -1), all_words[:, :3]):
        refuse_gathered(fine, TWO)  # Of this rank, or of another width.
