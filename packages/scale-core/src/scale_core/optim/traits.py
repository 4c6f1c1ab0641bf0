"""What is known of each class of optimizers: what an update depends on, and what it remembers.

An elementwise optimizer computes the new value of an element from that element's gradient and state alone, so a
parameter can be cut anywhere. Others need a parameter as a whole, or all parameters together. This is the one table of
it: who cuts parameters, refuses to, moves state or names it, asks here.

Classes of torch.optim are known as such: a subclass may compute anything. Others come from many packages under the
same names, so they are known by these; what they do is only ever a reason to refuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn, optim
from torch.optim import Optimizer

Scope = Literal["element", "parameter", "all"]


@dataclass(frozen=True)
class OptimizerKind:
    """What one class of optimizers does.

    Attributes:
        name: Of the class.
        scope: What an update looks at together: each element, each parameter, or all parameters.
        needs: What it depends on beside an element's own gradient and state; "" is nothing.
        elements: Keys of its state with one value for each element of the parameter, as far as options ask for them.
        numbers: Keys of its state with one number per parameter.
        fused: Whether torch has a fused kernel for it.
        sparse: Whether it takes sparse gradients only.
    """

    name: str
    scope: Scope = "element"
    needs: str = ""
    elements: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("step",)
    fused: bool = False
    sparse: bool = False


_MOMENTS = ("exp_avg", "exp_avg_sq")
_DISTANCE = "the gradients of all parameters together"
_FACTORS = "rows and columns of its second moment, and the norm of its update"
_PRECONDITIONER = "a preconditioner of rows and columns"
_PROJECTION = "a projection of the whole gradient"
_TRUST = "the norms of the parameter and of its update"

_OF_TORCH = (
    OptimizerKind("ASGD", elements=("ax",), numbers=("step", "eta", "mu")),
    OptimizerKind("Adadelta", elements=("square_avg", "acc_delta")),
    OptimizerKind("Adafactor", "parameter", _FACTORS),
    OptimizerKind("Adagrad", elements=("sum",), fused=True),
    OptimizerKind("Adam", elements=(*_MOMENTS, "max_exp_avg_sq"), fused=True),
    OptimizerKind("AdamW", elements=(*_MOMENTS, "max_exp_avg_sq"), fused=True),
    OptimizerKind("Adamax", elements=("exp_avg", "exp_inf")),
    OptimizerKind("LBFGS", "all", "all parameters together", numbers=()),
    OptimizerKind("Muon", "parameter", "an orthogonal matrix near its momentum", ("momentum_buffer",), numbers=()),
    OptimizerKind("NAdam", elements=_MOMENTS, numbers=("step", "mu_product")),
    OptimizerKind("RAdam", elements=_MOMENTS),
    OptimizerKind("RMSprop", elements=("square_avg", "momentum_buffer", "grad_avg")),
    OptimizerKind("Rprop", elements=("prev", "step_size")),
    OptimizerKind("SGD", elements=("momentum_buffer",), numbers=(), fused=True),
    OptimizerKind("SparseAdam", elements=_MOMENTS, sparse=True),
)

_ELSEWHERE = (
    OptimizerKind("AdafactorBigVision", "parameter", _FACTORS),
    OptimizerKind("CAME", "parameter", _FACTORS),
    OptimizerKind("DAdaptAdaGrad", "all", _DISTANCE),
    OptimizerKind("DAdaptAdam", "all", _DISTANCE),
    OptimizerKind("DAdaptAdan", "all", _DISTANCE),
    OptimizerKind("DAdaptAdanIP", "all", _DISTANCE),
    OptimizerKind("DAdaptLion", "all", _DISTANCE),
    OptimizerKind("DAdaptSGD", "all", _DISTANCE),
    OptimizerKind("DistributedShampoo", "parameter", _PRECONDITIONER),
    OptimizerKind("GaLore", "parameter", _PROJECTION),
    OptimizerKind("GaLoreAdamW", "parameter", _PROJECTION),
    OptimizerKind("LAMB", "parameter", _TRUST),
    OptimizerKind("LARS", "parameter", "the norms of the parameter and of its gradient"),
    OptimizerKind("Lamb", "parameter", _TRUST),
    OptimizerKind("Lars", "parameter", "the norms of the parameter and of its gradient"),
    OptimizerKind("NovoGrad", "parameter", "the norm of its gradient"),
    OptimizerKind("Novograd", "parameter", "the norm of its gradient"),
    OptimizerKind("Prodigy", "all", _DISTANCE),
    OptimizerKind("SM3", "parameter", "the largest element of each row and column"),
    OptimizerKind("SOAP", "parameter", _PRECONDITIONER),
    OptimizerKind("Shampoo", "parameter", _PRECONDITIONER),
)

KINDS: dict[type[Optimizer], OptimizerKind] = {
    found: kind for kind in _OF_TORCH if (found := getattr(optim, kind.name, None)) is not None
}
"""The classes of torch.optim that this torch has."""

_BY_NAME = {kind.name: kind for kind in (*_OF_TORCH, *_ELSEWHERE)}

ELEMENTWISE = frozenset(cls for cls, kind in KINDS.items() if kind.scope == "element" and not kind.sparse)
"""The classes of torch.optim that are elementwise. (Each keeps a few numbers per parameter, such as its step.)"""

PER_PARAMETER = frozenset(cls for cls, kind in KINDS.items() if kind.scope == "parameter")
"""Those that need rows and columns, or the whole matrix, of one parameter at a time."""

NUMBERS = frozenset(key for kind in KINDS.values() for key in kind.numbers)
"""The numbers that torch's optimizers keep per parameter: for a 0-dim parameter no shape could tell them."""


def known_bases(optim_cls: type[Optimizer]) -> list[OptimizerKind]:
    """Returns what is known of a class and of those that it is made of, by their names; the nearest first.

    One of which nothing is known but that it is elementwise may still be made of one that is not.
    """
    return [_BY_NAME[base.__name__] for base in optim_cls.__mro__ if base.__name__ in _BY_NAME]


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
