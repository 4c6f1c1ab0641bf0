"""What FairScale's AdaScale has saved: averages of all groups, among the states of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scale_adascale.averages import Average

_SAVED_AS = "adascale"


def without_fairscale(state_dict: Mapping[str, Any], num_groups: int) -> tuple[dict[str, Any], list[Average] | None]:
    """Takes what FairScale's AdaScale has saved out of an optimizer's state.

    Args:
        state_dict: The optimizer's.
        num_groups: How many parameter groups it is loaded into.

    Returns:
        The state without it, and the average of each parameter group; None where FairScale has not saved it.

    Raises:
        ValueError: It has averages of another number of parameter groups.
    """
    state = dict(state_dict["state"])
    saved = state.pop(_SAVED_AS, None)
    if saved is None:
        return dict(state_dict), None
    squares, variances = saved["grad_sqr_avg"], saved["grad_var_avg"]
    if not len(squares) == len(variances) == num_groups:
        raise ValueError(
            f"expected a FairScale AdaScale with averages of {num_groups} parameter groups, got those of "
            f"{len(squares)}: build the optimizer with the groups that it was saved with, or load "
            "{**state_dict, 'state': state without 'adascale'}, with which the gain begins anew"
        )
    weights = saved.get("grad_var_avg_unbias", [0.0] * len(squares))
    count = float(saved.get("grad_var_avg_count", 1 if any(weight > 0 for weight in weights) else 0))
    averages = [
        Average(float(variance), float(square), float(weight), count)
        for variance, square, weight in zip(variances, squares, weights, strict=True)
    ]
    return {**state_dict, "state": state}, averages
