"""Which rule a function of torch follows with sharded tensors among its arguments.

Rules run inside `DisableTorchFunctionSubclass`, where sharded tensors are plain:

- `attributes`: shapes, sizes and numbers of elements describe the full tensor;
- `elementwise`: functions that compute each element by itself, copies, conversions and `zeros_like` are local;
- `views`: views with the same elements in the same order, and slices along the first dimension, are sharded as well;
- `reduction_rules`: reductions go over the ranks (`reductions`);
- `random_values`: random values are drawn for the full tensor, and each rank takes its part;
- any other function raises `ShardedTensorError` before anything is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from scale_core import compat
from scale_core.sharded_tensor.rules import attributes, elementwise, pointwise, random_values, reduction_rules, views
from scale_core.sharded_tensor.rules.arguments import Rule, refuse_call
from scale_core.sharded_tensor.tensor import ShardedTensor

_RULES: dict[str, Rule] = {
    **attributes.RULES,
    **elementwise.RULES,
    **views.RULES,
    **random_values.RULES,
    **reduction_rules.RULES,
}


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of torch with sharded tensors among its arguments."""
    with torch._C.DisableTorchFunctionSubclass():
        if compat.is_tracing():  # Its graph computes with this rank's elements, whose shape it asks for here.
            return func(*args, **kwargs)
        return _rule_of(func)(func, args, kwargs)


@functools.cache
def _rule_of(func: Callable[..., Any]) -> Rule:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = cast(Any, func).__self__.__name__
        return attributes.get_attribute(attribute) if name == "__get__" else attributes.set_attribute(attribute)
    if getattr(func, "__module__", None) == "torch.nn.init":
        return random_values.fill_in_place
    if getattr(func, "__module__", None) == "torch.foreach":  # from torch 2.15 on
        name = f"_foreach_{name}"
    if name in _RULES:
        return _RULES[name]
    if name.startswith("_foreach_"):
        return elementwise.on_lists if pointwise.is_pointwise_list(name) else refuse_call
    return elementwise.on_elements


ShardedTensor.dispatch = staticmethod(dispatch)
