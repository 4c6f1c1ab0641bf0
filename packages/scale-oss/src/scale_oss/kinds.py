"""Which optimizers may be cut between ranks, and which can't be sharded at all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from scale_core.optimizer_kinds import ELEMENTWISE, KINDS, known_bases


def looks_at_all(optim_class: type[Optimizer]) -> bool:
    """Returns whether an optimizer is known, by its name, to compute something of all tensors together."""
    return any(kind.scope == "all" for kind in known_bases(optim_class))


def check_kind(optim_class: type[Optimizer], *, elementwise: bool | None, together: bool) -> None:
    """Refuses what the user says of an optimizer where it can't be so.

    Raises:
        ValueError: It looks at all tensors together, and nobody has said so; or it is to do both.
    """
    name = optim_class.__name__
    if together and elementwise:
        raise ValueError(
            f"OSS: {name} can't update each element by itself and look at all tensors together: "
            "pass elementwise=True or together=True"
        )
    if looks_at_all(optim_class) and not together:
        raise ValueError(
            f"OSS: {name} computes its step size from all tensors together, and each rank would see its own part of "
            f"them alone: pass together=True, so that one rank updates all, OSS(..., {name}, together=True)"
        )


def works_by_element(optim_class: type[Optimizer]) -> bool:
    """Returns whether an optimizer is known to update each element by itself.

    Raises:
        TypeError: This is no class of optimizers.
        ValueError: It can't be sharded rightly.
    """
    given: object = optim_class
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise TypeError(f"OSS: expected optim to be a class of optimizers, such as torch.optim.AdamW, got {given!r}")
    if getattr(optim_class, "listens_to_gradients", False):
        raise ValueError(
            f"OSS can't shard {optim_class.__name__}: it measures gradients in the backward pass, which brings none to "
            "the pieces that OSS steps on: put AdaScale around, AdaScale(OSS(model.parameters(), torch.optim.SGD, "
            "lr=...))"
        )
    for kind in (KINDS[base] for base in optim_class.__mro__ if base in KINDS):
        if kind.scope == "all":
            raise ValueError(
                f"OSS can't shard {optim_class.__name__}: it has one history of {kind.needs}, so no rank can update "
                "its own part of them: use it without OSS"
            )
        if kind.sparse:
            raise ValueError(
                f"OSS can't shard {optim_class.__name__}: it takes sparse gradients, and what OSS hands on is dense: "
                f"use torch.optim.Adam, or {kind.name} without OSS"
            )
    return optim_class in ELEMENTWISE


def constructor_arguments(optim_class: type[Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out of an optimizer's `defaults` what its class has fixed, so that it takes the others as its arguments.

    Trainers build `OSS(optimizer.param_groups, type(optimizer), **optimizer.defaults)`, and among those of AdamW there
    is one that only Adam takes. Anything else that it does not take, it refuses by itself.
    """
    parameters = inspect.signature(optim_class).parameters
    taken = {key: value for key, value in defaults.items() if key in parameters}
    if len(taken) == len(defaults) or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(defaults)
    fixed = optim_class([nn.Parameter(torch.zeros(1, 1))], **taken).defaults
    return taken | {key: value for key, value in defaults.items() if key not in fixed or fixed[key] != value}
