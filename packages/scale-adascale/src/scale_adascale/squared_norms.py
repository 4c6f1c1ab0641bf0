"""The squares of all gradients of a backward pass: long ones are read when they come, and a call adds all of them up.

A model has hundreds of gradients, many of them short, and between two layers' products each call of torch costs some
ten times what it costs in a loop. So a short gradient is copied, by one call, and read with the others when the pass is
over; of long ones norms of rows are written side by side. None is kept itself, unless it stays as it is: autograd would
have to copy what it can take now, and whoever has made a gradient may use its memory again.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The sum of the squares of a gradient, on its device and right to one unit in the last place of fp32.
#
# That is so with any number of elements. Where there are more than some, each below 1e-20 or above 1e17, fp32 can't
# hold the squares of 1024 of them: then it is 0 or inf.

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


_SHORT = 1 << 12
"""Elements up to which a gradient is copied rather than read at once."""


class _Place:
    """Where the norms of one gradient are written: those of whole rows, [rows], and that of the rest, [1], fp64.

    Args:
        values: A gradient, of real numbers.
    """

    def __init__(self, values: Tensor) -> None:
        self.numel, self.dtype = values.numel(), values.dtype
        self.rows, self.rest = divmod(self.numel, PIECE)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.wider = None if wide is self.dtype else wide
        self.of_rows = torch.empty(self.rows, dtype=wide, device=values.device)
        self.of_rest = torch.empty(1, dtype=torch.float64, device=values.device)
        self.norms = [self.of_rows, self.of_rest] if self.rest else [self.of_rows]


class Tally:
    """The squares of numbered gradients on one device.

    What gradients are read into lives as long as this: a new tensor for each would keep the allocator from using freed
    gradients again.

    Args:
        num: How many numbers there are, k.
        device: That of the gradients.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        self._num, self._device = num, device
        self._places: dict[int, _Place] = {}  # by number
        self._copies: dict[int, Tensor] = {}  # of short gradients, by number
        self._taken: list[tuple[int, list[Tensor]]] = []  # Numbers, and what has the norm of each.
        self._added: Tensor | None = None
        self._indexed: list[int] = []
        self._index = torch.zeros(0, dtype=torch.int64, device=device)

    def take(self, number: int, gradient: Tensor, *, stays: bool = False) -> None:
        """Takes a gradient, the only one of its number until `clear`.

        Args:
            number: From 0 to k - 1.
            gradient: As in `sum_of_squares`, without a graph.
            stays: Nobody changes it before `squares`.
        """
        is_plain = gradient.layout is torch.strided and not gradient.is_complex()
        if is_plain and gradient.numel() <= _SHORT:
            self._taken.append((number, [gradient if stays else self._copied(number, gradient)]))
            return
        values = gradient if is_plain else values_of_gradient(gradient)
        place = self._places.get(number)
        if place is None or place.numel != values.numel() or place.dtype is not values.dtype:
            place = self._places[number] = _Place(values)
        norm, rows, rest = torch.linalg.vector_norm, place.rows, place.rest
        if not rest:
            norm(values.reshape(rows, PIECE), dim=1, dtype=place.wider, out=place.of_rows)
        elif not rows:
            norm(values.reshape(1, rest), dim=1, dtype=torch.float64, out=place.of_rest)
        else:
            flat = values.reshape(-1)
            norm(flat[:-rest].view(rows, PIECE), dim=1, dtype=place.wider, out=place.of_rows)
            norm(flat[-rest:].view(1, rest), dim=1, dtype=torch.float64, out=place.of_rest)
        self._taken.append((number, place.norms))

    def _copied(self, number: int, gradient: Tensor) -> Tensor:
        copy = self._copies.get(number)
        if copy is None or copy.shape != gradient.shape or copy.dtype is not gradient.dtype:
            copy = self._copies[number] = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        return copy.copy_(gradient)

    def add(self, number: int, gradient: Tensor) -> None:
        """Adds the square of a gradient to those of its number, as often as it comes until `clear`."""
        if self._added is None:
            self._added = torch.zeros(self._num, dtype=torch.float64, device=self._device)
        self._added[number] += sum_of_squares(gradient)

    def clear(self) -> None:
        """Forgets all gradients."""
        self._taken, self._added = [], None

    def squares(self) -> Tensor:
        """Returns the squares, [k], fp64; 0 of numbers that had no gradient."""
        found = torch.zeros(self._num, dtype=torch.float64, device=self._device) if self._added is None else self._added
        if not self._taken:
            return found
        numbers = [number for number, norms in self._taken for _ in norms]
        if numbers != self._indexed:
            self._indexed, self._index = numbers, torch.tensor(numbers).to(self._device, non_blocking=True)
        # The norm of rows' norms is that of all.
        norms = torch.stack(torch._foreach_norm([each for _, norms in self._taken for each in norms], 2, torch.float64))
        return found.index_add(0, self._index, norms.mul_(norms))
