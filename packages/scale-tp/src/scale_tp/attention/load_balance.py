"""Load balancing of context parallelism: which positions of a sequence each rank holds.

A causal query attends to the positions before it. So where each rank holds one chunk of the sequence, the last rank has
almost all of the work. In the zigzag order the sequence is cut into two chunks per rank, and rank r holds the r-th
chunk from the front and the r-th from the back: then all have the same. (Striped attention, arXiv 2311.09431, balances
by single tokens; full chunks leave each block of the work in one piece.)
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange, exchange_text, fingerprint_of
from scale_core.comm.group import Group, GroupLike
from scale_tp.comm import all_gather_along
from scale_tp.parallel_state import context_parallel_group
from scale_tp.split import Split

Order: TypeAlias = Literal["zigzag", "contiguous"]


@functools.lru_cache(maxsize=1024)
def rank_positions(length: int, num_ranks: int, order: Order = "zigzag") -> Split:
    """Returns which positions of a sequence each rank holds, in order; lengths that do not divide are cut evenly.

    Example:
        >>> rank_positions(9, 2).ranges
        (((0, 3), (7, 9)), ((3, 5), (5, 7)))
        >>> rank_positions(9, 2, "contiguous").ranges
        (((0, 5),), ((5, 9),))
    """
    if order not in get_args(Order):
        raise ValueError(f"expected order to be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
    if order == "contiguous":
        return Split.even(length, num_ranks)
    chunks = [chunk for (chunk,) in Split.even(length, 2 * num_ranks).ranges]
    return Split(length, tuple((chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)))


@checked_arguments
def position_ids(
    length: int, process_group: GroupLike = None, *, order: Order = "zigzag", device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions that this rank holds, as a model needs them for its rotary or learned embedding.

    Args:
        length: How many positions the full sequence has.
        process_group: The ranks that divide it; None is the context axis of `initialize_model_parallel`, or only this
            process.
        order: As in `rank_positions`.
        device: Where the result is made.

    Returns:
        [positions held] int64, ascending.

    Examples:
        >>> from scale_tp import position_ids
        >>> position_ids(8)  # on 2 ranks, rank 0: 0, 1, 6, 7
        tensor([0, 1, 2, 3, 4, 5, 6, 7])

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    ranks = context_parallel_group(process_group)
    local_ranges = rank_positions(length, ranks.size, order).ranges[ranks.rank]
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in local_ranges])


@checked_arguments
def split_sequence(tensor: Tensor, process_group: GroupLike = None, *, dim: int = 1, order: Order = "zigzag") -> Tensor:
    """Returns this rank's shard of a tensor that all ranks have in full; nothing is sent.

    Tokens, targets and position numbers are split in the same way, before the model's forward.

    Args:
        tensor: [..., length, ...], any dtype.
        process_group: The ranks that divide it; None is the context axis of `initialize_model_parallel`, or only this
            process.
        dim: The dimension of the sequence.
        order: As in `rank_positions`.

    Returns:
        [..., positions held, ...], contiguous. Gradients flow back into the part, and are zero elsewhere.

    Examples:
        >>> import torch
        >>> from scale_tp import split_sequence
        >>> split_sequence(torch.arange(8).view(1, 8))  # on 2 ranks, rank 0: 0, 1, 6, 7
        tensor([[0, 1, 2, 3, 4, 5, 6, 7]])

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    ranks = context_parallel_group(process_group)
    local_ranges = rank_positions(tensor.size(dim), ranks.size, order).ranges[ranks.rank]
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in local_ranges], dim)


@checked_arguments
@torch.no_grad()
def join_sequence(
    tensor: Tensor, process_group: GroupLike = None, *, dim: int = 1, length: int | None = None, order: Order = "zigzag"
) -> Tensor:
    """Returns the full tensor on every rank, from each rank's shard; without gradients, for results to look at or keep.

    Args:
        tensor: [..., positions held, ...], this rank's shard.
        process_group: The ranks that divide it; None is the context axis of `initialize_model_parallel`, or only this
            process.
        dim: The dimension of the sequence.
        length: The number of positions of the full sequence. None is the sum over the ranks.
        order: As in `rank_positions`.

    Returns:
        [..., length, ...], contiguous.

    Raises:
        TransferError: A rank did not come.
        ValueError: On all ranks: the length of a part does not fit the length of the sequence, or the ranks differ.

    Examples:
        >>> import torch
        >>> from scale_tp import join_sequence, split_sequence
        >>> tokens = torch.arange(8).view(1, 8)
        >>> torch.equal(join_sequence(split_sequence(tokens)), tokens)
        True

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    ranks = context_parallel_group(process_group)
    length = _agreed_length(tensor, dim, length, ranks, order)
    positions = rank_positions(length, ranks.size, order)
    gathered = all_gather_along(tensor, ranks, dim, positions.sizes)
    return positions.join(gathered.split(positions.sizes, dim), dim).contiguous()


def _agreed_length(tensor: Tensor, dim: int, length: int | None, group: Group, order: Order) -> int:
    """Returns the length of the sequence, after the ranks have compared their parts."""
    others = tensor.movedim(dim, 0).shape[1:]
    words = f"of {list(others)} each, {tensor.dtype}, in {order} order, length={length}"
    rows = exchange([tensor.size(dim), fingerprint_of(words)], group)
    if len({row[1] for row in rows}) > 1:
        replies = exchange_text(f"{tensor.size(dim)} positions {words}", group)
        by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(replies))
        raise ValueError(f"join_sequence: the ranks bring different things: {by_rank}: make the same call on all ranks")
    lengths = [row[0] for row in rows]
    total = sum(lengths) if length is None else length
    expected = list(rank_positions(total, group.size, order).sizes)
    if lengths != expected:
        raise ValueError(
            f"join_sequence: expected the ranks to hold {expected} positions, of a sequence of {total} in {order} "
            f"order, got {lengths}: split what all ranks have with split_sequence(tensor, group, order={order!r})"
        )
    return total


def full_length(local: int, length: int | None, num_ranks: int, rank: int, order: Order) -> int:
    """Returns the length of the sequence if this rank holds `local` positions of it, or None."""
    if length is None:
        return local * num_ranks
    expected = list(rank_positions(length, num_ranks, order).sizes)
    if local != expected[rank]:
        raise ValueError(
            f"expected {expected[rank]} positions on rank {rank} of {num_ranks}, of a sequence of {length} in {order} "
            f"order, got {local}: split what all ranks have with split_sequence(tensor, group, order={order!r})"
        )
    return length
