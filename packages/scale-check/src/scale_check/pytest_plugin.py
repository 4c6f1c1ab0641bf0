"""A fixture of pytest: `parity`, as `scale_check.parity`, whose report stands in the test's section when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(name="parity")
def parity_fixture() -> Callable[..., Any]:
    """`scale_check.parity`; a difference fails the test."""
    from scale_check.harness import ParityError, parity  # Not before a test asks for it: it imports torch.

    def check(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return parity(*args, **kwargs)
        except ParityError as error:
            pytest.fail(str(error))

    return check
