"""Exact attention over a sequence that is divided between ranks: each rank takes some heads over the full sequence.

One all-to-all turns a part of the sequence with all heads into all of the sequence with a part of the heads, and one
turns the result back. Between them any attention may compute, with masks, windows or dropout, since it sees the full
sequence. (DeepSpeed-Ulysses, arXiv 2309.14509.) Where there are fewer key-value heads than ranks, a head goes to each
rank that needs it, and the gradients of its copies are summed on their way back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_core.arguments import checked_arguments
from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.group import Group, GroupLike
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.consistency.same_call import check_same_call
from scale_tp.attention.blockwise import check_attention_inputs
from scale_tp.attention.load_balance import Order, full_length, rank_positions
from scale_tp.comm import accumulation_dtype
from scale_tp.parallel_state import context_parallel_group
from scale_tp.random import RegionRNG
from scale_tp.split import Split, split_heads


@checked_arguments
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    process_group: GroupLike = None,
    *,
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
    length: int | None = None,
    order: Order = "contiguous",
    **options: Any,
) -> Tensor:
    """Computes attention over the full sequence, divided over the ranks; all ranks of the group call it.

    It equals `attention` on the full sequence, to the bit where that computes each head by itself. Each rank sends
    (W - 1)/W of its query, key, value and output once in each pass.

    Args:
        query: [batch, heads, positions held, head size]: the part that `split_sequence` gives.
        key: [batch, key-value heads, positions held, head size]; the heads are a multiple of the key-value heads.
        value: [batch, key-value heads, positions held, value size].
        process_group: The ranks that divide the sequence; None is the context axis of `initialize_model_parallel`, or
            only this process.
        attention: Called as `attention(query, key, value, **options)` with this rank's heads over all positions in
            order, and with equal numbers of key-value heads and heads. It returns [batch, heads, positions, value
            size]. With `dropout_p` in the options, ranks draw different random numbers inside, and equal ones
            afterwards.
        length: The number of positions of the full sequence. None means that each rank holds the same number as this
            one.
        order: Which positions each rank holds, as in `split_sequence`.
        **options: Passed to `attention`, for example is_causal=True.

    Returns:
        [batch, heads, positions held, value size].

    Raises:
        TransferError: A rank did not take part.
        ValueError: The shapes or dtypes do not fit each other, this rank holds a different part of the sequence, or the
            ranks differ.

    Examples:
        >>> import torch
        >>> from scale_tp import ulysses_attention
        >>> query, key, value = torch.randn(3, 2, 4, 16, 8)  # [batch, heads, this rank's length, size]
        >>> ulysses_attention(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    check_attention_inputs("ulysses_attention", query, key, value)
    ranks = context_parallel_group(process_group)
    length = full_length(query.shape[2], length, ranks.size, ranks.rank, order)
    heads, key_value_heads = query.shape[1], key.shape[1]
    words = (
        f"sizes {(key.shape[0], heads, key_value_heads, key.shape[3], value.shape[3])}, length {length}, {order}, "
        f"{key.dtype}"
    )
    check_same_call("ulysses_attention", words, ranks)
    split = split_heads(heads, key_value_heads, ranks.size)
    tags = [message_tag(Event(f"{divided} of ulysses_attention", words)) for divided in ("heads", "sequences")]
    exchange = _HeadExchange(ranks, rank_positions(length, ranks.size, order), *tags)
    splits = (split.query, split.key_value, split.key_value)
    query, key, value = _SequenceToHeads.apply(exchange, splits, query, key, value)  # type: ignore[no-untyped-call]
    attend = functools.partial(attention, **options)
    output = _run_attention(query, key, value, attend, ranks, drops=bool(options.get("dropout_p")))
    (result,) = _HeadsToSequence.apply(exchange, (split.query,), output)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


def _run_attention(
    query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor], ranks: Group, *, drops: bool
) -> Tensor:
    """Runs an attention for this rank's heads over the full sequence: [batch, heads, positions, value size]."""
    expected = (*query.shape[:3], value.shape[3])
    if query.shape[1] == 0:  # A rank without heads takes part in the exchanges alone.
        return query.sum() + key.sum() + value.sum() + value.new_empty(expected)
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    randomness = RegionRNG(ranks)
    if drops:  # Other heads on each rank.
        randomness.enter()
    try:
        output = attention(query, key, value)
    finally:
        randomness.exit()
    if output.shape != expected:
        raise ValueError(
            "ulysses_attention: expected attention to return [batch, heads, positions, value size], here "
            f"{expected}, got {tuple(output.shape)}"
        )
    return output


