"""Ring attention, exact over a sequence that is divided between ranks: keys and values are passed round.

In each of W steps a rank attends to the keys and values that it has, while they are sent to the next rank. Results over
parts of the keys are merged in fp32. In the backward pass keys and values are passed round once more, and their
gradients follow one step behind, until they are back at their rank. (Ring attention, arXiv 2310.01889.)

A step reads: start to send and receive, attend, merge, wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.arguments import checked_arguments
from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.group import Group, GroupLike
from scale_core.comm.work import CollectiveWork
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.consistency.same_call import check_same_call
from scale_tp.attention.blockwise import (
    PartialAttention,
    block_attention,
    block_attention_backward,
    check_attention_inputs,
    merge_partial,
)
from scale_tp.attention.fused import flash_kernel, fused_attention, fused_attention_backward
from scale_tp.attention.load_balance import Order, full_length, rank_positions
from scale_tp.comm import to_accumulation_dtype
from scale_tp.parallel_state import context_parallel_group
from scale_tp.split import Range, Split


class AttentionBlock(NamedTuple):
    """Queries of this rank that attend to keys of one rank, by their indices in those ranks' parts."""

    queries: slice
    num_keys: int  # the first ones
    diagonal: bool  # each query sees the keys up to its own index


def blocks(queries: Sequence[Range], keys: Sequence[Range], *, causal: bool) -> list[AttentionBlock]:
    """Returns which queries attend to which keys, in the fewest blocks.

    Example:
        Of two ranks in zigzag order the first one holds positions 0-1 and 6-7, the second one 2-5:

        >>> first, second = ((0, 2), (6, 8)), ((2, 4), (4, 6))
        >>> blocks(first, first, causal=True)
        [AttentionBlock(queries=slice(0, 4, None), num_keys=4, diagonal=True)]
        >>> blocks(first, second, causal=True)
        [AttentionBlock(queries=slice(2, 4, None), num_keys=4, diagonal=False)]
        >>> blocks(second, first, causal=True)
        [AttentionBlock(queries=slice(0, 4, None), num_keys=2, diagonal=False)]
    """
    num_queries, num_keys = (sum(stop - start for start, stop in ranges) for ranges in (queries, keys))
    if causal and queries == keys:
        return [AttentionBlock(slice(0, num_queries), num_keys, True)] if num_queries else []
    attention_blocks: list[AttentionBlock] = []
    position = 0
    for first, last in queries:
        # Chunks of two ranks do not overlap, so a chunk of keys lies before these queries or behind them.
        seen = sum(stop - start for start, stop in keys if not causal or start < first)
        rows = slice(position, position := position + last - first)
        if first == last or not seen:
            continue
        if (
            attention_blocks
            and attention_blocks[-1].num_keys == seen
            and attention_blocks[-1].queries.stop == rows.start
        ):
            rows = slice(attention_blocks.pop().queries.start, rows.stop)
        attention_blocks.append(AttentionBlock(rows, seen, False))
    return attention_blocks


