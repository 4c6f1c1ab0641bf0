"""Whether ranks with other data really average their gradients, asked by one number in the sum that is sent anyway.

Of gradients that all ranks should have alike each rank adds up bits, and multiplies the sum by a whole number of its
own; these numbers sum up to zero. So do the products, if all have the same; all of it is exact in fp64. Where somebody
does not average gradients, or does so after the backward pass, or ranks have other parts of the model, it is almost
surely another number: sums that differ by a multiple of 2^24 - 3 are not told apart.

A gradient may have zeros wherever one looks, as that of an embedding has, and only one layer may be left out of what
averages. So the first steps look at all elements of all gradients, and later ones at some of one gradient, each step at
others. Whoever stops to average all of them is found in the same step even so, unless these are zeros there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from scale_adascale.squares import values_of_gradient
from scale_core.group import Group
from scale_core.shard import full_shape

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
