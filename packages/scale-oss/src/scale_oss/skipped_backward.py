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

SKIPPED = (
    "its forward pass was followed by no backward pass: an error in its loss was caught, its batch was skipped, or a "
    "forward pass of this rank alone was not under torch.no_grad()"
)
"""Why a rank has failed that did not run a pass at all."""


def describe_unmatched(step: int, unmatched: Sequence[int]) -> str:
    """In words: ranks have different numbers of forward passes without a backward."""
    return (
        f"pass {step} was given up on all ranks: expected each rank's backward to follow the same forward passes, but "
        f"there are forward passes without a backward, {list(unmatched)} by rank. A rank that skips a batch leaves the "
        "others in its backward, and averages its next one with theirs: skip it on all ranks; and put a forward pass "
        "that is only looked at under torch.no_grad()"
    )


@dataclass(eq=False)
class _Forward:
    """One forward pass: whether a backward has come to it, and whether none can come any more."""

    is_matched: bool = False
    is_freed: bool = False


class PendingForwards:
    """This rank's forward passes for training, since the ranks were last found to do the same.

    Args:
        on_backward: Called when a backward comes to the outputs of one, before it goes on; and not held here.
    """

    def __init__(self, on_backward: Callable[[], None]) -> None:
        self._on_backward = weakref.WeakMethod(on_backward)
        self._all: list[_Forward] = []  # in order
        self._per_pass = 1  # how many the last backward pass has come to
        self._accepted = 0  # how many all ranks alike leave without one, such as those whose outputs are only looked at

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
        watch = _BackwardHook(forward, self._on_backward)
        for node in nodes:
            node.register_prehook(watch)

    def has_skipped(self, *, in_step: bool) -> bool:
        """Whether this rank has left out a backward pass, as far as it can tell now.

        Args:
            in_step: Another forward is about to begin, and all ranks must do that together: then one whose graph is
                still there counts, too, if a backward has always come at this point.
        """
        unmatched = self._unmatched()
        if len(unmatched) <= self._accepted:
            return False
        return any(forward.is_freed for forward in unmatched) or (
            in_step and len(unmatched) >= self._per_pass + self._accepted
        )

    def drop_skipped(self) -> None:
        """The pass that was left out is given up: forgets the forwards that belong to it."""
        for forward in self._unmatched()[: self._per_pass]:
            self._all.remove(forward)

    def accept_unmatched(self) -> None:
        """All ranks have left out as many alike, so it is nothing that has gone wrong."""
        self._accepted = self.num_unmatched

    @property
    def num_unmatched(self) -> int:
        """To how many no backward has come."""
        return len(self._unmatched())

    def reset_baseline(self) -> None:
        """A backward pass has ended well: those that it has not come to may still wait for theirs."""
        self._accepted = min(self._accepted, self.num_unmatched)
        self._per_pass = sum(forward.is_matched for forward in self._all) or self._per_pass
        self._all = [forward for forward in self._all if not (forward.is_matched or forward.is_freed)]

    def clear(self) -> None:
        """A pass has failed, and with it all forwards before."""
        self._all = []

    def _unmatched(self) -> list[_Forward]:
        return [forward for forward in self._all if not forward.is_matched]


class _BackwardHook:
    """A hook of the graph: called when a backward comes to the outputs, and dropped with the graph."""

    def __init__(self, forward: _Forward, on_backward: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._forward, self._on_backward = forward, on_backward

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        self._forward.is_matched = True
        on_backward = self._on_backward()
        if on_backward is not None:
            on_backward()

    def __del__(self) -> None:
        self._forward.is_freed = True
