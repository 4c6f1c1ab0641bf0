"""cross_entropy.py: the largest logit, the sum of exponentials and what else a loss is made of."""

from __future__ import annotations

import torch

from scale_core.comm.group import Group
from scale_tp.layers.cross_entropy import LossTerms, local_stats, reduce_stats, row_chunks


def test_terms_of_a_rank_are_those_of_its_words() -> None:
    logits, target = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 7, 0, -100])
    terms = LossTerms(Group(), 5, 9, -100, 0.1, 0.0, 3)  # It has the words 5 to 7 of 9.
    largest, total, chosen, summed = local_stats(logits, target, target != -100, terms)
    assert torch.equal(largest, logits.amax(1))
    torch.testing.assert_close(total, (logits - largest[:, None]).exp().sum(1))
    torch.testing.assert_close(summed, logits.sum(1))
    assert chosen.tolist() == [logits[0, 0].item(), logits[1, 2].item(), 0.0, 0.0]
    own = torch.stack([largest, total, chosen, summed])
    assert all(torch.equal(one, other) for one, other in zip(reduce_stats(own, Group(), 3), own, strict=True))


def test_chunks_are_all_rows_in_order_in_any_memory() -> None:
    whole = torch.arange(60.0).view(4, 5, 3)
    for logits in (whole, whole[:, :-1], whole.transpose(0, 1), whole[0, 0]):
        found = list(row_chunks(logits, 3))
        rows = logits.reshape(-1, 3)
        assert [number for place, _ in found for number in range(place.start, place.stop)] == [*range(len(rows))]
        assert torch.equal(torch.cat([chunk for _, chunk in found]), rows)
        assert max(len(chunk) for _, chunk in found) <= 3
