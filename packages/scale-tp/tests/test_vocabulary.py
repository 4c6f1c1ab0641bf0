"""embedding.py: words as rows of a rank's shard."""

from __future__ import annotations

import torch

from scale_tp.layers.embedding import local_ids, local_padding_idx
from scale_tp.split import Split


def test_each_word_is_a_row_of_one_rank() -> None:
    ids = torch.arange(-1, 9).view(2, 5)
    for num_words, num_ranks in ((7, 2), (7, 3), (2, 3), (1, 1)):
        table, found = torch.arange(100, 100 + num_words), torch.zeros(ids.shape, dtype=torch.long)
        for (own,) in Split.even(num_words, num_ranks).ranges:
            part = table[own[0] : own[1]]
            rows, others, unknown = local_ids(ids, own, num_words)
            assert torch.equal(unknown, (ids < 0) | (ids >= num_words))
            assert (rows[unknown] == max(len(part), 1)).all()
            assert not rows[others & ~unknown].any()
            found[~others] += part[rows[~others]]
        known = (ids >= 0) & (ids < num_words)
        assert torch.equal(found, torch.where(known, ids + 100, 0))


def test_the_padding_word_is_one_ranks_alone() -> None:
    ranges = [own for (own,) in Split.even(7, 3).ranges]
    assert [local_padding_idx(3, own) for own in ranges] == [None, 0, None]
    assert [local_padding_idx(None, own) for own in ranges] == [None] * 3
