"""Pieces of a sequence that are multiplied while others are on their way.

Each rank has a part of the sequence, and each part is cut into pieces. In round r, each rank sends its r-th piece to
all others; or it sends each of them a summand of their r-th piece. All rounds are begun as early as can be, and what
needs nobody else is multiplied in the meantime. A step reads: start the transfers, multiply, wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather, all_to_all
from scale_core.comm.group import Group
from scale_tp.comm import Coming, Purpose, add_up, as_it_is, tag_of
from scale_tp.split import even_sizes


class Place(NamedTuple):
    """Some positions of a sequence: the first one, and how many."""

    start: int
    length: int


class Cut(NamedTuple):
    """How a sequence is cut.

    Attributes:
        group: The ranks.
        dim: The dimension of the sequence, counted from the first.
        sizes: How many positions each rank has.
        pieces: Into how many each rank's part is cut; some are empty where a part has fewer positions.
    """

    group: Group
    dim: int
    sizes: tuple[int, ...]
    pieces: int

    @property
    def own(self) -> Place:
        """This rank's part, in the whole sequence."""
        rank = self.group.rank
        return Place(sum(self.sizes[:rank]), self.sizes[rank])

    def at(self, whole: Tensor, place: Place) -> Tensor:
        """Some positions of a tensor: a view."""
        return whole.narrow(self.dim, place.start, place.length)

    def shape(self, like: tuple[int, ...], length: int, features: int | None = None) -> tuple[int, ...]:
        """A shape as another one, with so many positions; the last dimension may be another as well."""
        whole = (*like[: self.dim], length, *like[self.dim + 1 :])
        return whole if features is None else (*whole[:-1], features)


@functools.lru_cache(maxsize=4096)
def places(sizes: tuple[int, ...], pieces: int, turn: int) -> tuple[Place, ...]:
    """Returns where each rank's piece of a round stands in the whole sequence.

    Example:
        >>> [[tuple(place) for place in places((5, 2), 2, turn)] for turn in range(2)]
        [[(0, 3), (5, 1)], [(3, 2), (6, 1)]]
    """
    found, first = [], 0
    for size in sizes:
        lengths = even_sizes(size, pieces)
        found.append(Place(first + sum(lengths[:turn]), lengths[turn]))
        first += size
    return tuple(found)


def multiply_gathered(cut: Cut, part: Tensor, act: Callable[[Place, Tensor], None]) -> None:
    """Calls act(place in the whole sequence, positions) for all of it: what this rank has first, then what comes.

    Args:
        cut: How the sequence is cut.
        part: [..., positions of this rank, ...].
        act: Gets [..., positions, ...].

    Raises:
        TransferError: A rank did not take part.
    """
    coming = [_begin_gather(cut, part, turn) for turn in range(cut.pieces)] if cut.group.size > 1 else []
    if cut.own.length:
        act(cut.own, part)  # While the others' pieces are on their way.
    for turn, pending in enumerate(coming):
        for place, piece in _others(cut, part, turn, pending):
            act(place, piece)


def multiply_scattered(cut: Cut, like: Tensor, act: Callable[[Place, Tensor], None]) -> Tensor:
    """Returns this rank's part of the sum of what all ranks compute, piece by piece.

    Args:
        cut: How the sequence is cut.
        like: [..., any number of positions, ...], of the shape and dtype of what is summed.
        act: Called as act(place in the whole sequence, [..., positions, ...]), it fills the latter with this rank's
            summand.

    Returns:
        [..., positions of this rank, ...]; summands are added in rank order, in fp32 at least.

    Raises:
        TransferError: A rank did not take part.
    """
    group, shape = cut.group, tuple(like.shape)
    coming = [_begin_scatter(cut, like, turn, act) for turn in range(cut.pieces)] if group.size > 1 else []
    mine = like.new_empty(cut.shape(shape, cut.own.length))
    if cut.own.length:
        act(cut.own, mine)  # While the summands are on their way.
    for turn, pending in enumerate(coming):
        received, place = pending.wait(), places(cut.sizes, cut.pieces, turn)[group.rank]
        here = cut.at(mine, Place(place.start - cut.own.start, place.length))
        others = list(received.view(group.size - 1, *here.shape))
        here.copy_(add_up([*others[: group.rank], here, *others[group.rank :]]))
    return mine


