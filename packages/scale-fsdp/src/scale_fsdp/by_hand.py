"""What is otherwise done by itself, done by hand: gather, release, fetch ahead, leave gradients unreduced.

The verbs are those that FSDP2's users know. Each acts on the unit that the module is; those with `recurse` on the
units inside as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import nn

from scale_fsdp.slots import show_shards, show_wholes
from scale_fsdp.unit import Unit, root_of, unit_of, units_in


class Unsharding:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Returns when the module's parameters are whole."""
        _wait_pinned(self._unit)


class ByHand(nn.Module):
    """The methods of a sharded module by which its user takes over."""

    def unshard(self, async_op: bool = False) -> Unsharding | None:
        """Gathers this unit's parameters; they stay whole, in the dtype that they are computed in, until `reshard()`.

        All ranks call it together. What is shown are copies: a change to them is lost.

        Args:
            async_op: Return a handle whose `wait()` ends the gather, in place of waiting here.
        """
        unit = _unit_at(self, "unshard")
        _pin(unit)
        if async_op:
            return Unsharding(unit)
        _wait_pinned(unit)
        return None

    def reshard(self) -> None:
        """Releases this unit's parameters, unless they are in use by a forward or backward pass."""
        _unpin(_unit_at(self, "reshard"))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> Self:
        """Whether backward passes reduce the gradients; without, they wait on this rank, as inside `no_sync()`."""
        for unit in _units_at(self, "set_requires_gradient_sync", recurse):
            unit.synchronizes = requires_gradient_sync
        return self

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> Self:
        """Whether the parameters are released between forward and backward, from the next pass on."""
        for unit in _units_at(self, "set_reshard_after_forward", recurse):
            unit.reshard_after_forward = reshard_after_forward
        return self

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> Self:
        """Whether the parameters are released after the backward; what stays is gathered anew after a step."""
        for unit in _units_at(self, "set_reshard_after_backward", recurse):
            unit.reshard_after_backward = reshard_after_backward
        return self

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Begins to gather these units whenever this one is opened in a forward, beside the one that comes next."""
        unit = _unit_at(self, "set_modules_to_forward_prefetch")
        unit.fetches["forward"] = [_unit_at(module, "set_modules_to_forward_prefetch") for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Begins to gather these units whenever this one is opened in a backward, beside the one that comes next."""
        unit = _unit_at(self, "set_modules_to_backward_prefetch")
        unit.fetches["backward"] = [_unit_at(module, "set_modules_to_backward_prefetch") for module in modules]


def _pin(unit: Unit) -> None:
    """Starts to gather a unit, which stays gathered until `_unpin`."""
    root_of(unit).recover()
    unit.pinned = True
    for each in (*unit.lenders, unit):
        if not each.uses and each.is_stale:
            each.release()  # An optimizer has stepped since it was gathered.
        each.gather()


def _wait_pinned(unit: Unit) -> None:
    """Waits for what `_pin` has started, and puts the whole parameters into the module."""
    if unit.pinned:
        for each in (*unit.lenders, unit):
            each.wait_gathered()
        unit.follow_trainable()
        show_wholes(unit.slots)


def _unpin(unit: Unit) -> None:
    """Back to the shards, unless a forward or a backward is under way."""
    unit.pinned = False
    if unit.root is not None and not unit.uses and not unit.in_backward:
        for each in (unit, *unit.lenders):
            if not (each.uses or each.in_backward or each.pinned):
                each.release()
        show_shards(unit.slots)


def _unit_at(module: nn.Module, method: str) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise ValueError(
            f"{method}: this {type(module).__name__} is not sharded by itself: call fully_shard(module) first"
        )
    return unit


def _units_at(module: nn.Module, method: str, recurse: bool) -> list[Unit]:
    return units_in(module) if recurse else [_unit_at(module, method)]
