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


def check_own_parameters(unit: Unit) -> None:
    """What stands in the module is about to be replaced by what is gathered, whatever it is.

    Raises:
        RuntimeError: It is neither shard nor whole parameter of the unit.
    """
    for module, attribute, buffer, number in unit.slots:
        here = module._parameters.get(attribute)
        shard = None if buffer.flatten else buffer.exposed[number]
        if here is not shard and here is not buffer.wholes[number]:
            raise RuntimeError(
                f"another tensor stands in the place of '{buffer.names[number]}', as torch.func.functional_call puts "
                f"it there, and {unit_title(unit.name)} would compute with its own parameter all the same: call it on "
                "a plain copy of the model, or write the values: with torch.no_grad(), model.summon_full_params(): "
                "param.copy_(values)"
            )


def check_not_overwritten(unit: Unit) -> None:
    """What a unit computes with is a copy of its shards, and what is written to it goes with it.

    Raises:
        RuntimeError: Somebody has written to one of its parameters while it was whole.
    """
    for buffer in unit.buffers:
        if buffer.is_overwritten:
            names = ", ".join(f"'{name}'" for name in buffer.names[:4]) + (", ..." if len(buffer.names) > 4 else "")
            which = names if len(buffer.names) == 1 else f"one of {names}"
            raise RuntimeError(
                f"{which} was written to in place while {unit_title(unit.name)} ran, as nn.Embedding(max_norm=...) "
                "does, and that would be lost, since it is a gathered copy: keep what a forward updates in a buffer, "
                "change parameters between steps inside model.summon_full_params(), or leave the module that holds it "
                "unsharded"
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