def _begin_gather(cut: Cut, part: Tensor, turn: int) -> Coming:
    group, row = cut.group, _row(cut, part)
    here = places(cut.sizes, cut.pieces, turn)
    numbers = [place.length * row for place in here]
    piece = cut.at(part, Place(here[group.rank].start - cut.own.start, here[group.rank].length)).reshape(-1)
    tag = tag_of("piece to all", turn, cut.dim, cut.sizes, part.dtype, cut.shape(tuple(part.shape), 0))
    alike = numbers if len(set(numbers)) > 1 else None
    pending = all_gather(part.new_empty(sum(numbers)), piece.contiguous(), group, sizes=alike, tag=tag)
    return Coming(Purpose("a gathering of pieces", tuple(part.shape), part.dtype, group), pending, as_it_is)


def _others(cut: Cut, part: Tensor, turn: int, coming: Coming) -> Iterator[tuple[Place, Tensor]]:
    """The others' pieces of a round, once they are here."""
    here = places(cut.sizes, cut.pieces, turn)
    found = coming.wait().split([place.length * _row(cut, part) for place in here])
    for rank, (place, flat) in enumerate(zip(here, found, strict=True)):
        if rank != cut.group.rank and place.length:
            yield place, flat.view(cut.shape(tuple(part.shape), place.length))


def _begin_scatter(cut: Cut, like: Tensor, turn: int, act: Callable[[Place, Tensor], None]) -> Coming:
    group, row, shape = cut.group, _row(cut, like), tuple(like.shape)
    here = places(cut.sizes, cut.pieces, turn)
    sent = [0 if rank == group.rank else place.length * row for rank, place in enumerate(here)]
    received = [0 if rank == group.rank else here[group.rank].length * row for rank in range(group.size)]
    given = like.new_empty(sum(sent))
    for rank, (place, flat) in enumerate(zip(here, given.split(sent), strict=True)):
        if rank != group.rank and place.length:
            act(place, flat.view(cut.shape(shape, place.length)))
    tag = tag_of("summand of a piece", turn, cut.dim, cut.sizes, like.dtype, cut.shape(shape, 0))
    pending = all_to_all(given.new_empty(sum(received)), given, group, output_sizes=received, input_sizes=sent, tag=tag)
    return Coming(Purpose("a sum of pieces", cut.shape(shape, sum(cut.sizes)), like.dtype, group), pending, as_it_is)


def _row(cut: Cut, like: Tensor) -> int:
    """How many elements one position has."""
    return torch.Size(cut.shape(tuple(like.shape), 1)).numel()


def rows_of(tensor: Tensor) -> Tensor:
    """[..., features] as [rows, features]."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] else tensor.new_empty(tensor.shape[:-1].numel(), 0)


def multiply(rows: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fills [..., outputs] with [rows, features] times [features, outputs], and a bias."""
    into = out.view(rows.shape[0], factor.shape[1]) if out.is_contiguous() else None
    if bias is None:
        found = torch.mm(rows, factor, out=into)
    else:
        found = torch.addmm(bias, rows, factor, out=into)
    if into is None:
        out.copy_(found.view(out.shape))


def dtype_of_products(input: Tensor, weights: Sequence[Tensor]) -> torch.dtype:
    """What is multiplied in: the dtype of all, or that of autocast.

    Raises:
        ValueError: They have several.
    """
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    for weight in weights:
        if weight.dtype != input.dtype:
            raise ValueError(f"expected a weight of the input's dtype, {input.dtype}, got {weight.dtype}: call .to()")
    return input.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """No autocast: what is multiplied has its dtype already."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
