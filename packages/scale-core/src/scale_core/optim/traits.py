"""Traits of optimizer classes: the inputs of an update, and the state it keeps.

An elementwise optimizer computes the new value of an element from that element's gradient and state alone, so a
parameter can be cut anywhere. Others need a full parameter, or all parameters together.

Classes of torch.optim are known as such: a subclass may compute anything. Others come from many packages under the same
names, so they are known by these; their traits are only ever a reason to refuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn, optim
from torch.optim import Optimizer

Scope = Literal["element", "parameter", "all"]


@dataclass(frozen=True)
class OptimizerTraits:
    """The traits of one class of optimizers."""

    name: str  # Of the class
    scope: Scope = "element"  # An update looks at elements, parameters, or all of them together
    needs: str = ""  # Its inputs other than an element's own gradient and state; "" is none
    # Keys of its state with one value for each element of the parameter, as far as options ask for them.
    elements: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("step",)  # Keys of its state with one number per parameter
    fused: bool = False  # Whether torch has a fused kernel for it
    sparse: bool = False  # Whether it takes sparse gradients only


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MEANS = "means over the elements of all parameters together"
_DISTANCE = "the gradients of all parameters together"
_FACTORS = "rows and columns of its second moment, and the norm of its update"
_PRECONDITIONER = "a preconditioner of rows and columns"
_PROJECTION = "a projection of the full gradient"
_TRUST = "the norms of the parameter and of its update"

_OF_TORCH = (
    OptimizerTraits("ASGD", elements=("ax",), numbers=("step", "eta", "mu")),
    OptimizerTraits("Adadelta", elements=("square_avg", "acc_delta")),
    OptimizerTraits("Adafactor", "parameter", _FACTORS),
    OptimizerTraits("Adagrad", elements=("sum",), fused=True),
    OptimizerTraits("Adam", elements=(*_MOMENTS, "max_exp_avg_sq"), fused=True),
    OptimizerTraits("AdamW", elements=(*_MOMENTS, "max_exp_avg_sq"), fused=True),
    OptimizerTraits("Adamax", elements=("exp_avg", "exp_inf")),
    OptimizerTraits("LBFGS", "all", "all parameters together", numbers=()),
    OptimizerTraits("Muon", "parameter", "an orthogonal matrix near its momentum", ("momentum_buffer",), numbers=()),
    OptimizerTraits("NAdam", elements=_MOMENTS, numbers=("step", "mu_product")),
    OptimizerTraits("RAdam", elements=_MOMENTS),
    OptimizerTraits("RMSprop", elements=("square_avg", "momentum_buffer", "grad_avg")),
    OptimizerTraits("Rprop", elements=("prev", "step_size")),
    OptimizerTraits("SGD", elements=("momentum_buffer",), numbers=(), fused=True),
    OptimizerTraits("SparseAdam", elements=_MOMENTS, sparse=True),
)

_ELSEWHERE = (
    OptimizerTraits("Adai", "all", _MEANS),
    OptimizerTraits("AdaiV2", "all", _MEANS),
    OptimizerTraits("AdamS", "all", _MEANS),
    OptimizerTraits("AvaGrad", "all", _MEANS),
    OptimizerTraits("LoRARite", "all", "pairs of matrices"),
    OptimizerTraits("AdafactorBigVision", "parameter", _FACTORS),
    OptimizerTraits("CAME", "parameter", _FACTORS),
    OptimizerTraits("DAdaptAdaGrad", "all", _DISTANCE),
    OptimizerTraits("DAdaptAdam", "all", _DISTANCE),
    OptimizerTraits("DAdaptAdan", "all", _DISTANCE),
    OptimizerTraits("DAdaptAdanIP", "all", _DISTANCE),
    OptimizerTraits("DAdaptLion", "all", _DISTANCE),
    OptimizerTraits("DAdaptSGD", "all", _DISTANCE),
    OptimizerTraits("DistributedShampoo", "parameter", _PRECONDITIONER),
    OptimizerTraits("GaLore", "parameter", _PROJECTION),
    OptimizerTraits("GaLoreAdamW", "parameter", _PROJECTION),
    OptimizerTraits("LAMB", "parameter", _TRUST),
    OptimizerTraits("LARS", "parameter", "the norms of the parameter and of its gradient"),
    OptimizerTraits("Lamb", "parameter", _TRUST),
    OptimizerTraits("Lars", "parameter", "the norms of the parameter and of its gradient"),
    OptimizerTraits("NovoGrad", "parameter", "the norm of its gradient"),
    OptimizerTraits("Novograd", "parameter", "the norm of its gradient"),
    OptimizerTraits("Prodigy", "all", _DISTANCE),
    OptimizerTraits("Ranger21", "all", _MEANS),
    OptimizerTraits("SM3", "parameter", "the largest element of each row and column"),
    OptimizerTraits("SOAP", "parameter", _PRECONDITIONER),
    OptimizerTraits("Shampoo", "parameter", _PRECONDITIONER),
)

KINDS: dict[type[Optimizer], OptimizerTraits] = {
    found: kind for kind in _OF_TORCH if (found := getattr(optim, kind.name, None)) is not None
}
"""The classes of torch.optim that this torch has."""

_BY_NAME = {kind.name: kind for kind in (*_OF_TORCH, *_ELSEWHERE)}

ELEMENTWISE = frozenset(cls for cls, kind in KINDS.items() if kind.scope == "element" and not kind.sparse)
"""The classes of torch.optim that are elementwise. (Each keeps a few numbers per parameter, such as its step.)"""

PER_PARAMETER = frozenset(cls for cls, kind in KINDS.items() if kind.scope == "parameter")
"""Those that need rows and columns, or the full matrix, of one parameter at a time."""

NUMBERS = frozenset(key for kind in KINDS.values() for key in kind.numbers)
"""The numbers that torch's optimizers keep per parameter: for a 0-dim parameter no shape could tell them."""


