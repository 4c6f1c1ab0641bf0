"""Linear layers whose communication runs beside their own matrix product, piece by piece.

Where a sequence parallel layer gathers its input, the product of a part can begin as soon as that part is there; where
it scatters a sum, a part can be sent as soon as it is computed. So the work is cut into pieces along the sequence: one
for each rank's part, and each of those into `pieces`. While one is multiplied, the next one is on its way. The numbers
are those of the layers without overlap, but for the order in which a matrix product adds what it multiplies, where the
kernel's choice depends on the number of rows; and in half precision each piece's share of a weight's gradient is
rounded, before all of them are added in fp32. (Decomposed collectives: Wang et al., ASPLOS 2023.)

A step reads: start the next transfer, multiply, wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.collectives import Pending, all_to_all
from scale_core.events import identity
from scale_core.group import Group, GroupLike
from scale_core.messages import UNIT_TAGS
from scale_tp.groups import layer_group
from scale_tp.sequence_parts import parts_held
from scale_tp.split_sizes import even_sizes


def gather_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    group: GroupLike = None,
    *,
    sizes: Sequence[int] | None = None,
    pieces: int = 1,
) -> tuple[Tensor, ...]:
    """Multiplies the whole sequence, of which each rank has a part, with several weights, as its parts arrive.

    What a column parallel layer does under sequence parallelism; queries, keys and values take one gather together. In
    the backward pass the parts of the input's gradient are sent as they are computed, and the input is gathered once
    more in place of being kept.

    Args:
        input: [positions of this rank, ..., features]: the first dimension is the sequence.
        weights: [outputs of this rank, features] each.
        group: The ranks; None is the model axis.
        sizes: How many positions each rank has; None asks where it is not known.
        pieces: Into how many each rank's part is cut.

    Returns:
        For each weight [all positions, ..., outputs of this rank].

    Raises:
        TransferError: A rank did not take part.
        ValueError: `pieces` is below 1, or `sizes` do not fit.
    """
    ranks = layer_group(group)
    _check_pieces(pieces)
    known = parts_held(ranks, input.shape[0]) if sizes is None else tuple(sizes)
    if len(known) != ranks.size or known[ranks.rank] != input.shape[0]:
        raise ValueError(
            f"gather_linear: expected the sizes of {ranks.size} ranks, of which rank {ranks.rank} has the "
            f"{input.shape[0]} positions of its input, got {list(known)}"
        )
    found: tuple[Tensor, ...] = _GatherLinear.apply(_Cut(ranks, known, pieces), input, *weights)  # type: ignore[no-untyped-call]
    return found


def linear_scatter(
    input: Tensor,
    weight: Tensor,
    group: GroupLike = None,
    *,
    sizes: Sequence[int] | None = None,
    pieces: int = 1,
) -> Tensor:
    """Multiplies with a weight, and scatters the sum over the ranks along the sequence, part by part as it is computed.

    What a row parallel layer does under sequence parallelism. In the backward pass the gradient is gathered, and
    multiplied as its parts arrive.

    Args:
        input: [all positions, ..., features of this rank]: the first dimension is the sequence.
        weight: [outputs, features of this rank].
        group: The ranks; None is the model axis.
        sizes: How many positions each rank gets; None is as even as it can be.
        pieces: Into how many each rank's part is cut.

    Returns:
        [positions of this rank, ..., outputs]; summands are added in rank order, in fp32 at least.

    Raises:
        TransferError: A rank did not take part.
        ValueError: `pieces` is below 1, or `sizes` do not add up to the positions.
    """
    ranks = layer_group(group)
    _check_pieces(pieces)
    known = even_sizes(input.shape[0], ranks.size) if sizes is None else tuple(sizes)
    if len(known) != ranks.size or sum(known) != input.shape[0]:
        raise ValueError(
            f"linear_scatter: expected the parts of {ranks.size} ranks, which add up to {input.shape[0]} positions, "
            f"got {list(known)}"
        )
    found: Tensor = _LinearScatter.apply(_Cut(ranks, known, pieces), input, weight)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Cut:
    """How a sequence is cut: into the ranks' parts, and each of these into pieces.

    In round r of the rounds, which are as many as pieces, each rank sends its r-th piece to all others, or gets from
    each of them a summand of its own r-th piece.

    Attributes:
        group: The ranks.
        sizes: How many positions each has.
        pieces: Into how many each part is cut.
    """

    group: Group
    sizes: tuple[int, ...]
    pieces: int

    def places(self, turn: int) -> list[slice]:
        """By rank, the positions of the whole sequence that its piece of this round has."""
        found, first = [], 0
        for size in self.sizes:
            lengths = even_sizes(size, self.pieces)
            start = first + sum(lengths[:turn])
            found.append(slice(start, start + lengths[turn]))
            first += size
        return found

    def own(self, turn: int) -> slice:
        """Where this rank's piece of this round stands in its part."""
        place, first = self.places(turn)[self.group.rank], sum(self.sizes[: self.group.rank])
        return slice(place.start - first, place.stop - first)

    def gather(self, part: Tensor, turn: int) -> Arriving:
        """Starts to exchange everybody's piece of this round."""
        piece = part[self.own(turn)].reshape(-1)
        row = part.shape[1:].numel()
        numbers = [(place.stop - place.start) * row for place in self.places(turn)]
        sent = [0 if rank == self.group.rank else piece.numel() for rank in range(self.group.size)]
        received = [0 if rank == self.group.rank else number for rank, number in enumerate(numbers)]
        given = piece.repeat(self.group.size - 1) if self.group.size > 1 else piece[:0]
        return self._exchange(given, sent, received, f"gather {turn}", part)

    def scatter(self, summands: dict[int, Tensor], turn: int, like: Tensor) -> Arriving:
        """Starts to send each other rank this rank's summand of its piece, and to receive those of the own piece."""
        own = self.own(turn)
        row = like.shape[1:].numel()
        sent = [summands[rank].numel() if rank in summands else 0 for rank in range(self.group.size)]
        received = [0 if rank == self.group.rank else (own.stop - own.start) * row for rank in range(self.group.size)]
        parts = [summands[rank].reshape(-1) for rank in sorted(summands)]
        given = torch.cat(parts) if parts else like.new_empty(0)
        return self._exchange(given, sent, received, f"scatter {turn}", like)

    def _exchange(self, given: Tensor, sent: list[int], received: list[int], verb: str, like: Tensor) -> Arriving:
        tag = UNIT_TAGS[identity("overlap", verb, given.dtype, self.sizes, tuple(like.shape[1:])) % len(UNIT_TAGS)]
        pending = all_to_all(
            given.new_empty(sum(received)), given, self.group, output_sizes=received, input_sizes=sent, tag=tag
        )
        return Arriving(pending, received, tuple(like.shape[1:]))


