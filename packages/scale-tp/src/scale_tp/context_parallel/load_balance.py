"""Load balancing of context parallelism: which positions of a sequence each rank holds.

A causal query attends to the positions before it. So where each rank holds one chunk of the sequence, the last rank has
almost all of the work. In the zigzag order the sequence is cut into two chunks per rank, and rank r holds the r-th
chunk from the front and the r-th from the back: then all have the same. (Striped attention, arXiv 2311.09431, balances
by single tokens; whole chunks leave each block of the work in one piece.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather, exchange, exchange_text
from scale_core.comm.group import Group, GroupLike
from scale_core.consistency.execution_order import fingerprint_of
from scale_tp.parallel_state import context_parallel_group

Order: TypeAlias = Literal["zigzag", "contiguous"]


def rank_positions(length: int, num_ranks: int, order: Order = "zigzag") -> list[tuple[range, ...]]:
    """Returns, by rank, the ranges of a sequence that it holds: in order, and all of them together are the sequence.

    Lengths that do not divide are cut as evenly as may be, longer chunks first; a rank may hold nothing of a short one.

    Example:
        >>> rank_positions(9, 2)
        [(range(0, 3), range(7, 9)), (range(3, 5), range(5, 7))]
        >>> rank_positions(9, 2, "contiguous")
        [(range(0, 5),), (range(5, 9),)]
    """
    if order not in get_args(Order):
        raise ValueError(f"expected order to be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
    if order == "contiguous":
        return [(chunk,) for chunk in _chunks(length, num_ranks)]
    chunks = _chunks(length, 2 * num_ranks)
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)]


def rank_lengths(length: int, num_ranks: int, order: Order = "zigzag") -> list[int]:
    """Returns, by rank, how many positions of a sequence it holds; the arguments are those of `rank_positions`."""
    return [sum(map(len, ranges)) for ranges in rank_positions(length, num_ranks, order)]


def position_ids(
    length: int, group: GroupLike = None, *, order: Order = "zigzag", device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions that this rank holds, as a model needs them for its rotary or learned embedding.

    Args:
        length: How many positions the whole sequence has.
        group: The ranks that divide it; None is the context axis of `initialize_model_parallel`, or this process alone.
        order: As in `rank_positions`.
        device: Where the result is made.

    Returns:
        [positions held] int64, ascending.
    """
    ranks = context_parallel_group(group)
    ranges = rank_positions(length, ranks.size, order)[ranks.rank]
    return torch.cat([torch.arange(held.start, held.stop, device=device) for held in ranges])


def split_sequence(tensor: Tensor, group: GroupLike = None, *, dim: int = 1, order: Order = "zigzag") -> Tensor:
    """Returns this rank's part of a tensor that all ranks have whole; nothing is sent.

    Tokens, targets and position numbers are split alike, before the model's forward.

    Args:
        tensor: [..., length, ...], any dtype.
        group: The ranks that divide it; None is the context axis of `initialize_model_parallel`, or this process alone.
        dim: The dimension of the sequence.
        order: As in `rank_positions`.

    Returns:
        [..., positions held, ...], contiguous. Gradients flow back into the part, and are zero elsewhere.
    """
    ranks = context_parallel_group(group)
    ranges = rank_positions(tensor.size(dim), ranks.size, order)[ranks.rank]
    return torch.cat([tensor.narrow(dim, held.start, len(held)) for held in ranges], dim)


@torch.no_grad()
def join_sequence(
    tensor: Tensor, group: GroupLike = None, *, dim: int = 1, length: int | None = None, order: Order = "zigzag"
) -> Tensor:
    """Returns the whole tensor on every rank, from each rank's part; without gradients, for what is looked at or kept.

    Args:
        tensor: [..., positions held, ...], this rank's part.
        group: The ranks that divide it; None is the context axis of `initialize_model_parallel`, or this process alone.
        dim: The dimension of the sequence.
        length: How many positions the whole sequence has; None is as many as the ranks hold together.
        order: As in `rank_positions`.

    Returns:
        [..., length, ...], contiguous.

    Raises:
        TransferError: A rank did not come.
        ValueError: On all ranks: a part has another length than a rank holds of such a sequence, or the ranks differ.
    """
    ranks = context_parallel_group(group)
    length = _agreed_length(tensor, dim, length, ranks, order)
    held = rank_positions(length, ranks.size, order)
    front = tensor.movedim(dim, 0).contiguous()
    joined = front.new_empty((length, *front.shape[1:]))
    row = joined[:1].numel()
    sizes = [sum(map(len, ranges)) * row for ranges in held]
    received = front.new_empty(length * row)
    all_gather(received, front.view(-1), ranks, sizes=sizes).wait()
    rows = received.view(joined.shape)
    at = 0
    for span in (span for ranges in held for span in ranges):
        joined[span.start : span.stop] = rows[at : at + len(span)]
        at += len(span)
    return joined.movedim(0, dim).contiguous()


def _agreed_length(tensor: Tensor, dim: int, length: int | None, group: Group, order: Order) -> int:
    """Returns the length of the sequence, after the ranks have compared their parts."""
    others = tensor.movedim(dim, 0).shape[1:]
    words = f"of {list(others)} each, {tensor.dtype}, in {order} order, length={length}"
    rows = exchange([tensor.size(dim), fingerprint_of(words)], group)
    if len({row[1] for row in rows}) > 1:
        told = exchange_text(f"{tensor.size(dim)} positions {words}", group)
        by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
        raise ValueError(f"join_sequence: the ranks bring different things: {by_rank}: call it alike on all of them")
    held = [row[0] for row in rows]
    whole = sum(held) if length is None else length
    expected = rank_lengths(whole, group.size, order)
    if held != expected:
        raise ValueError(
            f"join_sequence: expected the ranks to hold {expected} positions, of a sequence of {whole} in {order} "
            f"order, got {held}: split what all ranks have with split_sequence(tensor, group, order={order!r})"
        )
    return whole


def full_length(local: int, length: int | None, num_ranks: int, rank: int, order: Order) -> int:
    """Returns the length of the sequence of which this rank holds `local` positions, if it can."""
    if length is None:
        return local * num_ranks
    expected = rank_lengths(length, num_ranks, order)
    if local != expected[rank]:
        raise ValueError(
            f"expected {expected[rank]} positions on rank {rank} of {num_ranks}, of a sequence of {length} in "
            f"{order} order ({expected} by rank), got {local}: split what all ranks have with "
            f"split_sequence(tensor, group, order={order!r})"
        )
    return length


def _chunks(length: int, count: int) -> Sequence[range]:
    short, longer = divmod(length, count)
    starts = [number * short + min(number, longer) for number in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
