"""What must hold when a unit runs: each a rule that would otherwise be broken without a word.

Whether a unit's parameters may be used, changed or copied past the unit is asked in `guard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from scale_core.events import unit_title
from scale_core.flat import FlatBuffer

if TYPE_CHECKING:  # unit.py stands on this file.
    from scale_fsdp.unit import Unit


def check_no_gradients(unit: Unit) -> None:
    """Nothing that is summoned takes part in training.

    Raises:
        RuntimeError: The unit trains and is called with gradients enabled.
    """
    if torch.is_grad_enabled() and unit.trains:
        raise RuntimeError(
            f"{unit_title(unit.name)} was called with gradients enabled inside summon_full_params, whose tensors "
            "are copies that no optimizer knows: call it under torch.no_grad(), or outside"
        )


def check_unchanged(unit: Unit, before: Sequence[int], now: Sequence[int]) -> None:
    """Autograd's own rule: what a forward has used must not change before its backward.

    Args:
        unit: The unit.
        before: The versions of its shards when it ran.
        now: Those of now.

    Raises:
        RuntimeError: They differ.
    """
    if before != now:
        raise RuntimeError(
            f"the parameters of {unit_title(unit.name)} were changed between its forward and its backward, by an "
            "optimizer step, load_state_dict, a conversion or another in-place operation, so its gradients would be "
            "wrong: call loss.backward() first"
        )


def refuse_hooks(buffer: FlatBuffer) -> None:
    """A hook on a shard would never be called.

    Raises:
        RuntimeError: There is one.
    """
    for index, param in enumerate(buffer.exposed):
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"a hook is registered on the local shard of '{buffer.names[index]}', where no gradient ever "
                "arrives by itself: see the gradients before they are reduced by scale_core.on_local_grads(...), "
                "and those after it in param.grad when backward() has returned"
            )


def refuse_second_derivatives(unit: Unit) -> None:
    """A graph through a backward pass would need parameters that are released after it.

    Raises:
        RuntimeError: The backward pass that runs now keeps a graph of itself, `create_graph=True`.
    """
    if torch.is_grad_enabled() and not all(buffer.is_aliased for buffer in unit.buffers):
        raise RuntimeError(
            f"a backward pass with create_graph=True has come to {unit_title(unit.name)}, whose parameters are "
            "released after it, so that no second derivative can be taken through it: call backward() and "
            "autograd.grad() without create_graph=True, or leave the module that the penalty is on unsharded"
        )


def check_same_model(unit: Unit, other: Unit) -> None:
    """What one unit fetches ahead must be a unit of the same model.

    Raises:
        ValueError: It is not.
    """
    if other.root is not unit.root:
        raise ValueError(
            f"{unit_title(unit.name)} was told to fetch a {type(other.module).__name__} ahead that is no unit of this "
            "model: pass modules of the same model to set_modules_to_forward_prefetch(...) and "
            "set_modules_to_backward_prefetch(...)"
        )