@dataclass(frozen=True)
class _HeadExchange:
    """The all-to-all between parts of a sequence with all heads and the full sequence with some heads.

    Several tensors go in one message. For each there is a `Split`: which of its heads every rank computes with; several
    ranks may have copies of one.
    """

    group: Group
    positions: Split
    heads_tag: int  # of messages from sequence parts to heads
    sequence_tag: int  # of messages back

    def sequence_to_heads(self, parts: Sequence[Tensor], splits: Sequence[Split]) -> list[Tensor]:
        """[batch, all heads, positions held, size] to [batch, heads here, all positions, size], each."""
        pairs, rank = list(zip(parts, splits, strict=True)), self.group.rank
        sent = [[split.take(part, to, 1) for part, split in pairs] for to in range(self.group.size)]
        shapes = [
            [(part.shape[0], split.sizes[rank], length, part.shape[3]) for part, split in pairs]
            for length in self.positions.sizes
        ]
        received = self._all_to_all(sent, shapes, self.heads_tag)
        return [self.positions.join(pieces, 2) for pieces in zip(*received, strict=True)]

    def heads_to_sequence(self, wholes: Sequence[Tensor], splits: Sequence[Split]) -> list[Tensor]:
        """[batch, heads here, all positions, size] to [batch, all heads, positions held, size], copies summed."""
        length, ranks = self.positions.sizes[self.group.rank], range(self.group.size)
        sent = [[self.positions.take(tensor, to, 2) for tensor in wholes] for to in ranks]
        shapes = [
            [
                (tensor.shape[0], split.sizes[source], length, tensor.shape[3])
                for tensor, split in zip(wholes, splits, strict=True)
            ]
            for source in ranks
        ]
        received = self._all_to_all(sent, shapes, self.sequence_tag)
        return [_sum_of_heads(pieces, split) for pieces, split in zip(zip(*received, strict=True), splits, strict=True)]

    def _all_to_all(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], tag: int
    ) -> list[list[Tensor]]:
        """Sends each rank its tensors, and returns the tensors of these shapes that each rank has sent."""
        numbers = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        output_sizes = [sum(of_rank) for of_rank in numbers]
        input_sizes = [sum(part.numel() for part in of_rank) for of_rank in sent]
        flat_input = torch.cat([part.reshape(-1) for of_rank in sent for part in of_rank])
        received = flat_input.new_empty(sum(output_sizes))
        all_to_all(received, flat_input, self.group, output_sizes=output_sizes, input_sizes=input_sizes, tag=tag).wait()
        pieces = iter(received.split([number for of_rank in numbers for number in of_rank]))
        return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


def _sum_of_heads(parts: Sequence[Tensor], split: Split) -> Tensor:
    """Joins the heads of all ranks; copies are added in rank order, in fp32 at least."""
    if split.is_in_rank_order:
        return torch.cat(list(parts), 1)
    batch, _, length, size = parts[0].shape
    total = torch.zeros(
        (batch, split.total, length, size), dtype=accumulation_dtype(parts[0].dtype), device=parts[0].device
    )
    for ranges, part in zip(split.ranges, parts, strict=True):
        for (start, stop), piece in zip(ranges, part.split([stop - start for start, stop in ranges], 1), strict=True):
            total[:, start:stop] += piece
    return total.to(parts[0].dtype)


class _SequenceToHeads(torch.autograd.Function):
    """Each is the backward of the other one, so gradients of gradients pass as well."""

    @staticmethod
    def forward(ctx: Any, exchange: _HeadExchange, splits: tuple[Split, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.splits = exchange, splits
        return tuple(exchange.sequence_to_heads(parts, splits))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_HeadsToSequence.apply(ctx.exchange, ctx.splits, *gradients))  # type: ignore[no-untyped-call]


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _HeadExchange, splits: tuple[Split, ...], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.splits = exchange, splits
        return tuple(exchange.heads_to_sequence(wholes, splits))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_SequenceToHeads.apply(ctx.exchange, ctx.splits, *gradients))  # type: ignore[no-untyped-call]
