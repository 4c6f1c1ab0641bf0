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
"""The failure that a rank reports for a backward pass that it has skipped."""


def describe_unmatched(step: int, unmatched: Sequence[int]) -> str:
    """Returns the error text for ranks that differ in the number of forward passes without a backward."""
    return (
        f"pass {step} was given up on all ranks: the numbers of forward passes without a backward differ, "
        f"{list(unmatched)} by rank. Skip a batch on all ranks or on none, and run a forward pass without a backward "
        "under torch.no_grad()"
    )


@dataclass(eq=False)
class _Forward:
    """One forward pass: whether a backward has reached its outputs, and whether its graph is freed."""

    is_matched: bool = False
    is_freed: bool = False


class PendingForwards:
    """Forward passes of this rank that wait for their backward, since the ranks last agreed.

    Args:
        on_backward: Called when a backward reaches the outputs of one, before it goes on; held weakly.
    """

    def __init__(self, on_backward: Callable[[], None]) -> None:
        self._on_backward = weakref.WeakMethod(on_backward)
        self._all: list[_Forward] = []  # in the order of the calls
        self._per_pass = 1  # forwards that the last backward pass has reached
        self._accepted = 0  # unmatched forwards on every rank alike, such as those whose outputs are only looked at

    def watch(self, outputs: Any, *, counts: bool = True) -> None:
        """Registers hooks on the graph of a forward pass.

        Args:
            outputs: The outputs; tensors at any depth.
            counts: Whether all ranks must run its backward, as they must when it reduces.
        """
        # A view that is changed in place gets another grad_fn; its base keeps its own.
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
        """Whether this rank has skipped a backward pass, as far as it can tell now.

        Args:
            in_step: Another forward begins, on all ranks together. Then a graph that is still alive counts as well, if
                a backward has always come before this point.
        """
        unmatched = self._unmatched()
        if len(unmatched) <= self._accepted:
            return False
        return any(forward.is_freed for forward in unmatched) or (
            in_step and len(unmatched) >= self._per_pass + self._accepted
        )

    def drop_skipped(self) -> None:
        """Forgets the forwards of one skipped pass, which was aborted."""
        for forward in self._unmatched()[: self._per_pass]:
            self._all.remove(forward)

    def accept_unmatched(self) -> None:
        """Takes the present number of unmatched forwards for normal: all ranks have skipped as many."""
        self._accepted = self.num_unmatched

    @property
    def num_unmatched(self) -> int:
        """Forward passes without a backward."""
        return len(self._unmatched())

    def reset_baseline(self) -> None:
        """After a pass that succeeded: forgets matched and freed forwards; others may still get their backward."""
        self._accepted = min(self._accepted, self.num_unmatched)
        self._per_pass = sum(forward.is_matched for forward in self._all) or self._per_pass
        self._all = [forward for forward in self._all if not (forward.is_matched or forward.is_freed)]

    def clear(self) -> None:
        """Forgets all forwards: the pass has failed."""
        self._all = []

    def _unmatched(self) -> list[_Forward]:
        return [forward for forward in self._all if not forward.is_matched]


class _BackwardHook:
    """Autograd hook: called when a backward reaches the outputs, deleted when the graph is freed."""

    def __init__(self, forward: _Forward, on_backward: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._forward, self._on_backward = forward, on_backward

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        self._forward.is_matched = True
        on_backward = self._on_backward()
        if on_backward is not None:
            on_backward()

    def __del__(self) -> None:
        self._forward.is_freed = True
