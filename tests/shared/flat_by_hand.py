"""A flat buffer of parameters of all shapes, moved through its life by hand, and what its gradients must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DtypePolicy
from scale_core.flat.layout import FlatLayout

SHAPES: dict[str, tuple[int, ...]] = {"weight": (5, 3), "bias": (5,), "scale": (), "empty": (0, 2), "prime": (7,)}


def whole_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES.values()]


def make(
    group: Group, dtypes: DtypePolicy | None = None, *, flatten: bool = False, params: Sequence[Tensor] | None = None
) -> FlatBuffer:
    params = params or whole_params()
    names = list(SHAPES)[: len(params)]
    layout = FlatLayout.plan(names, [tuple(param.shape) for param in params], group.size)
    return FlatBuffer(names, params, layout, group, dtypes or DtypePolicy(), flatten)


def gathered(buffer: FlatBuffer) -> list[Tensor]:
    buffer.gather(tag=1 << 21)
    buffer.wait_gathered()
    return [whole.detach() for whole in buffer.unsharded_params]


def local_grad(rank: int, index: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * rank + index))


def backward(buffer: FlatBuffer, used: Sequence[int], rank: int, *, accumulate: bool = False) -> None:
    """Gives every used whole the gradient that `rank` has for it, by autograd."""
    gathered(buffer)
    for i in used:
        (buffer.unsharded_params[i].float() * local_grad(rank, i, buffer.unsharded_params[i].shape)).sum().backward()
    for index in used:
        buffer.gradient.accumulate(index, wide=accumulate)
        assert buffer.unsharded_params[index].grad is None
    buffer.release()


def pieces_of(buffer: FlatBuffer, wholes: Sequence[Tensor]) -> list[Tensor]:
    return [
        whole.reshape(-1)[span.start : span.stop].view(span.shape)
        for whole, span in zip(wholes, buffer.spans, strict=True)
    ]


def average(world: int, index: int, shape: tuple[int, ...]) -> Tensor:
    total = local_grad(0, index, shape)
    for rank in range(1, world):
        total = total + local_grad(rank, index, shape)
    return total / world
