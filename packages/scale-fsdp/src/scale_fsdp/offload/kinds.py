"""How the state of an optimizer may be divided between two devices."""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer

from scale_core.optimizer_kinds import KINDS

Split = Literal["element", "parameter"]


def split_of(optim_cls: type[Optimizer], split: Split | None) -> Split:
    """Returns how the state of an optimizer may be divided.

    Args:
        optim_cls: Its class; a subclass may compute anything, so only the classes in the table are known.
        split: What the user says; needed for classes that are not in the table.

    Raises:
        TypeError: `optim_cls` is no optimizer class.
        ValueError: It can't be divided, not as the user says, or nobody knows how.
    """
    given: object = optim_cls
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        told = f"an {type(given).__name__} that is built already" if isinstance(given, Optimizer) else repr(given)
        raise TypeError(
            f"expected a class of optimizers, got {told}: pass the class first, and its arguments after the "
            "parameters, OffloadOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)"
        )
    name = optim_cls.__name__
    kind = KINDS.get(optim_cls)
    if kind is not None and (kind.scope == "all" or kind.sparse):
        why = "its gradients are sparse, and only dense ones are copied"
        why = why if kind.sparse else f"its direction depends on {kind.needs}"
        raise ValueError(f"{name} can't work in two places: {why}. Use it without OffloadOptimizer")
    if split not in (None, "element", "parameter"):
        raise ValueError(f'expected split to be "element", "parameter" or None, got {split!r}')
    if split == "element" and kind is not None and kind.scope == "parameter":
        raise ValueError(f'{name} needs each parameter as a whole: pass split="parameter", or leave split out')
    if split is not None:
        return split
    if kind is not None:
        return "element" if kind.scope == "element" else "parameter"
    raise ValueError(
        f"whether {name} updates each element by itself is not known: pass "
        'OffloadOptimizer(..., split="element") if it does, split="parameter" if it updates each parameter by itself; '
        "an optimizer that looks at several parameters together can't work in two places"
    )
