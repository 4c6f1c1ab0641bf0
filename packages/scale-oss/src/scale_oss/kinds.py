"""Which optimizers may be cut between ranks, and which can't be sharded at all."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from scale_core.optimizer_kinds import ELEMENTWISE

_REFUSED = {
    optim.LBFGS: (
        "it has one history of all parameters together, so no rank can update its own part of them: use it without OSS"
    ),
    optim.SparseAdam: (
        "it takes sparse gradients, and what OSS hands on is dense: use torch.optim.Adam, or SparseAdam without OSS"
    ),
}


def works_by_element(optim_class: type[Optimizer]) -> bool:
    """Returns whether an optimizer is known to update each element by itself.

    Raises:
        TypeError: This is no class of optimizers.
        ValueError: It can't be sharded rightly.
    """
    given: object = optim_class
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise TypeError(f"OSS: expected optim to be a class of optimizers, such as torch.optim.AdamW, got {given!r}")
    for refused, reason in _REFUSED.items():
        if issubclass(optim_class, refused):
            raise ValueError(f"OSS can't shard {optim_class.__name__}: {reason}")
    return optim_class in ELEMENTWISE
