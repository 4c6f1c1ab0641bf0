"""The squares of all gradients of a backward pass: long ones are read when they come, and a call adds all of them up.

A model has hundreds of gradients, many of them short, and between two layers' products each call of torch costs some
ten times what it costs in a loop. So a short gradient is copied, by one call, and read with the others when the pass is
over; of long ones norms of rows are written side by side. None is kept itself, unless it stays as it is: autograd would
have to copy what it can take now, and whoever has made a gradient may use its memory again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scale_adascale.squares import PIECE, sum_of_squares, values_of_gradient

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
