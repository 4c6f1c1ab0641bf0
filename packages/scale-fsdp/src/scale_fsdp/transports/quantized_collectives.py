"""Collectives that send quantized values: all-gather, reduce-scatter and all-reduce.

With n values from or for each of W ranks, and M = `num_bytes(n)` of the format, one rank sends

    all_gather_quantized        (W - 1) M
    reduce_scatter_quantized    (W - 1) M      by an all-to-all; each rank adds up in fp32 its received messages
    all_reduce_quantized        2 (W - 1) M    of n = ceil(N / W) values: the two above, one after the other

Every rank, the owner included, gets the values of the message, so that all compute with the same numbers.
A sum has this rank's own summand unchanged: it is not sent and not rounded. ZeRO++ (arXiv 2306.10209) calls the first
two qwZ and qgZ.

Quantizing takes memory, of which there may be none: `DeferredError` says how the other ranks get their messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import UNTAGGED, all_gather
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork
from scale_core.flat.transport import DeferredError
from scale_core.optim.error_feedback import ErrorFeedback
from scale_fsdp.transports.blocks import BlockFormat, dequantize, quantize


def new_messages(count: int, num_elements: int, block_format: BlockFormat, device: torch.device) -> Tensor:
    """Returns memory for this many messages: uint8 [count, `num_bytes(n)`]."""
    return torch.empty(count, block_format.num_bytes(num_elements), dtype=torch.uint8, device=device)


def all_gather_quantized(
    messages: Tensor,
    shard: Tensor,
    group: Group,
    block_format: BlockFormat,
    *,
    tag: int = UNTAGGED,
    deferred: DeferredError | None = None,
) -> CollectiveWork:
    """Starts to fill `messages` with every rank's quantized shard, in rank order; `dequantize` then reads them.

    Args:
        messages: [W, M], from `new_messages`.
        shard: [n] of a floating-point dtype; may change at once.
        group: The W ranks.
        block_format: The format of the messages.
        tag: As in `all_gather`.
        deferred: Keeps an exception for the caller to raise. None raises it where the handle is waited for.
    """
    local_message, local_error = messages[group.rank], deferred or DeferredError()
    local_error.fill(local_message, lambda: quantize(shard[None], block_format, out=local_message[None]))
    work = all_gather(messages.view(-1), local_message, group, tag=tag)
    return work if deferred is not None else work.then(_checked(local_error))


@dataclass(frozen=True)
class ReduceMessages:
    """Memory for one quantized reduction: the messages that this rank sends and receives, [W, M] each."""

    sent: Tensor
    received: Tensor

    @classmethod
    def new(cls, group: Group, num_elements: int, block_format: BlockFormat, device: torch.device) -> ReduceMessages:
        """Allocates it, for summands of [W, `num_elements`]."""
        return cls(*(new_messages(group.size, num_elements, block_format, device) for _ in range(2)))


@dataclass(frozen=True)
class QuantizedMean:
    """How summands of several ranks are averaged that are sent quantized.

    Attributes:
        group: The W ranks, at least two.
        block_format: The format of the messages.
        divisor: The divisor of the sum; None is W.
        tag: As in `all_gather`; messages of the second half of an all-reduce have the next tag.
        deferred: As in `all_gather_quantized`; where something has failed, the result is nothing to be read.
    """

    group: Group
    block_format: BlockFormat
    divisor: float | None = None
    tag: int = UNTAGGED
    deferred: DeferredError | None = None

    def new_messages(self, num_elements: int, device: torch.device) -> ReduceMessages:
        """Allocates memory for summands of [W, `num_elements`]."""
        return ReduceMessages.new(self.group, num_elements, self.block_format, device)


class _Summation:
    """This rank's part in one reduction: it sends the others' parts, and adds up the received ones."""

    def __init__(self, values: Tensor, how: QuantizedMean, messages: ReduceMessages | None) -> None:
        self.values, self.how, self.own = values, how, values[how.group.rank]  # values: [W, n]
        self.messages = messages or how.new_messages(values.shape[1], values.device)
        self.deferred = how.deferred or DeferredError()

    def send(self, feedback: ErrorFeedback | None) -> CollectiveWork:
        """Starts to send this rank's messages; once the messages of the others have come, `mean` adds up."""
        messages = self.messages
        self.deferred.fill(messages.sent, lambda: self._quantize(feedback))
        self.values = self.own  # [n]; the sent parts are free
        return all_to_all(messages.received.view(-1), messages.sent.view(-1), self.how.group, tag=self.how.tag)

    def _quantize(self, feedback: ErrorFeedback | None) -> Tensor:
        values, rank, sent = self.values, self.how.group.rank, self.messages.sent
        if feedback is not None:
            values = feedback.add_to(values)
        quantize(values, self.how.block_format, out=sent)
        self.own = values[rank].float().clone()
        if feedback is not None:
            arrives = dequantize(sent, values.shape[1], self.how.block_format)
            arrives[rank] = self.own
            feedback.keep(values, arrives)
        return sent

    def mean(self) -> Tensor:
        """Returns the average of this rank's part, fp32 [n], added up in rank order."""
        total, received, group = torch.zeros_like(self.own), self.messages.received, self.how.group
        for position in range(group.size):
            is_own, one = position == group.rank, received[position : position + 1]
            total += self.own if is_own else dequantize(one, len(total), self.how.block_format)[0]
        return total.div_(self.how.divisor or group.size)

    def check(self) -> None:
        """Raises the exception, unless the caller does."""
        if self.how.deferred is None:
            self.deferred.check()


