"""Whether gradients were changed since somebody has looked last, mostly without a look at their values.

A tensor is itself as long as it lives, whatever stands at its address afterwards, and counts its changes; only where
it is another, or has changed, are its elements read.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from scale_adascale.squared_norms import values_of_gradient
from scale_core import compat
from scale_core.comm.group import Group
from scale_core.shard import full_shape


class Mark(NamedTuple):
    """What a gradient was.

    Attributes:
        tensor: Which one, as long as it lives.
        address: Where its elements are.
        changes: How many times they were written to.
    """

    tensor: weakref.ref[Tensor]
    address: int
    changes: int

    def is_of(self, grad: Tensor) -> bool:
        """Whether a gradient is that one, unchanged."""
        return self.tensor() is grad and (self.address, self.changes) == _state_of(grad)


class Marks:
    """What gradients were after the last pass of a step, or when zeros were written to them, and at the last step.

    Gradients are those of the same parameters each time, in the same order, None where there is none.
    """

    def __init__(self) -> None:
        self._last: list[Mark | None] = []
        self._at_step: list[Mark | None] = []

    def set(self, grads: Sequence[Tensor | None]) -> None:
        """They are what they should be."""
        self._last = [_mark_of(grad) for grad in grads]

    def set_at_step(self, grads: Sequence[Tensor | None]) -> None:
        """A step is made with them."""
        self._at_step = [_mark_of(grad) for grad in grads]

    def forget(self) -> None:
        """The next pass is the first one of a step."""
        self._last = []

    def forget_step(self) -> None:
        """The gradients of the last step were cleared to None."""
        self._at_step = []

    def are_zero(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether all are zero or None, when no pass has come; the device is waited for if that has to be looked up."""
        pairs = zip_longest(grads, self._last)
        return _are_zero([grad for grad, mark in pairs if grad is not None and (mark is None or not mark.is_of(grad))])

    def are_changed(self, grads: Sequence[Tensor | None], *, alone: bool, is_torn: bool) -> bool:
        """Whether one was changed since the last pass.

        Args:
            grads: As they are now.
            alone: Nobody else writes to them between passes; what averages gradients may, and is seen to clear alone.
            is_torn: A pass has failed since, which may have brought some.
        """
        for before, now in zip(self._last, grads, strict=False):
            if before is None:
                is_changed = is_torn and now is not None
            else:
                is_changed = now is None or ((alone or is_torn) and not before.is_of(now))
            if is_changed:
                return True
        return False

    def have_come(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether any has come since the last step, or since zeros were written to it."""
        before = zip_longest(grads, self._last, self._at_step)
        return any(
            now is not None and not any(mark is not None and mark.is_of(now) for mark in marks)
            for now, *marks in before
        )


def _mark_of(grad: Tensor | None) -> Mark | None:
    if grad is None or grad.layout not in (torch.strided, torch.sparse_coo):
        return None
    return Mark(weakref.ref(grad), *_state_of(grad))


def _state_of(grad: Tensor) -> tuple[int, int]:
    values = grad if grad.layout is torch.strided else grad._values()
    return values.data_ptr(), grad._version


def _are_zero(grads: Sequence[Tensor]) -> bool:
    if not grads:
        return True
    counts = [torch.count_nonzero(values_of_gradient(grad.detach())).to(grads[0].device) for grad in grads]
    (number,) = compat.values_of(torch.stack(counts).sum().double().reshape(1), simulated=[0.0])
    return not number


# Whether ranks with other data really average their gradients, asked by one number in the sum that is sent anyway.
#
# Of gradients that all ranks should have alike each rank adds up bits, and multiplies the sum by a whole number of its
# own; these numbers sum up to zero. So do the products, if all have the same; all of it is exact in fp64. Where
# somebody does not average gradients, or does so after the backward pass, or ranks have other parts of the model, it is
# almost surely another number: sums that differ by a multiple of 2^24 - 3 are not told apart.
#
# A gradient may have zeros wherever one looks, as that of an embedding has, and only one layer may be left out of what
# averages. So the first steps look at all elements of all gradients, and later ones at some of one gradient, each step
# at others. Whoever stops to average all of them is found in the same step even so, unless these are zeros there.

_LOOKED_AT = 32  # elements of one gradient, where not all of all are looked at
_WHOLE_LOOKS = 8  # steps: a scaler may have to leave out the first ones, whose gradients are no numbers
_PRIME = 2**24 - 3  # so that each bit counts
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def factor_of(rank: int, size: int) -> int:
    """Returns a whole number for each rank, at most 250 either way; those of all ranks sum up to zero."""

    def place(number: int) -> int:
        return (7 * number * number + 3 * number) % 251

    return place(rank) - place((rank - 1) % size)


def fingerprint(params: Sequence[Tensor]) -> int:
    """Returns 16 bits that are equal where the whole parameters have the same shapes in the same order."""
    return zlib.crc32(repr([tuple(full_shape(param)) for param in params]).encode()) & 0xFFFF


def own_part(data: Group, shapes: int, grads: Sequence[Tensor | None], device: torch.device, *, look: int) -> Tensor:
    """Returns this rank's summand, [1], fp64.

    Args:
        data: The ranks that have other data.
        shapes: The fingerprint of the parameters.
        grads: What all of them should have alike.
        device: Where it is to be.
        look: How many steps have looked before; alike on all ranks.
    """
    factor = float(factor_of(data.rank, data.size)) if data.size > 1 else 0.0
    bits = bits_of(grads if factor else [], device, look=look).add_(shapes)
    return bits.to(torch.float64).mul_(factor).reshape(1)


def bits_of(grads: Sequence[Tensor | None], device: torch.device, *, look: int) -> Tensor:
    """Returns a whole number below 2^24 that elements of gradients are summed up to, as bits; scalar, int64.

    A gradient of zeros adds nothing, so that it is the same as None.

    Args:
        grads: Of any shapes, dtypes and devices.
        device: Where it is to be.
        look: How many steps have looked before, by which all elements are looked at, or which.
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    turn, number = divmod(look, max(1, len(grads)))
    for grad in grads if look < _WHOLE_LOOKS else grads[number : number + 1]:
        if grad is None or not grad.numel():
            continue
        flat = values_of_gradient(grad.detach()).reshape(-1)
        if look >= _WHOLE_LOOKS:
            stride = max(1, flat.numel() // _LOOKED_AT)
            flat = flat[turn % stride :: stride].contiguous()
        found += flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64).to(device)
    return found.remainder_(_PRIME)


def not_averaged(data: Group) -> RuntimeError:
    """What a step raises whose gradients are not the averages that they are taken for."""
    return RuntimeError(
        f"expected the ranks {list(data.ranks)} to have the same averaged gradients when the last backward pass ended, "
        "but they have others, or other parameters: wrap the model in DistributedDataParallel, ShardedDataParallel or "
        "fully_shard over these ranks; for a pipeline or tensor parallelism pass AdaScale(..., process_group=the ranks "
        "with other data, model_parallel_group=those with other parts of the model); and where gradients are averaged "
        "by hand after backward(), call optimizer.unhook() and the steps have the last gain"
    )