@checked_arguments
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    process_group: GroupLike = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    length: int | None = None,
    order: Order = "zigzag",
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Computes attention over the full sequence, divided over the ranks; all ranks of the group call it.

    It equals `torch.nn.functional.scaled_dot_product_attention` on the full sequence to the rounding of fp32. On CUDA
    in half precision, torch's flash kernel computes the blocks, each rounded to the query's dtype. Exceptions are a
    `key_padding_mask`, and head or value sizes that differ or are not a multiple of 8 up to 256.

    Each rank sends its keys and values W - 1 times in the forward and again in the backward pass, and their gradients W
    times in fp32; key-value heads that several queries share are sent once.

    Args:
        query: [batch, heads, positions held, head size], floating point: the part that `split_sequence` gives.
        key: [batch, key-value heads, positions held, head size]; the heads are a multiple of the key-value heads.
        value: [batch, key-value heads, positions held, value size].
        process_group: The ranks that divide the sequence; None is the context axis of `initialize_model_parallel`, or
            only this process.
        is_causal: No position looks at a later one.
        scale: The factor of the scores; None is one over the root of the head size.
        length: The number of positions of the full sequence. None means that each rank holds the same number as this
            one.
        order: Which positions each rank holds, as in `split_sequence`.
        key_padding_mask: [batch, length] bool, the same on all ranks, of the full sequence: True at keys that no query
            sees, as in `nn.MultiheadAttention`.

    Returns:
        [batch, heads, positions held, value size], in the query's dtype; 0 where a query sees no key.

    Raises:
        TransferError: A rank did not take part.
        ValueError: The shapes or dtypes do not fit each other, this rank holds a different part of the sequence, or the
            ranks differ.

    Examples:
        >>> import torch
        >>> from scale_tp import ring_attention
        >>> query, key, value = torch.randn(3, 2, 4, 16, 8)  # [batch, heads, this rank's length, size]
        >>> ring_attention(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    check_attention_inputs("ring_attention", query, key, value)
    ranks = context_parallel_group(process_group)
    length = full_length(query.shape[2], length, ranks.size, ranks.rank, order)
    _check_padding_mask(key_padding_mask, query.shape[0], length)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    heads = (key.shape[0], query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    words = f"sizes {heads}, length {length}, {order}, {key.dtype}, is_causal={is_causal}, scale={scale:g}"
    words += "" if key_padding_mask is None else ", with a key_padding_mask"
    tag = check_same_call("ring_attention", words, ranks)
    gradient_tag = message_tag(Event("gradients of ring_attention", words))
    positions = rank_positions(length, ranks.size, order)
    hidden = None
    if key_padding_mask is not None:
        hidden = [positions.take(key_padding_mask, rank, 1) for rank in range(ranks.size)]
    ring = _Ring(ranks, positions, is_causal, scale, tag, gradient_tag, hidden)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # As torch's own attention does.
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    output: Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return output


def _check_padding_mask(mask: Tensor | None, batch: int, length: int) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, length)):
        raise ValueError(
            f"ring_attention: expected key_padding_mask to be bool [batch, length], here {[batch, length]}, got "
            f"{mask.dtype} {list(mask.shape)}: pass key_padding_mask=attention_mask == 0, of the full sequence"
        )


@dataclass(frozen=True)
class _Ring:
    """The positions of each rank, and the options of a call."""

    group: Group
    positions: Split
    causal: bool  # no position looks at a later one
    scale: float  # the factor of the scores
    tag: int  # of keys and values
    gradient_tag: int  # of their gradients
    hidden: Sequence[Tensor] | None = None  # of the keys of each rank, [batch, positions] bool, those that none sees

    def source(self, step: int) -> int:
        """The rank whose keys and values this one has in a step."""
        return (self.group.rank - step) % self.group.size

    def blocks(self, step: int) -> list[AttentionBlock]:
        ranges = self.positions.ranges
        return blocks(ranges[self.group.rank], ranges[self.source(step)], causal=self.causal)

    def hidden_keys(self, step: int, num_keys: int) -> Tensor | None:
        return None if self.hidden is None else self.hidden[self.source(step)][:, :num_keys]

    def send_recv(self, part: Tensor, step: int, row: int, tag: int) -> CollectiveWork:
        """Starts to send this step's [positions * row] to the next rank, and to receive the same for the next step."""
        sent, received = [0] * self.group.size, [0] * self.group.size
        following, before = (self.group.rank + 1) % self.group.size, (self.group.rank - 1) % self.group.size
        sent[following] = part.numel()
        received[before] = row * self.positions.sizes[self.source(step + 1)]
        return all_to_all(
            part.new_empty(received[before]),
            part,
            self.group,
            output_sizes=received,
            input_sizes=sent,
            tag=tag,
        )


@dataclass(frozen=True)
class _Packing:
    """Keys and values of one source as one 1-D tensor, which is one message."""

    key_shape: torch.Size
    value_shape: torch.Size

    @property
    def row(self) -> int:
        """Elements per position."""
        batch, heads = self.key_shape[:2]
        return batch * heads * (self.key_shape[3] + self.value_shape[3])

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, _, head_size = self.key_shape
        num_positions = packed.numel() // self.row if self.row else 0
        end = batch * heads * num_positions * head_size
        key = packed[:end].view(batch, heads, num_positions, head_size)
        return key, packed[end:].view(batch, heads, num_positions, self.value_shape[3])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            total, lse = _forward(query, key, value, ring)
        output = total.reshape(*query.shape[:3], value.shape[3]).to(query.dtype)
        # A kernel takes the output in the query's dtype: then no wider one has to be kept.
        is_fused = flash_kernel(query, key, value, ring.hidden) is not None
        ctx.save_for_backward(query, key, value, output if is_fused else total, lse)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradient.device.type, enabled=False):
            return *_backward(gradient, ctx.ring, *ctx.saved_tensors), None


