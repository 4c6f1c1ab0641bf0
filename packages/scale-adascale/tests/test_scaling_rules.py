"""The fixed rules beside AdaScale."""

from __future__ import annotations

import pytest

from scale_adascale import legw, linear, square_root


def test_linear_is_the_scale_and_square_root_its_root():
    assert linear(16.0) == 16.0 and square_root(16.0) == 4.0


def test_legw_reaches_the_root_over_as_many_epochs_as_the_scale():
    assert [legw(16.0, epoch, base_warmup_epochs=0.5) for epoch in (0, 2, 4, 8, 30)] == [0.0, 1.0, 2.0, 4.0, 4.0]
    assert legw(16.0, 0.0, base_warmup_epochs=0.0) == 4.0


def test_what_is_no_scale_and_no_epoch_is_refused():
    for rule in (linear, square_root, lambda scale: legw(scale, 1.0, 1.0)):
        with pytest.raises(ValueError, match=r"Scale must be at least 1, got 0\.5"):
            rule(0.5)
    with pytest.raises(ValueError, match="epochs of 0 or more, got epoch=-1"):
        legw(2.0, -1, 1)
