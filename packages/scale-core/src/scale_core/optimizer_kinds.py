"""What an update of torch.optim depends on, and so how its parameters may be divided.

An elementwise optimizer computes the new value of an element from that element's gradient and state alone, so a
parameter can be cut anywhere. Others need a parameter as a whole, or all parameters together. A subclass may compute
anything, so only the very classes are known.
"""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    )
)
"""The classes of torch.optim that are elementwise. (Each keeps a few numbers per parameter, such as its step.)"""

PER_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    kind for name in ("Adafactor", "Muon") if (kind := getattr(optim, name, None)) is not None
)
"""Those that need rows and columns, or the whole matrix, of one parameter at a time."""
