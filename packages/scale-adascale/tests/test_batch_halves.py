"""Each batch in two halves, for one worker that accumulates nothing."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import net
from torch.optim import SGD

from scale_adascale import AdaScale, halves


def test_halves_have_all_samples_in_order():
    batch = {"x": torch.arange(12).view(6, 2), "y": [torch.arange(6)]}
    first, second = halves(batch)
    assert torch.equal(torch.cat([first["x"], second["x"]]), batch["x"])
    assert first["y"][0].tolist() == [0, 1, 2] and second["y"][0].tolist() == [3, 4, 5]


def test_a_step_on_two_halves_is_one_on_the_whole_with_the_gain():
    models = [net(), net()]
    optimizer = AdaScale(SGD(models[0].parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 5, generator=generator)
    for half in halves(batch):
        (models[0](half).square().mean() / 2).backward()
    models[1](batch).square().mean().backward()
    optimizer.step()
    SGD(models[1].parameters(), lr=0.1 * optimizer.gain()).step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)
    assert 1 < optimizer.gain() < 4


@pytest.mark.parametrize(
    "batch", [torch.ones(3, 2), torch.ones(0, 2), [torch.ones(4), torch.ones(2)], torch.ones(()), 7]
)
def test_what_has_no_two_halves_is_refused(batch):
    with pytest.raises(ValueError, match="one even number of samples"):
        list(halves(batch))
