"""Skipped-backward detection: forward passes of this rank to which no backward has come.

A backward that one rank skips, as where its loss failed or a batch was skipped, leaves the others waiting in theirs.
The rank sees it when the outputs of the forward are gone, or when the next one begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scale_core.tree import tensors_in

LEFT_OUT = (
    "its forward pass was followed by no backward pass: an error in its loss was caught, its batch was skipped, or a "
    "forward pass of this rank alone was not under torch.no_grad()"
)
"""Why a rank has failed that did not run a pass at all."""


def not_alike(step: int, unmet: Sequence[int]) -> str:
    """In words: ranks have different numbers of forward passes without a backward."""
    return (
        f"pass {step} was given up on all ranks: expected each rank's backward to follow the same forward passes, but "
        f"there are forward passes without a backward, {list(unmet)} by rank. A rank that skips a batch leaves the "
        "others in its backward, and averages its next one with theirs: skip it on all ranks; and put a forward pass "
        "that is only looked at under torch.no_grad()"
    )


@dataclass(eq=False)
class _Forward:
    """One forward pass: whether a backward has come to it, and whether none can come any more."""

    is_met: bool = False
    is_dropped: bool = False


class Forwards:
    """This rank's forward passes for training, since the ranks were last found to do the same.

    Args:
        met: Called when a backward comes to the outputs of one, before it goes on; and not held here.
    """

    def __init__(self, met: Callable[[], None]) -> None:
        self._met = weakref.WeakMethod(met)
        self._all: list[_Forward] = []  # in order
        self._per_pass = 1  # how many the last backward pass has come to
        self._usual = 0  # how many all ranks alike leave without one, such as those whose outputs are only looked at

    def watch(self, outputs: Any, *, counts: bool = True) -> None:
        """Follows what becomes of the outputs of a forward pass.

        Args:
            outputs: Tensors anywhere in them.
            counts: All ranks must run its backward; those that are not reduced some rank may leave out.
        """
        # A view that is changed in place gets another history, its base keeps its own.
        roots = [tensor._base if tensor._base is not None else tensor for tensor in tensors_in(outputs)]
        nodes = {root.grad_fn for root in roots if root.grad_fn is not None}
        if not nodes:
            return
        forward = _Forward()
        if counts:
            self._all.append(forward)
        watch = _Watch(forward, self._met)
        for node in nodes:
            node.register_prehook(watch)

    def one_is_left_out(self, *, in_step: bool) -> bool:
        """Whether this rank has left out a backward pass, as far as it can tell now.

        Args:
            in_step: Another forward is about to begin, and all ranks must do that together: then one whose graph is
                still there counts, too, if a backward has always come at this point.
        """
        unmet = self._unmet()
        if len(unmet) <= self._usual:
            return False
        return any(forward.is_dropped for forward in unmet) or (in_step and len(unmet) >= self._per_pass + self._usual)

    def give_up(self) -> None:
        """The pass that was left out is given up: forgets the forwards that belong to it."""
        for forward in self._unmet()[: self._per_pass]:
            self._all.remove(forward)

    def expect(self) -> None:
        """All ranks have left out as many alike, so it is nothing that has gone wrong."""
        self._usual = self.num_unmet

    @property
    def num_unmet(self) -> int:
        """To how many no backward has come."""
        return len(self._unmet())

    def settle(self) -> None:
        """A backward pass has ended well: those that it has not come to may still wait for theirs."""
        self._usual = min(self._usual, self.num_unmet)
        self._per_pass = sum(forward.is_met for forward in self._all) or self._per_pass
        self._all = [forward for forward in self._all if not (forward.is_met or forward.is_dropped)]

    def clear(self) -> None:
        """A pass has failed, and with it all forwards before."""
        self._all = []

    def _unmet(self) -> list[_Forward]:
        return [forward for forward in self._all if not forward.is_met]


class _Watch:
    """A hook of the graph: called when a backward comes to the outputs, and dropped with the graph."""

    def __init__(self, forward: _Forward, met: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._forward, self._met = forward, met

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        self._forward.is_met = True
        met = self._met()
        if met is not None:
            met()

    def __del__(self) -> None:
        self._forward.is_dropped = True
