"""Parameters that got no gradient in a backward pass.

A parameter that no rank has used keeps the gradient it had, none as a rule, as in plain PyTorch: Adam's momentum and
weight decay would move it on zeros. One that only some ranks have used counts as zeros on the others. Which is which
no rank can know alone; so each remembers what it reduced as zeros, and they compare at the end of the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:  # unit.py stands on this file's user, root.py.
    from scale_fsdp.unit import Unit


class ParamKey(NamedTuple):
    """A parameter, by numbers that are equal on all ranks: of its unit, of its buffer there, and its own in that."""

    unit: int
    buffer: int
    param: int


class Unused:
    """What this rank has reduced as zeros in the pass that runs now.

    Args:
        units: The units of the model, in an order that is equal on all ranks.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self.reduced: set[int] = set()
        self.keys: set[ParamKey] = set()
        self._without_gradient: set[ParamKey] = set()

    def forget(self) -> None:
        """A pass begins, or has ended."""
        self.reduced, self.keys, self._without_gradient = set(), set(), set()

    def is_reduced(self, unit: Unit) -> bool:
        """Whether the unit has been reduced in this pass."""
        return self._numbers[id(unit)] in self.reduced

    def note_reduction(self, unit: Unit) -> None:
        """The unit is about to be reduced; a second time in a pass brings only what came late."""
        number = self._numbers[id(unit)]
        if number in self.reduced:
            return
        self.reduced.add(number)
        for buffer_number, buffer in enumerate(unit.buffers):
            for index in buffer.gradient.missing() if buffer.trains else ():
                key = ParamKey(number, buffer_number, index)
                self.keys.add(key)
                if buffer.exposed_of(index).grad is None:
                    self._without_gradient.add(key)

    def note_gradient(self, unit: Unit, buffer_number: int, index: int) -> None:
        """A gradient has come, possibly later than its unit's reduction."""
        self.keys.discard(ParamKey(self._numbers[id(unit)], buffer_number, index))

    def params_of(self, unit: Unit) -> set[nn.Parameter]:
        """Returns the local shards of a unit that were reduced as zeros, and may have no gradient in the end."""
        number = self._numbers[id(unit)]
        keys = (key for key in self.keys if key.unit == number and not unit.buffers[key.buffer].flatten)
        return {unit.buffers[key.buffer].exposed_of(key.param) for key in keys}

    def restore(self, keys_by_rank: Iterable[Iterable[Sequence[int]]]) -> None:
        """Takes the zeros away again from those that no rank has used and that had no gradient before."""
        nobody = set.intersection(*({ParamKey(*key) for key in keys} for keys in keys_by_rank))
        for key in nobody & self._without_gradient:
            buffer = self._units[key.unit].buffers[key.buffer]
            if not buffer.flatten:
                buffer.exposed_of(key.param).grad = None
