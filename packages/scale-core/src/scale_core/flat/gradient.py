"""A rank's own gradients of one flat buffer, from `.grad` to the reduction.

They are in one flat tensor of W * S elements, as the collective wants them. It exists only while there are gradients,
and each one is copied into it as soon as it is complete, while it is in the processor's cache.

Where gradients of several passes are accumulated, those of the current pass are kept apart from the sum of earlier ones
until the pass has succeeded: a failed pass could not be subtracted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from scale_core import buffer_pool
from scale_core.flat.layout import LayoutEntry

# From this size on, gradients wait outside of the flat one until the backward is over: they are far too large to be
# packed while they are in a processor's cache, which is what smaller ones gain by being packed at once.
_HELD_FROM_BYTES = 256 * 2**20


class LayoutLike(Protocol):
    """The places of parameters in a full buffer: a `FlatLayout`, or another class's."""

    @property
    def entries(self) -> Sequence[LayoutEntry]: ...

    @property
    def full_numel(self) -> int: ...

    @property
    def padding(self) -> int: ...


class FlatGradient:
    """The local gradients of the unsharded parameters of one flat buffer."""

    def __init__(
        self, params: Sequence[nn.Parameter], layout: LayoutLike, dtype: torch.dtype, wide_dtype: torch.dtype
    ) -> None:
        # [W * S], the gradients of the current pass; None while there are none, or while all are held.
        self.flat: Tensor | None = None
        self.accumulated: Tensor | None = None  # [W * S], the sum of earlier passes, which the next `take` adds.
        # Whether `accumulate` keeps gradients apart, as large buffers do.
        self.holds = layout.full_numel * dtype.itemsize >= _HELD_FROM_BYTES
        self.names: Sequence[str] = ()  # The parameters' names, for errors
        self._params, self._layout = params, layout
        self._dtype, self._wide_dtype = dtype, wide_dtype
        self._held: dict[int, Tensor] = {}
        self._packed = [False] * len(params)
        self._waits = [False] * len(params)
        self._summed = [False] * len(params)  # The flat one has the accumulated sum of these already.
        self._is_taken = False  # The accumulated sum is being reduced: a second `take` must not add it again.

    def __bool__(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        accumulates = self.accumulated is not None and not self._is_taken
        return accumulates or self.flat is not None or bool(self._held)

    @property
    def has_begun(self) -> bool:
        """Whether the current pass has brought a gradient."""
        return self.flat is not None or bool(self._held)

    def accumulate(self, index: int, *, wide: bool = False) -> None:
        """Moves the gradient of parameter `index` from `.grad` into the flat gradient, or adds it there."""
        # In a large buffer it stays apart until the next `pack` or `take`: the flat gradient then takes its W * S
        # elements after the backward, when the full buffer and the activations are free, not beside them.
        param = self._params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.requires_grad or grad.layout is not torch.strided:
            grad = self._dense(index, grad)
        elif grad.untyped_storage()._cdata == param.untyped_storage()._cdata:
            grad = grad.clone()  # A custom backward has returned the weight: the full buffer may be released first.
        if self.holds and self.flat is None and index not in self._held:
            self._held[index] = grad
            return
        if self._held:
            self.pack(wide=wide)
        if self.flat is None or self.accumulated is not None:
            self._pack(index, grad, wide)
            return
        entry = self._layout.entries[index]
        target = self.flat.narrow(0, entry.offset, entry.numel).view(entry.shape)
        if self._packed[index]:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._packed[index] = True

    def pack(self, *, wide: bool = False) -> None:
        """Moves gradients that were kept apart into the flat one; `wide` as in `accumulate`."""
        while self._held:  # Each is free as soon as it is copied.
            self._pack(*self._held.popitem(), wide)

    def has_grad(self) -> list[int]:
        """The parameters that got a gradient since the last `take`."""
        adds = self.accumulated is not None and not self._is_taken
        rows = zip(self._packed, self._waits, strict=True)
        return [
            index for index, (packed, waits) in enumerate(rows) if packed or (adds and waits) or index in self._held
        ]

    def missing(self) -> list[int]:
        """The trainable parameters that got none since the last `take`."""
        given = set(self.has_grad())
        return [index for index, param in enumerate(self._params) if param.requires_grad and index not in given]

    def pass_gradient(self) -> tuple[list[int], Tensor | None]:
        """The parameters with gradients of the current pass, and these [W * S], without the sum of earlier passes."""
        self.pack()
        if self.flat is not None and (not all(self._packed) or self._layout.padding):
            self._fill_gaps(self.flat)
        return [index for index, has in enumerate(self._packed) if has], self.flat

    def take(self, device: torch.device) -> Tensor:
        """Returns the flat gradient [W * S] with the accumulated sum, and drops it; unused parameters are zero."""
        # The accumulated sum is kept until `commit_pass`: the pass may fail.
        self.pack()
        flat = self.flat
        if self.accumulated is not None and not self._is_taken:
            flat = self._add_accumulated(flat, self.accumulated)
            self._is_taken = True
        if flat is None:
            flat = torch.zeros(self._layout.full_numel, dtype=self._dtype, device=device)
        elif not all(self._packed) or self._layout.padding:
            self._fill_gaps(flat)
        self._forget_pass()
        return flat

    def commit_pass(self) -> None:
        """Adds the gradients of a pass that has succeeded to the accumulated sum, or drops a sum that was reduced."""
        if self._is_taken:
            self._drop_accumulated()
        self.pack(wide=True)
        flat, packed, summed = self.flat, self._packed, self._summed
        self._forget_pass()
        if flat is None:
            return
        if self.accumulated is None:
            self.accumulated, self._waits = flat.to(self._wide_dtype), packed
            return
        for index in (index for index, has in enumerate(packed) if has):
            adds = self._waits[index] and not summed[index]
            self._waits[index] = _add(self._view(self.accumulated, index), self._view(flat, index), adds)

    def rollback_pass(self) -> None:
        """Drops the gradients of a pass that has failed; the accumulated sum stays."""
        self._forget_pass()
        self._is_taken = False
        for param in self._params:
            param.grad = None

    def use_zeros(self) -> None:
        """Makes every `take` return zeros until `rollback_pass`: the pass failed here and goes on elsewhere."""
        self.rollback_pass()
        self._is_taken = True

    def adopt(self, other: FlatGradient, device: torch.device) -> None:
        """Takes over the accumulated gradients of the same parameters on another device or in another dtype."""
        other.commit_pass()
        if other.accumulated is not None:
            self.accumulated, self._waits = other.accumulated.to(device, self._wide_dtype), list(other._waits)

    def drop(self) -> None:
        """Drops all gradients."""
        self.rollback_pass()
        self._drop_accumulated()

    def _forget_pass(self) -> None:
        self.flat, self._packed, self._held = None, [False] * len(self._params), {}
        self._summed = [False] * len(self._params)

    def _drop_accumulated(self) -> None:
        self.accumulated, self._waits, self._is_taken = None, [False] * len(self._params), False

    def _dense(self, index: int, grad: Tensor) -> Tensor:
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of '{self.names[index]}' has a gradient of its own, which can't follow it into a shard: "
                "call backward() without create_graph=True, or compute the penalty from outputs and inputs instead"
            )
        return grad.to_dense()

    def _pack(self, index: int, grad: Tensor, wide: bool) -> None:
        """As `accumulate`, where the flat gradient has to be allocated or there is a sum of earlier passes."""
        accumulated = None if self._is_taken else self.accumulated
        if self.flat is None:
            dtype = self._wide_dtype if wide else self._dtype
            if accumulated is not None:
                dtype = grad.dtype  # It is added to the sum in a dtype that is wide enough.
            is_flat = len(self._params) == 1 and grad.numel() == self._layout.full_numel
            if is_flat and grad.dtype == dtype and grad.is_contiguous():
                self.flat = grad.view(-1)  # It is laid out as the buffer is: taken over, not copied.
                self._packed[index] = True
                return
            numel = self._layout.full_numel
            if numel * dtype.itemsize >= buffer_pool.SMALLEST_BYTES:
                self.flat = buffer_pool.empty(numel, dtype, grad.device)
            else:
                self.flat = torch.empty(numel, dtype=dtype, device=grad.device)
        if self._packed[index] and accumulated is not None and not self._summed[index]:
            # A second gradient in one pass, as of reentrant checkpoints: added as autograd does, each to all before it.
            self.flat = self.flat.to(self._wide_dtype)
            if self._waits[index]:
                self._view(self.flat, index).add_(self._view(accumulated, index))
                self._summed[index] = True
        self._packed[index] = _add(self._view(self.flat, index), grad, self._packed[index])

    def _add_accumulated(self, flat: Tensor | None, accumulated: Tensor) -> Tensor:
        """Returns this pass's gradients plus the accumulated sum, [W * S] in the wide dtype; gaps are undefined."""
        if flat is None:
            self._packed = list(self._waits)
            return accumulated.clone()
        flat = flat.to(accumulated.dtype)
        for index in (index for index, has in enumerate(self._waits) if has and not self._summed[index]):
            earlier = self._view(accumulated, index)
            self._packed[index] = _add(self._view(flat, index), earlier, self._packed[index])
        return flat

    def _view(self, flat: Tensor, index: int) -> Tensor:
        entry = self._layout.entries[index]
        return flat.narrow(0, entry.offset, entry.numel).view(entry.shape)

    def _fill_gaps(self, flat: Tensor) -> None:
        """Zeroes padding and unused parameters."""
        place = 0
        packed = zip(self._layout.entries, self._packed, strict=True)
        for entry in sorted((e for e, has in packed if has and e.numel), key=lambda e: e.offset):
            flat[place : entry.offset].zero_()
            place = entry.offset + entry.numel
        flat[place:].zero_()


def _add(target: Tensor, grad: Tensor, has: bool) -> bool:
    """Adds `grad` to `target`, or copies it where there is none yet; returns True."""
    if has:
        target.add_(grad)
    else:
        target.copy_(grad)
    return True