def reduce_scatter_quantized(
    full: Tensor,
    how: QuantizedMean,
    *,
    dtype: torch.dtype | None = None,
    feedback: ErrorFeedback | None = None,
    messages: ReduceMessages | None = None,
) -> CollectiveWork:
    """Starts to average every rank's `full`; each rank gets its own part of it, added up in rank order in fp32.

    Args:
        full: [W * n] of a floating-point dtype; belongs to the collective from now on.
        how: Between which ranks, and in which format.
        dtype: Of the result; None is the dtype of `full`.
        feedback: Adds this rank's error of earlier calls, and keeps the error of this call.
        messages: Memory to use.

    Returns:
        A handle whose result is a tensor [n].
    """
    dtype = dtype or full.dtype
    summation = _Summation(full.view(how.group.size, -1), how, messages)

    def finish(_: Tensor) -> Tensor:
        mean = summation.deferred.attempt(lambda: summation.mean().to(dtype))
        summation.check()
        return summation.messages.received if mean is None else mean

    return summation.send(feedback).then(finish)


def all_reduce_quantized(
    values: Tensor,
    how: QuantizedMean,
    *,
    feedback: tuple[ErrorFeedback, ErrorFeedback] | None = None,
    messages: ReduceMessages | None = None,
) -> CollectiveWork:
    """Starts to average every rank's `values` [N] of a floating-point dtype; all get the same, in place.

    Args:
        values: [N].
        how: Between which ranks, and in which format.
        feedback: For the errors of this rank's summands, and of the part that it has averaged.
        messages: Memory to use, for summands of [W, ceil(N / W)].
    """
    group, block_format, numel = how.group, how.block_format, part_size(len(values), how.group)
    padded = torch.nn.functional.pad(values, (0, numel * group.size - len(values)))
    summation = _Summation(padded.view(group.size, -1), how, messages)
    reduce_error, gather_error = feedback or (None, None)
    gathered, message = summation.messages.received, summation.messages.sent[0]

    def quantize_mean() -> Tensor:
        mean = summation.mean()
        if gather_error is not None:
            mean = gather_error.add_to(mean)
        quantize(mean[None], block_format, out=message[None])
        if gather_error is not None:
            gather_error.keep(mean, dequantize(message[None], numel, block_format)[0])
        return message

    def gather(_: Tensor) -> CollectiveWork:
        summation.deferred.fill(message, quantize_mean)
        return all_gather(gathered.view(-1), message, group, tag=how.tag + 1 if how.tag else how.tag).then(finish)

    def finish(_: Tensor) -> Tensor:
        summation.deferred.attempt(
            lambda: values.copy_(dequantize(gathered, numel, block_format).view(-1)[: len(values)])
        )
        summation.check()
        return values

    return summation.send(reduce_error).then(gather)


def part_size(num_elements: int, group: Group) -> int:
    """Of this many values, how many each rank of an all-reduce adds up: the last parts may be padded."""
    return -(-num_elements // group.size)


def _checked(deferred: DeferredError) -> Callable[[Tensor], Tensor]:
    def check(result: Tensor) -> Tensor:
        deferred.check()
        return result

    return check
