"""Squared norms of gradients in fp64: of one gradient, of a part of it, and products of two."""

from __future__ import annotations

import torch
from torch import Tensor

# So many squares are added up in fp32 at a time; sums of more lose digits, which differences of sums would be made of.
# The result is right to one unit in the last place of fp32 with any number of elements. Where more than CHUNK elements
# are all below 1e-20 or above 1e17, fp32 can't hold the squares of CHUNK of them: then it is 0 or inf.
CHUNK = 1024


def sum_of_squares(gradient: Tensor) -> Tensor:
    """|gradient|^2, scalar, fp64, on its device; the gradient may be of any shape, complex or sparse."""
    flat = stored_values(gradient).reshape(-1)
    if flat.numel() <= CHUNK or flat.dtype == torch.float64:
        return _square(flat)
    remainder = flat.numel() % CHUNK
    dtype = None if flat.dtype == torch.float32 else torch.float32
    rows = (flat[:-remainder] if remainder else flat).view(-1, CHUNK)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double()
    total = torch.dot(norms, norms)
    return total + _square(flat[-remainder:]) if remainder else total


def _square(flat: Tensor) -> Tensor:
    wide = flat.double()
    return torch.dot(wide, wide)


def part_of(gradient: Tensor, number: int, parts: int) -> Tensor:
    """Part `number` of so many even parts of a gradient, flat; all of them together have each element once."""
    flat = stored_values(gradient).reshape(-1)
    first, last = flat.numel() * number // parts, flat.numel() * (number + 1) // parts
    return flat[first:last]


def stored_values(gradient: Tensor) -> Tensor:
    """The real numbers that a gradient stores: the values of a sparse one, both parts of a complex one."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def inner_product(one: Tensor, other: Tensor) -> Tensor:
    """The sum of the products of two gradients of one shape and dtype; scalar, fp64."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = _common_values(one, other)
    first, second = stored_values(one).reshape(-1), stored_values(other).reshape(-1)
    full = first.numel() - first.numel() % CHUNK
    dtype = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(dtype), second.to(dtype)
    products: Tensor = torch.linalg.vecdot(first[:full].view(-1, CHUNK), second[:full].view(-1, CHUNK))
    return products.sum(dtype=torch.float64) + torch.dot(first[full:].double(), second[full:].double())


def _common_values(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The values of two gradients, one of them sparse at least, at the indices that both store, in one order."""
    if one.layout is torch.strided or other.layout is torch.strided:
        return tuple(tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in (one, other))  # type: ignore[return-value]
    one, other = one.coalesce(), other.coalesce()
    offsets = [torch.zeros_like(tensor.indices()[0]) for tensor in (one, other)]
    for dim, size in enumerate(one.shape[: one.sparse_dim()]):
        offsets = [offset * size + tensor.indices()[dim] for offset, tensor in zip(offsets, (one, other), strict=True)]
    first, second = (torch.isin(offset, elements) for offset, elements in (offsets, offsets[::-1]))
    return one.values()[first], other.values()[second]  # Coalesced indices are sorted.
