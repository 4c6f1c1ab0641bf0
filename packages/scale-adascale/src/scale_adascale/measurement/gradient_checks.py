"""Whether gradients are those that were measured: unchanged between passes, and the same averages on all ranks.

Both are known without a look at most values. A tensor is itself as long as it lives, and counts its changes; ranks
compare a checksum of bits. For Adam, gradients also have to come tensor by tensor.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from scale_adascale.squared_norms import stored_values
from scale_core import compat
from scale_core.comm.group import Group
from scale_core.shard import full_shape, title_of
from scale_core.state.param_ownership import flat_buffer_of


class GradVersion(NamedTuple):
    """One gradient as it was."""

    tensor: weakref.ref[Tensor]
    address: int
    version: int  # how many times it was written to

    def matches(self, grad: Tensor) -> bool:
        """Whether a gradient is that one, unchanged."""
        return self.tensor() is grad and (self.address, self.version) == _address_and_version(grad)


# The gradients of the same parameters, in the same order, None where there is none; and the versions they have had.
Grads = Sequence[Tensor | None]
Versions = Sequence[GradVersion | None]


def versions_of(grads: Grads) -> Versions:
    """Gradients as they are now."""
    return [
        None
        if grad is None or grad.layout not in (torch.strided, torch.sparse_coo)
        else GradVersion(weakref.ref(grad), *_address_and_version(grad))
        for grad in grads
    ]


def are_zero(grads: Grads, zeros: Versions = ()) -> bool:
    """Whether all are None, known `zeros`, or zero; waits for the device if values have to be read."""
    pairs = zip_longest(grads, zeros)
    unknown = [grad for grad, zero in pairs if grad is not None and (zero is None or not zero.matches(grad))]
    if not unknown:
        return True
    counts = [torch.count_nonzero(stored_values(grad.detach())).to(unknown[0].device) for grad in unknown]
    (number,) = compat.values_of(torch.stack(counts).sum().double().reshape(1), simulated=[0.0])
    return not number


def were_changed(before: Versions, grads: Grads, *, alone: bool, pass_failed: bool) -> bool:
    """Whether one was changed or cleared; a pass that has failed may have added to some.

    Where this rank is not `alone`, a reducer of gradients may write to them between passes.
    """
    for last, now in zip(before, grads, strict=False):
        if last is None:
            is_changed = pass_failed and now is not None
        else:
            is_changed = now is None or ((alone or pass_failed) and not last.matches(now))
        if is_changed:
            return True
    return False


def has_new(grads: Grads, zeros: Versions, of_step: Versions = ()) -> bool:
    """Whether any is neither one of the zeros that were written nor that of the last step."""
    return any(
        now is not None and not any(snapshot is not None and snapshot.matches(now) for snapshot in (zero, stepped))
        for now, zero, stepped in zip_longest(grads, zeros, of_step)
    )


def _address_and_version(grad: Tensor) -> tuple[int, int]:
    values = grad if grad.layout is torch.strided else grad._values()
    return values.data_ptr(), grad._version


def check_not_flattened(params: Iterable[Tensor]) -> None:
    """Raises ValueError for a flat parameter, where each tensor's gradient is divided by its own second moments."""
    for param in params:
        buffer = flat_buffer_of(param)
        if buffer is not None:
            raise ValueError(
                f"expected each parameter as a tensor of its own, got {title_of(param)}, which holds "
                f"{len(buffer.names)}, as '{buffer.names[0]}': AdaScale divides the gradient of each by the root of "
                "its own mean second moment, as Adam uses it, and of a flat one the gain would be another. Shard the "
                "model with flatten_parameters=False, or measure gradients as they are by "
                "AdaScale(..., options=AdaScaleOptions(preconditioned=False))"
            )


# Whether ranks with other data really average their gradients, by one number in the sum that is sent anyway.
#
# Of gradients that should be equal on all ranks each rank adds up bits, and multiplies the sum by an integer of its
# own; these numbers sum up to zero. So do the products, if all have the same; all of it is exact in fp64. Where
# gradients are not averaged, or only after the backward pass, or ranks have other parts of the model, it is almost
# surely another number: sums that differ by a multiple of 2^24 - 3 pass for equal.
#
# A gradient may have zeros wherever one looks, as that of an embedding has, and only one layer may be left out of the
# gradients that averages. So the first steps look at all elements of all gradients, and later ones at some of one
# gradient, each step at others. If no gradient is averaged any more, that is found in the same step even so, unless
# these are zeros there.

_NUM_SAMPLED = 32  # elements of one gradient, where not all of all are looked at
_NUM_FULL_STEPS = 8  # A scaler may have to leave out the first ones, whose gradients are no numbers.
_PRIME = 2**24 - 3  # so that each bit counts
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rank_factor(rank: int, size: int) -> int:
    """An integer for each rank, at most 250 either way; those of all ranks sum up to zero."""

    def term(number: int) -> int:
        return (7 * number * number + 3 * number) % 251

    return term(rank) - term((rank - 1) % size)


def fingerprint(params: Sequence[Tensor]) -> int:
    """16 bits that are equal where the full parameters have the same shapes in the same order."""
    return zlib.crc32(repr([tuple(full_shape(param)) for param in params]).encode()) & 0xFFFF


def checksum_term(
    data: Group, shapes: int, grads: Sequence[Tensor | None], device: torch.device, *, step: int
) -> Tensor:
    """This rank's summand, [1], fp64: of the parameters' fingerprint, and of gradients that are equal on `data`."""
    factor = float(rank_factor(data.rank, data.size)) if data.size > 1 else 0.0
    bits = bit_checksum(grads if factor else [], device, step=step).add_(shapes)
    return bits.to(torch.float64).mul_(factor).reshape(1)


def bit_checksum(grads: Sequence[Tensor | None], device: torch.device, *, step: int) -> Tensor:
    """An integer below 2^24, the sum of the bits of gradients of any kind; scalar, int64. Zeros are as None.

    Which elements are read depends on the step's number, which is equal on all ranks.
    """
    checksum = torch.zeros((), dtype=torch.int64, device=device)
    turn, index = divmod(step, max(1, len(grads)))
    for grad in grads if step < _NUM_FULL_STEPS else grads[index : index + 1]:
        if grad is None or not grad.numel():
            continue
        flat = stored_values(grad.detach()).reshape(-1)
        if step >= _NUM_FULL_STEPS:
            stride = max(1, flat.numel() // _NUM_SAMPLED)
            flat = flat[turn % stride :: stride].contiguous()
        checksum += flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64).to(device)
    return checksum.remainder_(_PRIME)