@dataclass
class Arriving:
    """Pieces of other ranks that are on their way.

    Attributes:
        pending: The transfer.
        numbers: How many elements come from each rank.
        shape: Of one position.
    """

    pending: Pending
    numbers: list[int]
    shape: tuple[int, ...]

    def wait(self) -> dict[int, Tensor]:
        """Returns what each rank has sent, [positions, ...]."""
        parts = self.pending.wait().split(self.numbers)
        return {rank: part.view(-1, *self.shape) for rank, part in enumerate(parts) if part.numel()}  # Not one's own.


def _multiply_gathered(cut: _Cut, part: Tensor, act: Any) -> None:
    """Calls act(place in the whole sequence, [positions, ...]) with each piece of it: own ones, then as they come."""
    coming = cut.gather(part, 0)
    for turn in range(cut.pieces):
        following = cut.gather(part, turn + 1) if turn + 1 < cut.pieces else None
        places = cut.places(turn)
        act(places[cut.group.rank], part[cut.own(turn)])  # While the others' pieces are on their way.
        for rank, piece in coming.wait().items():
            act(places[rank], piece)
        if following is not None:
            coming = following


def _multiply_scattered(cut: _Cut, like: Tensor, act: Any) -> Tensor:
    """Calls act(place in the whole sequence) for each piece, for this rank's summand, and returns the sums of its part.

    Args:
        cut: How the sequence is cut.
        like: [any number of positions, ...], of the summands' shape and dtype.
        act: Returns the summand, [positions, ...].
    """
    rank = cut.group.rank
    total = like.new_empty((cut.sizes[rank], *like.shape[1:]))
    before: tuple[Arriving, slice, Tensor] | None = None
    for turn in range(cut.pieces):
        places = cut.places(turn)
        others = {peer: act(places[peer]) for peer in range(cut.group.size) if peer != rank}
        coming = cut.scatter(others, turn, like)
        mine = act(places[rank])  # While the summands are on their way.
        if before is not None:
            _add_up(total, rank, *before)
        before = coming, cut.own(turn), mine
    assert before is not None, "there is at least one round"
    _add_up(total, rank, *before)
    return total


