"""modules.py: words of an embedding that is divided in place, with any padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import group_of
from scale_tp import parallelize
from scale_tp.conversion.modules import is_embedding


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, as some models have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


@pytest.mark.ranks(2)
@pytest.mark.fault(90)
def test_words_of_a_divided_embedding_are_the_plain_ones() -> None:
    group = group_of()
    ids = torch.tensor([[0, 6, 2, 2, 5], [6, 3, 6, 1, 0]])
    for kind in (nn.Embedding, Scaled):
        for num_words, padding in ((7, None), (7, 0), (7, 2), (7, 6), (1, 0)):
            torch.manual_seed(0)
            plain = nn.Sequential(kind(num_words, 5, padding_idx=padding))
            ours = parallelize(copy.deepcopy(plain), {"0": "embedding_rowwise"}, group)
            given = ids % num_words
            expected, found = plain(given), ours(given)
            assert torch.equal(found, expected)
            expected.sin().sum().backward()
            found.sin().sum().backward()
            grad = plain[0].weight.grad
            own_grad = ours[0].weight.grad.to_local()
            assert torch.equal(own_grad, ours[0].split.take(grad, group.rank)), (kind, num_words, padding)
            assert ours[0].padding_idx == padding
            for unknown in (num_words, -1):
                with pytest.raises(
                    IndexError, match=rf"'0': expected words from 0 to {num_words - 1}, .* out of range"
                ):
                    ours(torch.tensor([unknown]))
    by_width = parallelize(nn.Sequential(nn.Embedding(7, 5)), {"0": "embedding_colwise"}, group)
    with pytest.raises(IndexError, match="'0': expected words from 0 to 6, got some from 7 to 7"):
        by_width(torch.tensor([7]))
    for divided in (ours, by_width):
        with pytest.raises(TypeError, match="'0': expected a tensor of words, got list"):
            divided([1])
    counting = nn.Sequential(nn.Embedding(7, 5, scale_grad_by_freq=True))
    with pytest.raises(ValueError, match="'0': scale_grad_by_freq counts words"):
        parallelize(counting, {"0": "embedding_rowwise"}, group)


def test_what_is_an_embedding() -> None:
    assert is_embedding(Scaled(2, 3)) and not is_embedding(nn.Linear(2, 3))
