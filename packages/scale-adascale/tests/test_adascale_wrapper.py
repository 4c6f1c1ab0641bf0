"""The optimizer and AdaScale around it in one call."""

from __future__ import annotations

import pytest
from adascale_cases import backward, linear
from torch.optim import AdamW

from scale_adascale import AdaScaleWrapper


def test_the_wrapper_builds_what_adascale_wraps():
    """FairScale's passes `debias_ewma` on in the place of `is_scaled_loss`."""
    model = linear()
    optimizer = AdaScaleWrapper(
        model.parameters(), num_gradients_to_accumulate=2, debias_ewma=False, optim_cls=AdamW, lr=0.3
    )
    assert type(optimizer.optimizer) is AdamW and optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer._settings.is_scaled_loss is True and optimizer._settings.debias is False
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    assert optimizer.gain() == pytest.approx(2.0)