def _forward(query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> PartialAttention:
    """Passes keys and values round once; returns the attention of this rank's queries."""
    packing, kernel = _Packing(key.shape, value.shape), flash_kernel(query, key, value, ring.hidden)
    grouped = _grouped(query, key.shape[1])
    total = PartialAttention(
        grouped.new_zeros((*grouped.shape[:-1], value.shape[-1])),
        grouped.new_full(grouped.shape[:-1], -torch.inf),
    )
    packed = packing.pack(key, value)
    for step in range(ring.group.size):
        last = step + 1 == ring.group.size
        passing = None if last else ring.send_recv(packed, step, packing.row, ring.tag)
        key_here, value_here = packing.unpack(packed)
        if kernel is None:
            key_here, value_here = map(to_accumulation_dtype, (key_here, value_here))
        for rows, num_keys, diagonal in ring.blocks(step):
            keys = key_here[:, :, :num_keys], value_here[:, :, :num_keys]
            if kernel is not None:
                part = fused_attention(kernel, query[:, :, rows], *keys, scale=ring.scale, diagonal=diagonal)
                merge_partial(total, rows, part)
                continue
            looking = (grouped[..., rows, :], *keys)
            hidden = ring.hidden_keys(step, num_keys)
            merge_partial(total, rows, block_attention(*looking, scale=ring.scale, diagonal=diagonal, hidden=hidden))
        packed = packed if passing is None else passing.wait()
    return total


def _backward(
    gradient: Tensor, ring: _Ring, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Passes keys and values round once more; returns the gradients of query, key and value."""
    packing, kernel = _Packing(key.shape, value.shape), flash_kernel(query, key, value, ring.hidden)
    grouped, grad_output = _grouped(query, key.shape[1]), _grouped(gradient, key.shape[1])
    offset = (grad_output * output).sum(-1) if kernel is None else lse
    of_query = torch.zeros_like(grouped)
    packed = packing.pack(key, value)
    arriving: CollectiveWork | None = None  # The gradients of the keys and values of this step, from the rank before.
    for step in range(ring.group.size):
        last = step + 1 == ring.group.size
        passing = None if last else ring.send_recv(packed, step, packing.row, ring.tag)
        key_here, value_here = packing.unpack(packed)
        if kernel is None:
            key_here, value_here = map(to_accumulation_dtype, (key_here, value_here))
        of_packed = torch.zeros(packed.shape, dtype=grouped.dtype, device=packed.device)
        of_key, of_value = packing.unpack(of_packed)
        for rows, num_keys, diagonal in ring.blocks(step):
            keys = key_here[:, :, :num_keys], value_here[:, :, :num_keys]
            options: Any = {"scale": ring.scale, "diagonal": diagonal}
            if kernel is not None:
                merged = (gradient[:, :, rows], output[:, :, rows], lse.flatten(1, 2)[..., rows])
                parts = fused_attention_backward(kernel, *merged, query[:, :, rows], *keys, **options)
            else:
                merged = (grad_output[..., rows, :], offset[..., rows], lse[..., rows])
                options["hidden"] = ring.hidden_keys(step, num_keys)
                parts = block_attention_backward(*merged, grouped[..., rows, :], *keys, **options)
            of_query[..., rows, :] += parts[0].view_as(of_query[..., rows, :])
            of_key[:, :, :num_keys] += parts[1]
            of_value[:, :, :num_keys] += parts[2]
        if arriving is not None:
            of_packed += arriving.wait()
        packed = packed if passing is None else passing.wait()
        arriving = ring.send_recv(of_packed, step, packing.row, ring.gradient_tag) if ring.group.size > 1 else None
    of_key, of_value = packing.unpack(of_packed if arriving is None else arriving.wait())
    return of_query.reshape(query.shape).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _grouped(tensor: Tensor, num_key_value_heads: int) -> Tensor:
    """[batch, heads, ...] as [batch, key-value heads, heads per key-value head, ...], fp32 or wider."""
    batch, heads, *trailing = tensor.shape
    return to_accumulation_dtype(tensor).reshape(batch, num_key_value_heads, heads // num_key_value_heads, *trailing)