def is_per_param_number(key: str, shape: Sequence[int], param_shape: Sequence[int]) -> bool:
    """Whether a state is one number for the full parameter, and not the state of its one element."""
    return len(shape) == 0 and (key in NUMBERS or len(param_shape) > 0)


_ELEMENTWISE_OF_PACKAGES = {
    "bitsandbytes.optim": (
        "Adagrad",
        "Adam",
        "AdEMAMix",
        "Lion",
        "RMSprop",
        "SGD",
        "PagedAdam",
        "PagedLion",
        "PagedAdEMAMix",
    ),
    "torchao.optim": ("Adam", "_Adam"),
}
"""Optimizers of other packages that update each element, or blocks of them, by itself; by how names begin."""


def is_known_elementwise(optim_class: type[Optimizer]) -> bool:
    """Returns whether a class is known to update each element by itself, of torch's own and of other packages."""
    if optim_class in ELEMENTWISE:
        return True
    return any(
        optim_class.__module__.startswith(package) and optim_class.__name__.startswith(names)
        for package, names in _ELEMENTWISE_OF_PACKAGES.items()
    )


def known_bases(optim_cls: type[Optimizer]) -> list[OptimizerTraits]:
    """Returns the traits of a class and its bases, by their names; the nearest first."""
    # A class only known to be elementwise may still be made of one that is not.
    return [_BY_NAME[base.__name__] for base in optim_cls.__mro__ if base.__name__ in _BY_NAME]


def needs_all_params(optim_class: type[Optimizer]) -> bool:
    """Returns whether an optimizer is known, by its name, to compute something of all tensors together."""
    return any(kind.scope == "all" for kind in known_bases(optim_class))


def check_kind(optim_class: type[Optimizer], *, elementwise: bool | None, together: bool) -> None:
    """Refuses a user's claim about an optimizer that contradicts its known traits."""
    name = optim_class.__name__
    if together and elementwise:
        raise ValueError(
            f"OSS: {name} can't update each element by itself and look at all tensors together: "
            "pass OSSOptions(elementwise=True) or OSSOptions(together=True)"
        )
    if needs_all_params(optim_class) and not together:
        raise ValueError(
            f"OSS: {name} computes its step size from all tensors together, and each rank would see its own part of "
            f"them alone: so that one rank updates all, pass OSS(..., {name}, options=OSSOptions(together=True))"
        )


def is_elementwise(optim_class: type[Optimizer]) -> bool:
    """Returns whether an optimizer is known to update each element by itself."""
    argument: object = optim_class
    if not (isinstance(argument, type) and issubclass(argument, Optimizer)):
        raise TypeError(f"OSS: expected optim to be a class of optimizers, such as torch.optim.AdamW, got {argument!r}")
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
    """Returns an optimizer's `defaults` without those that its class fixes, for its constructor."""
    # Trainers build `OSS(optimizer.param_groups, type(optimizer), **optimizer.defaults)`, and among the defaults of
    # AdamW there is one that only Adam takes. Anything else that it does not take, it refuses by itself.
    parameters = inspect.signature(optim_class).parameters
    accepted = {key: value for key, value in defaults.items() if key in parameters}
    if len(accepted) == len(defaults) or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return dict(defaults)
    fixed = optim_class([nn.Parameter(torch.zeros(1, 1))], **accepted).defaults
    return accepted | {key: value for key, value in defaults.items() if key not in fixed or fixed[key] != value}
