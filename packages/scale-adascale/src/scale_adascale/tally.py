"""The squares of all gradients of a backward pass: each is read by one call, and a few calls add all of them up.

A model has hundreds of gradients, most of them small, so that what is computed beside the reading itself would cost as
much as the reading. So norms of rows are written side by side, and what becomes of them waits until the pass is over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scale_adascale.squares import PIECE, sum_of_squares, values_of_gradient


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
        self._device = device
        self._places: dict[int, _Place] = {}  # by number
        self._taken: list[int] = []
        self._added: Tensor | None = None
        self._num = num
        self._planned_for: list[int] = []
        self._numbers = self._lengths = torch.zeros(0, dtype=torch.int64, device=device)

    def take(self, number: int, gradient: Tensor) -> None:
        """Takes a gradient, the only one of its number until `clear`.

        Args:
            number: From 0 to k - 1.
            gradient: As in `sum_of_squares`, without a graph.
        """
        is_plain = gradient.layout is torch.strided and not gradient.is_complex()
        values = gradient if is_plain else values_of_gradient(gradient)
        place = self._places.get(number)
        if place is None or place.numel != values.numel() or place.dtype is not values.dtype:
            place, self._planned_for = _Place(values), []
            self._places[number] = place
        norm, rows, rest = torch.linalg.vector_norm, place.rows, place.rest
        if not rest:
            norm(values.reshape(rows, PIECE), dim=1, dtype=place.wider, out=place.of_rows)
        elif not rows:
            norm(values.reshape(1, rest), dim=1, dtype=torch.float64, out=place.of_rest)
        else:
            flat = values.reshape(-1)
            norm(flat[:-rest].view(rows, PIECE), dim=1, dtype=place.wider, out=place.of_rows)
            norm(flat[-rest:].view(1, rest), dim=1, dtype=torch.float64, out=place.of_rest)
        self._taken.append(number)

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
        taken = sorted(self._taken)
        if taken:
            if taken != self._planned_for:
                lengths = [self._places[number].rows + bool(self._places[number].rest) for number in taken]
                self._lengths = torch.tensor(lengths).to(self._device, non_blocking=True)
                self._numbers = torch.tensor(taken).to(self._device, non_blocking=True)
                self._planned_for = taken
            norms = torch.cat([each for number in taken for each in self._places[number].norms]).double()
            # Unchecked, since the device would have to be waited for; the lengths are those of what was put there.
            sums = torch.segment_reduce(norms.mul_(norms), "sum", lengths=self._lengths, unsafe=True)
            if len(taken) == self._num and self._added is None:
                return sums
        found = torch.zeros(self._num, dtype=torch.float64, device=self._device) if self._added is None else self._added
        return found.index_add(0, self._numbers, sums) if taken else found
