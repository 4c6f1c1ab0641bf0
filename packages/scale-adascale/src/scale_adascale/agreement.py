"""Whether ranks with other data really average their gradients, asked by one number in the sum that is sent anyway.

Of a gradient that all ranks should have alike each rank multiplies some bits by a whole number of its own, and these
numbers sum up to zero. So does the product, if all have the same; all of it is exact in fp64. Where nobody averages
gradients, or does so after the backward pass, or ranks have other parts of the model, it is another number.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from scale_adascale.squares import values_of_gradient
from scale_core.group import Group
from scale_core.shard import full_shape

_LOOKED_AT = 256  # elements: where gradients are not averaged, all of them differ
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def factor_of(rank: int, size: int) -> int:
    """Returns a whole number for each rank, at most 250 either way; those of all ranks sum up to zero."""

    def place(number: int) -> int:
        return (7 * number * number + 3 * number) % 251

    return place(rank) - place((rank - 1) % size)


def fingerprint(params: Sequence[Tensor]) -> int:
    """Returns 16 bits that are equal where the whole parameters have the same shapes in the same order."""
    return zlib.crc32(repr([tuple(full_shape(param)) for param in params]).encode()) & 0xFFFF


def own_part(data: Group, shapes: int, grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns this rank's summand, [1], fp64.

    Args:
        data: The ranks that have other data.
        shapes: The fingerprint of the parameters.
        grads: What all of them should have alike.
        device: Where it is to be.
    """
    factor = float(factor_of(data.rank, data.size)) if data.size > 1 else 0.0
    part = torch.full((1,), factor * shapes, dtype=torch.float64, device=device)
    first = next((grad for grad in grads if grad is not None and grad.numel()), None)
    return part if first is None or not factor else part + factor * bits_of(first).to(device)


def bits_of(grad: Tensor) -> Tensor:
    """Returns a whole number below 2^24 that some bits of a gradient are summed up to; scalar, fp64."""
    flat = values_of_gradient(grad).reshape(-1)[:_LOOKED_AT].contiguous()
    numbers = flat.view(_INTEGERS[flat.element_size()]).long()
    return ((numbers ^ (numbers >> 16)) & 0xFFFF).sum().double()


def not_averaged(data: Group) -> RuntimeError:
    """What a step raises whose gradients are not the averages that they are taken for."""
    return RuntimeError(
        f"expected the ranks {list(data.ranks)} to have the same averaged gradients when the last backward pass ended, "
        "but they have others, or other parameters: wrap the model in DistributedDataParallel, ShardedDataParallel or "
        "fully_shard over these ranks; for a pipeline or tensor parallelism pass AdaScale(..., process_group=the ranks "
        "with other data, model_parallel_group=those with other parts of the model); and where gradients are averaged "
        "by hand after backward(), call optimizer.unhook() and the steps have the last gain"
    )
