"""The fixture of pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from check_models import batches, ddp, mlp
from torch import nn


def test_the_fixture_compares(parity: Callable[..., Any]) -> None:
    assert parity(mlp, wrap=ddp, batches=batches(6)).first is None


def untouched(model: nn.Module) -> nn.Module:
    return model


def test_the_fixture_fails_the_test_with_the_report_alone(parity: Callable[..., Any]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^step 1: gradient of 0.weight differs"):
        parity(mlp, wrap=untouched, batches=batches(6))
