"""What an update of torch.optim depends on, and so how its state can be divided between two devices.

An elementwise optimizer computes the new value of an element from that element's gradient and state alone, so a
parameter can be cut anywhere. Others need a parameter as a whole, or all parameters together.
"""

from __future__ import annotations

from typing import Literal

from torch import optim
from torch.optim import Optimizer

from scale_core.optimizer_kinds import ELEMENTWISE, PER_PARAMETER

Split = Literal["element", "parameter"]

_REFUSED = {
    optim.LBFGS: "its direction depends on all parameters together",
    optim.SparseAdam: "its gradients are sparse, and only dense ones are copied",
}


def split_of(optim_cls: type[Optimizer], split: Split | None) -> Split:
    """Returns how the state of an optimizer may be divided.

    Args:
        optim_cls: Its class; a subclass may compute anything, so only the classes in the tables are known.
        split: What the user says; needed for classes that are not in the tables.

    Raises:
        TypeError: `optim_cls` is no optimizer class.
        ValueError: It can't be divided, not as the user says, or nobody knows how.
    """
    given: object = optim_cls
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise TypeError(
            f"expected a class of optimizers, got {optim_cls!r}: pass the class first, and its arguments after the "
            "parameters, OffloadOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)"
        )
    name = optim_cls.__name__
    if optim_cls in _REFUSED:
        raise ValueError(f"{name} can't work in two places: {_REFUSED[optim_cls]}. Use it without OffloadOptimizer")
    if split not in (None, "element", "parameter"):
        raise ValueError(f'expected split to be "element", "parameter" or None, got {split!r}')
    if split == "element" and optim_cls in PER_PARAMETER:
        raise ValueError(f'{name} needs each parameter as a whole: pass split="parameter", or leave split out')
    if split is not None:
        return split
    if optim_cls in ELEMENTWISE:
        return "element"
    if optim_cls in PER_PARAMETER:
        return "parameter"
    raise ValueError(
        f"whether {name} updates each element by itself is not known: pass "
        'OffloadOptimizer(..., split="element") if it does, split="parameter" if it updates each parameter by itself; '
        "an optimizer that looks at several parameters together can't work in two places"
    )
