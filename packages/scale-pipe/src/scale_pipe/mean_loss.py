"""Loss functions that are sums, which a step over micro-batches would take for means."""

from __future__ import annotations

from functools import partial
from typing import Any


def check_is_mean(loss_fn: Any) -> None:
    """Refuses a loss function that says of itself that it is a sum.

    The loss of a step is the mean over its micro-batches, each weighted by its samples, so of a sum over N samples it
    would be a fraction, and gradients with it. A function that sums without saying so can't be told from others.

    Args:
        loss_fn: As a user gives it: any function, a module, a partial of one; None where there is none.

    Raises:
        ValueError: It has `reduction="sum"`.
    """
    function, reduction = loss_fn, None
    while isinstance(function, partial):
        reduction = reduction or function.keywords.get("reduction")
        function = function.func
    if (reduction or getattr(function, "reduction", None)) != "sum":
        return
    title = getattr(function, "__name__", type(function).__name__)
    raise ValueError(
        f'loss_fn is expected to return the mean over the samples of a micro-batch, and {title} has reduction="sum": '
        'write reduction="mean"; or, for the gradients of the sum over a batch of N samples, '
        "loss_fn=lambda output, target: N * sum_loss(output, target) / len(target)"
    )
