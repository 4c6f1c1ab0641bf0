"""Random numbers inside of what is divided: each rank draws its own, and outside all of them go on alike.

What ranks compute alike has to drop alike. But where heads, features or positions are divided, ranks draw other
numbers, and how many depends on what each has. So on the way in a seed is drawn, the same one on all ranks; inside,
each goes on from that seed and its own number; on the way out all go back to where they stood when they went in. A
recomputation that begins from the same random state draws the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scale_core import compat
from scale_core.each_part import ForEachPart
from scale_core.group import Group
from scale_tp.random_state import StreamState, go_to, random_state


class DividedRandomness(ForEachPart):
    """The random numbers of one part of a model that ranks divide.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._wanted = False
        self._outside: StreamState | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the module that holds the part: where nothing is dropped, nothing has to be drawn."""
        self._wanted = drops(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of that module, for what has not been left, as after an error."""
        self.leave()

    def enter_if_wanted(self) -> None:
        """Goes on with numbers of this rank's own, if something may be dropped; within, nothing happens."""
        if self._wanted and self._outside is None:
            self.enter()

    def enter(self) -> None:
        """Goes on with numbers of this rank's own."""
        drawn = torch.randint(1 << 52, (1,), dtype=torch.float64)
        seed = int(compat.values_of(drawn, simulated=[0.0])[0])
        self._outside = random_state()
        torch.manual_seed(seed * self.group.size + self.group.rank)

    def leave(self) -> None:
        """Goes back to the numbers that all ranks draw alike; without `enter` nothing happens."""
        outside, self._outside = self._outside, None
        if outside is not None:
            go_to(outside)

    def forget(self) -> None:
        """Takes it that nothing has been entered, as where a recomputation has ended without leaving."""
        self._outside = None

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "_wanted": False, "_outside": None}


def drops(module: nn.Module) -> bool:
    """Whether a module in training may drop something: by a dropout or an attribute that says how much."""
    if not module.training:
        return False
    return any(_drops_itself(below) for below in module.modules() if below.training)


def _drops_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        name.find("drop") >= 0 and isinstance(value, float) and value > 0 for name, value in vars(module).items()
    )
