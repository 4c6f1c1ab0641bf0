"""Collectives that send quantized values: all-gather, reduce-scatter and all-reduce.

With n values from or for each of W ranks, and M = `num_bytes(n)` of the format, one rank sends

    all_gather_quantized        (W - 1) M
    reduce_scatter_quantized    (W - 1) M      by an all-to-all; each rank adds up in fp32 what it has received
    all_reduce_quantized        2 (W - 1) M    of n = ceil(N / W) values: the two above, one after the other

Gathered values are those of the message on every rank, its owner included, so that all compute with the same numbers.
A sum has this rank's own summand as it is: what is not sent is not rounded. ZeRO++ (arXiv 2306.10209) calls the first
two qwZ and qgZ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scale_core.comm.collectives import UNTAGGED, all_gather, all_to_all
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork
from scale_core.quantization.blocks import BlockFormat, dequantize, quantize
from scale_core.quantization.error_feedback import ErrorFeedback


@dataclass(frozen=True)
class WireFormats:
    """In which formats the values of a flat buffer are sent; None sends them unquantized."""

    gather: BlockFormat | None = None  # Parameters, between the ranks that share them
    reduce: BlockFormat | None = None  # Their gradients, between the same
    replicate: BlockFormat | None = None  # Reduced gradients, between replicas of the shards
    error_feedback: bool = False  # For gradients


def new_messages(count: int, num_elements: int, block_format: BlockFormat, device: torch.device) -> Tensor:
    """Returns memory for this many messages: uint8 [count, `num_bytes(n)`]."""
    return torch.empty(count, block_format.num_bytes(num_elements), dtype=torch.uint8, device=device)


def all_gather_quantized(
    messages: Tensor, shard: Tensor, group: Group, block_format: BlockFormat, *, tag: int = UNTAGGED
) -> CollectiveWork:
    """Starts to fill `messages` with every rank's quantized shard, in rank order; `dequantize` then reads them.

    Args:
        messages: [W, M], from `new_messages`.
        shard: [n] of a floating-point dtype; may change at once.
        group: The W ranks.
        block_format: The format of the messages.
        tag: As in `all_gather`.
    """
    return all_gather(messages.view(-1), quantize(shard[None], block_format)[0], group, tag=tag)


def reduce_scatter_quantized(
    full: Tensor,
    group: Group,
    block_format: BlockFormat,
    *,
    dtype: torch.dtype | None = None,
    divisor: float | None = None,
    feedback: ErrorFeedback | None = None,
    tag: int = UNTAGGED,
) -> CollectiveWork:
    """Starts to average every rank's `full`; each rank gets its own part of it, added up in rank order in fp32.

    Args:
        full: [W * n] of a floating-point dtype; belongs to the collective from now on.
        group: The W ranks, at least two.
        block_format: The format of the messages.
        dtype: Of the result; None is that of `full`.
        divisor: What the sum is divided by; None is W.
        feedback: Adds this rank's error of earlier calls, and keeps that of this one.
        tag: As in `all_gather`.

    Returns:
        A handle whose result is a tensor [n].
    """
    values = full.view(group.size, -1)
    numel, dtype, rank = values.shape[1], dtype or full.dtype, group.rank
    if feedback is not None:
        values = feedback.add_to(values)
    sent = quantize(values, block_format)
    own = values[rank].float().clone()
    if feedback is not None:
        arrives = dequantize(sent, numel, block_format)
        arrives[rank] = own
        feedback.keep(values, arrives)
    received = torch.empty_like(sent)

    def add_up(_: Tensor) -> Tensor:
        total = torch.zeros_like(own)
        for place in range(group.size):
            total += own if place == rank else dequantize(received[place : place + 1], numel, block_format)[0]
        return total.div_(divisor or group.size).to(dtype)

    return all_to_all(received.view(-1), sent.view(-1), group, tag=tag).then(add_up)


def all_reduce_quantized(
    values: Tensor,
    group: Group,
    block_format: BlockFormat,
    *,
    divisor: float | None = None,
    feedback: tuple[ErrorFeedback, ErrorFeedback] | None = None,
    tag: int = UNTAGGED,
) -> CollectiveWork:
    """Starts to average every rank's `values` [N] of a floating-point dtype; all get the same, in place.

    Args:
        values: [N].
        group: The W ranks, at least two.
        block_format: The format of the messages.
        divisor: What the sum is divided by; None is W.
        feedback: For the errors of this rank's summands, and of the part that it has averaged.
        tag: As in `all_gather`; those of the second half have the next one.
    """
    padded = torch.nn.functional.pad(values, (0, -len(values) % group.size))
    numel = len(padded) // group.size
    reduce_error, gather_error = feedback or (None, None)

    def gather(mean: Tensor) -> CollectiveWork:
        if gather_error is not None:
            mean = gather_error.add_to(mean)
        message = quantize(mean[None], block_format)
        if gather_error is not None:
            gather_error.keep(mean, dequantize(message, numel, block_format)[0])
        messages = new_messages(group.size, numel, block_format, values.device)
        work = all_gather(messages.view(-1), message[0], group, tag=tag + 1 if tag else tag)
        return work.then(lambda _: values.copy_(dequantize(messages, numel, block_format).view(-1)[: len(values)]))

    return reduce_scatter_quantized(
        padded, group, block_format, dtype=torch.float32, divisor=divisor, feedback=reduce_error, tag=tag
    ).then(gather)
