"""The sum of the squares of a gradient, on its device and right to one unit in the last place of fp32.

That is so with any number of elements. Where there are more than some, each below 1e-20 or above 1e17, fp32 can't hold
the squares of 1024 of them: then it is 0 or inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

# So many squares are added up in fp32 at a time; sums of more lose digits, which differences of sums would be made of.
PIECE = 1024


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Returns |gradient|^2; scalar, fp64, on its device.

    Args:
        gradient: Of any shape, floating point or complex, dense or sparse.
    """
    flat = values_of_gradient(gradient).reshape(-1)
    if flat.numel() <= PIECE or flat.dtype == torch.float64:
        return _square(flat)
    rest = flat.numel() % PIECE
    dtype = None if flat.dtype == torch.float32 else torch.float32
    pieces = (flat[:-rest] if rest else flat).view(-1, PIECE)
    norms = torch.linalg.vector_norm(pieces, dim=1, dtype=dtype).double()
    total = torch.dot(norms, norms)
    return total + _square(flat[-rest:]) if rest else total


def _square(flat: Tensor) -> Tensor:
    wide = flat.double()
    return torch.dot(wide, wide)


def part_of(gradient: Tensor, number: int, parts: int) -> Tensor:
    """Returns one of so many even parts of a gradient; all of them together have its elements once.

    Args:
        gradient: As in `sum_of_squares`.
        number: Which part, from 0.
        parts: How many there are.
    """
    flat = values_of_gradient(gradient).reshape(-1)
    first, last = flat.numel() * number // parts, flat.numel() * (number + 1) // parts
    return flat[first:last]


def values_of_gradient(gradient: Tensor) -> Tensor:
    """The numbers that a gradient is made of: of a sparse one those that it has, of a complex one both parts."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _values_in_common(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The values of two gradients, one of which is sparse at least, at the places that both have, in one order."""
    if one.layout is torch.strided or other.layout is torch.strided:
        return tuple(each if each.layout is torch.strided else each.to_dense() for each in (one, other))  # type: ignore[return-value]
    one, other = one.coalesce(), other.coalesce()
    places = [torch.zeros_like(each.indices()[0]) for each in (one, other)]
    for dim, size in enumerate(one.shape[: one.sparse_dim()]):
        places = [place * size + each.indices()[dim] for place, each in zip(places, (one, other), strict=True)]
    first, second = (torch.isin(place, elements) for place, elements in (places, places[::-1]))
    return one.values()[first], other.values()[second]  # Coalesced places are sorted.


def inner_product(one: Tensor, other: Tensor) -> Tensor:
    """Returns the sum of the products of two gradients of one shape and dtype; scalar, fp64."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = _values_in_common(one, other)
    first, second = values_of_gradient(one).reshape(-1), values_of_gradient(other).reshape(-1)
    whole = first.numel() - first.numel() % PIECE
    dtype = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(dtype), second.to(dtype)
    products: Tensor = torch.linalg.vecdot(first[:whole].view(-1, PIECE), second[:whole].view(-1, PIECE))
    return products.sum(dtype=torch.float64) + torch.dot(first[whole:].double(), second[whole:].double())
