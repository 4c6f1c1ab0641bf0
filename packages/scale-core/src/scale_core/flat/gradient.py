"""This rank's own gradients of one flat buffer, from the moment autograd has them until their reduction takes them.

They stand in one flat tensor of W * S elements, as the collective wants them. It exists only while there are any, and
each gradient moves into it as soon as it is whole, while it is in the processor's cache.

Where gradients of several passes are summed, those of the pass that runs now stand apart from the sum of the passes
before it, until it has gone well: what a pass that fails has added to a sum could not be taken out of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from scale_core import buffer_pool
from scale_core.flat.layout import Entry

# From this size on, gradients wait outside of the flat one until the backward is over: they are far too large to be
# packed while they are in a processor's cache, which is what smaller ones gain by being packed at once.
_HELD_FROM_BYTES = 256 * 2**20


class Places(Protocol):
    """Where parameters stand in a full buffer: a `FlatLayout`, or one of another making."""

    @property
    def entries(self) -> Sequence[Entry]: ...

    @property
    def full_numel(self) -> int: ...

    @property
    def padding(self) -> int: ...


class FlatGradient:
    """The gradients of the wholes of one flat buffer, before they are reduced.

    Args:
        wholes: The parameters that a module computes with, in their full shapes.
        layout: Where each of them stands.
        dtype: Of the flat gradient.
        wide_dtype: The same, where gradients of several backward passes are summed.

    Attributes:
        flat: [W * S], the gradients of the pass that runs now; None while there are none, or while all are held.
        waiting: [W * S], the sum of those of earlier passes, which the next `take` adds; None while there is none.
        holds: Whether `hold` lets gradients stand alone; only large buffers do.
        names: The parameters' names, for errors.
    """

    def __init__(
        self, wholes: Sequence[nn.Parameter], layout: Places, dtype: torch.dtype, wide_dtype: torch.dtype
    ) -> None:
        self.flat: Tensor | None = None
        self.waiting: Tensor | None = None
        self.holds = layout.full_numel * dtype.itemsize >= _HELD_FROM_BYTES
        self.names: Sequence[str] = ()
        self._wholes, self._layout = wholes, layout
        self._dtype, self._wide_dtype = dtype, wide_dtype
        self._held: dict[int, Tensor] = {}
        self._packed = [False] * len(wholes)
        self._waits = [False] * len(wholes)
        self._summed = [False] * len(wholes)  # What the flat one has of these is the sum that waits and more.
        self._is_taken = False  # The sum that waits is being reduced: a second `take` must not add it again.

    def __bool__(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return self.has_begun or self._adds

    @property
    def has_begun(self) -> bool:
        """Whether the pass that runs now has brought a gradient."""
        return self.flat is not None or bool(self._held)

    def hold(self, index: int, *, accumulate: bool = False) -> None:
        """Takes the gradient of a whole, and lets it stand alone until the next `pack` or `take`.

        So the flat gradient takes its W * S elements after the backward, when the full buffer and what the backward
        computes with are free, not beside them. In a small buffer the gradient is packed at once.

        Args:
            index: Which parameter.
            accumulate: As in `pack`.

        Raises:
            RuntimeError: As in `pack`.
        """
        grad = self._grad_of(index)
        if grad is None:
            return
        if not self.holds or self.flat is not None or index in self._held:
            if self._held:
                self.pack(accumulate=accumulate)
            self._pack(index, grad, accumulate)
        else:
            self._held[index] = grad

    def pack(self, index: int | None = None, *, accumulate: bool = False) -> None:
        """Moves gradients into the flat one, where each adds to one that is there already.

        Args:
            index: Which parameter's, and all that are held; None is only those.
            accumulate: More backward passes will follow before the reduction: sum them in a dtype that is wide enough.

        Raises:
            RuntimeError: The gradient has a gradient of its own (`create_graph=True`).
        """
        while self._held:  # Each is free as soon as it is copied.
            self._pack(*self._held.popitem(), accumulate)
        grad = None if index is None else self._grad_of(index)
        if index is not None and grad is not None:
            self._pack(index, grad, accumulate)

    def given(self) -> list[int]:
        """The parameters that have got a gradient since the last `take`."""
        waits = self._waits if self._adds else [False] * len(self._waits)
        packed = zip(self._packed, waits, strict=True)
        return [index for index, either in enumerate(packed) if any(either) or index in self._held]

    def missing(self) -> list[int]:
        """The trainable parameters that have got none since the last `take`."""
        given = set(self.given())
        return [index for index, whole in enumerate(self._wholes) if whole.requires_grad and index not in given]

    def of_pass(self) -> tuple[list[int], Tensor | None]:
        """The parameters that the pass that runs now has brought gradients to, and these, without any sum that waits.

        Returns:
            Their numbers, and [W * S], zero where there is no gradient; None where there is none at all.
        """
        self.pack()
        if self.flat is not None and (not all(self._packed) or self._layout.padding):
            self._fill_gaps(self.flat)
        return [index for index, has in enumerate(self._packed) if has], self.flat

    def take(self, device: torch.device) -> Tensor:
        """Returns the flat gradient [W * S], narrow or wide, and forgets it; what was not used is zero.

        The sum that waits is in it, and is kept beside it until `settle`.

        Args:
            device: Where the zeros stand, if it is all zeros.
        """
        self.pack()
        flat = self.flat
        if self._adds:
            flat = self._with_waiting(flat)
            self._is_taken = True
        if flat is None:
            flat = torch.zeros(self._layout.full_numel, dtype=self._dtype, device=device)
        elif not all(self._packed) or self._layout.padding:
            self._fill_gaps(flat)
        self._forget_pass()
        return flat

    def settle(self) -> None:
        """The pass has gone well: its gradients join the sum that waits, or the sum was reduced and is forgotten."""
        if self._is_taken:
            self._forget_waiting()
        self.pack(accumulate=True)
        flat, packed, summed = self.flat, self._packed, self._summed
        self._forget_pass()
        if flat is None:
            return
        if self.waiting is None:
            self.waiting, self._waits = flat.to(self._wide_dtype), packed
            return
        for index in (index for index, has in enumerate(packed) if has):
            adds = self._waits[index] and not summed[index]
            self._waits[index] = _add(self._view(self.waiting, index), self._view(flat, index), adds)

    def revoke(self) -> None:
        """The pass has failed: forgets its gradients; the sum of those before it waits on."""
        self._forget_pass()
        self._is_taken = False
        for whole in self._wholes:
            whole.grad = None

    def withhold(self) -> None:
        """The pass has failed here and goes on elsewhere: until `revoke`, every `take` gives zeros."""
        self.revoke()
        self._is_taken = True

    def take_over(self, other: FlatGradient, device: torch.device) -> None:
        """Takes the gradients of the same parameters from before they were moved to `device`, or to another dtype."""
        other.settle()
        if other.waiting is not None:
            self.waiting, self._waits = other.waiting.to(device, self._wide_dtype), list(other._waits)

    def drop(self) -> None:
        """Forgets all gradients."""
        self.revoke()
        self._forget_waiting()

    @property
    def _adds(self) -> bool:
        """Whether the next `take` adds a sum that waits."""
        return self.waiting is not None and not self._is_taken

    @property
    def _the_waiting(self) -> Tensor:
        assert self.waiting is not None, "there is no sum that waits"
        return self.waiting

    def _forget_pass(self) -> None:
        self.flat, self._packed, self._held = None, [False] * len(self._wholes), {}
        self._summed = [False] * len(self._wholes)

    def _forget_waiting(self) -> None:
        self.waiting, self._waits, self._is_taken = None, [False] * len(self._wholes), False

    def _grad_of(self, index: int) -> Tensor | None:
        whole = self._wholes[index]
        grad, whole.grad = whole.grad, None
        if grad is None:
            return None
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of '{self.names[index]}' has a gradient of its own, which can't follow it into a shard: "
                "call backward() without create_graph=True, or compute the penalty from outputs and inputs instead"
            )
        if grad.layout is not torch.strided:
            return grad.to_dense()
        # A backward that has returned a weight as a gradient: the full buffer may be released before it is read.
        return grad.clone() if grad.untyped_storage()._cdata == whole.untyped_storage()._cdata else grad

    def _pack(self, index: int, grad: Tensor, accumulate: bool) -> None:
        if self.flat is None:
            dtype = self._wide_dtype if accumulate else self._dtype
            # Beside a sum that waits, as it is: it is added to that in a dtype that is wide enough.
            dtype = grad.dtype if self._adds else dtype
            fills_it = len(self._wholes) == 1 and grad.numel() == self._layout.full_numel
            if fills_it and grad.dtype == dtype and grad.is_contiguous():
                self.flat = grad.view(-1)  # It is laid out as the buffer is: taken over, not copied.
                self._packed[index] = True
                return
            self.flat = buffer_pool.empty(self._layout.full_numel, dtype, grad.device)
        if self._packed[index] and self._adds and not self._summed[index]:
            # A second gradient in one pass, as of reentrant checkpoints: added as autograd does, each to all before it.
            self.flat = self.flat.to(self._wide_dtype)
            if self._waits[index]:
                self._view(self.flat, index).add_(self._view(self._the_waiting, index))
                self._summed[index] = True
        self._packed[index] = _add(self._view(self.flat, index), grad, self._packed[index])

    def _with_waiting(self, flat: Tensor | None) -> Tensor:
        """Returns this pass's gradients plus the sum that waits, [W * S] in the wide dtype; gaps hold anything."""
        if flat is None:
            self._packed = list(self._waits)
            return self._the_waiting.clone()
        flat = flat.to(self._the_waiting.dtype)
        for index in (index for index, has in enumerate(self._waits) if has and not self._summed[index]):
            waiting = self._view(self._the_waiting, index)
            self._packed[index] = _add(self._view(flat, index), waiting, self._packed[index])
        return flat

    def _view(self, flat: Tensor, index: int) -> Tensor:
        entry = self._layout.entries[index]
        return flat.narrow(0, entry.offset, entry.numel).view(entry.shape)

    def _fill_gaps(self, flat: Tensor) -> None:
        """Zeroes what holds no gradient: padding, and parameters that were not used."""
        place = 0
        packed = zip(self._layout.entries, self._packed, strict=True)
        for entry in sorted((e for e, has in packed if has and e.numel), key=lambda e: e.offset):
            flat[place : entry.offset].zero_()
            place = entry.offset + entry.numel
        flat[place:].zero_()


def _add(target: Tensor, grad: Tensor, has: bool) -> bool:
    """Adds a gradient to what a target has, or puts it there; returns that it has one now."""
    if has:
        target.add_(grad)
    else:
        target.copy_(grad)
    return True