def _add_up(total: Tensor, rank: int, coming: Arriving, place: slice, mine: Tensor) -> None:
    summands = {**coming.wait(), rank: mine}
    wide = torch.promote_types(mine.dtype, torch.float32)
    piece = torch.zeros(mine.shape, dtype=wide, device=mine.device)
    for number in sorted(summands):
        piece += summands[number]
    total[place] = piece


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: _Cut, part: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.cut = cut
        ctx.save_for_backward(part, *weights)
        whole = sum(cut.sizes)
        outputs = tuple(part.new_empty((whole, *part.shape[1:-1], weight.shape[0])) for weight in weights)

        def act(place: slice, piece: Tensor) -> None:
            for output, weight in zip(outputs, weights, strict=True):
                output[place] = piece @ weight.mT

        _multiply_gathered(cut, part, act)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, *weights = ctx.saved_tensors
        cut: _Cut = ctx.cut

        def summand(place: slice) -> Tensor:
            parts = [gradient[place] @ weight for gradient, weight in zip(gradients, weights, strict=True)]
            return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

        of_part = _multiply_scattered(cut, part, summand) if ctx.needs_input_grad[1] else None
        if not any(ctx.needs_input_grad[2:]):
            return (None, of_part, *[None] * len(weights))
        of_weights = [_wide_zeros(weight) for weight in weights]

        def add(place: slice, piece: Tensor) -> None:
            rows = piece.reshape(-1, piece.shape[-1])
            for of_weight, gradient in zip(of_weights, gradients, strict=True):
                _add_product(of_weight, gradient[place].reshape(-1, gradient.shape[-1]).mT, rows)

        _multiply_gathered(cut, part, add)
        return (None, of_part, *(found.to(weight.dtype) for found, weight in zip(of_weights, weights, strict=True)))


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: _Cut, input: Tensor, weight: Tensor) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(input, weight)
        like = input.new_empty((0, *input.shape[1:-1], weight.shape[0]))
        return _multiply_scattered(cut, like, lambda place: input[place] @ weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight = torch.empty_like(input), _wide_zeros(weight)

        def act(place: slice, piece: Tensor) -> None:
            of_input[place] = piece @ weight
            rows = input[place].reshape(-1, input.shape[-1])
            _add_product(of_weight, piece.reshape(-1, piece.shape[-1]).mT, rows)

        _multiply_gathered(ctx.cut, gradient.contiguous(), act)
        return None, of_input, of_weight.to(weight.dtype)


def _wide_zeros(weight: Tensor) -> Tensor:
    """What the pieces of a weight's gradient are added in, in fp32 at least: [outputs, features]."""
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:  # Rounded once each, and not once more with all that was added before.
        total += left @ right


def _check_pieces(pieces: int) -> None:
    if pieces < 1:
        raise ValueError(f"expected pieces of at least 1, got {pieces}: 1 is one piece of each rank's part")
