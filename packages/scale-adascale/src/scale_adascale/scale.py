"""The scale: how many times a batch is as large as the small one whose learning rate is known; a number in any case."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor


def is_real(value: Any) -> bool:
    """Whether it is one that can be compared with others, as what comes from a command line or a file may not be."""
    return isinstance(value, numbers.Real) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    )


def check_scale(scale: Any) -> None:
    """Refuses what is no scale.

    Raises:
        ValueError: It is below 1, infinite, or not a number.
    """
    if not is_real(scale) or not 1 <= scale < math.inf:
        raise ValueError(
            f"Scale must be at least 1, got {scale!r}: pass the size of the batch of one step, over all ranks and "
            "micro-batches, divided by that of the small batch whose learning rate you know"
        )
