"""Parameters and gradients in messages of 8 or 4 bits, between all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scale_core.comm.collectives import UNTAGGED
from scale_core.comm.work import CollectiveWork
from scale_core.flat.buffer import PlainTransport
from scale_core.flat.config import ShardGroups
from scale_core.flat.transport import ReduceWork
from scale_core.optim.error_feedback import ErrorFeedback
from scale_fsdp.transports.blocks import BlockFormat, dequantize
from scale_fsdp.transports.quantized_collectives import (
    QuantizedMean,
    ReduceMessages,
    all_gather_quantized,
    all_reduce_quantized,
    new_messages,
    part_size,
    reduce_scatter_quantized,
)


@dataclass(frozen=True)
class WireFormats:
    """In which formats the values of a flat buffer are sent; None sends them unquantized."""

    gather: BlockFormat | None = None  # Parameters, between the ranks that share them
    reduce: BlockFormat | None = None  # Their gradients, between the same
    replicate: BlockFormat | None = None  # Reduced gradients, between replicas of the shards
    error_feedback: bool = False  # For gradients


class QuantizedTransport(PlainTransport):
    """Quantizes the messages that have a format; a group of one rank sends nothing, and rounds nothing."""

    def __init__(self, groups: ShardGroups, formats: WireFormats) -> None:
        super().__init__(groups)
        self.formats = formats
        # Of the reduce-scatter, and of the two halves of the all-reduce between replicas.
        self.feedback = [ErrorFeedback() for _ in range(3)] if formats.error_feedback else []
        has_replicas = self.replicas.size > 1
        self.traits = replace(
            self.traits,
            gathers_messages=formats.gather is not None and self.group.size > 1,
            replicates_in_halves=formats.replicate is not None and has_replicas,
            reduces_messages_late=(formats.reduce or formats.replicate) is not None and has_replicas,
        )

    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        """As of every transport; the messages become the output when the work is waited for."""
        block_format, group, deferred = self.formats.gather, self.group, self.deferred
        if block_format is None or group.size == 1:
            return super().all_gather(all_gather_input, all_gather_output, tag=tag, copies_input=copies_input)
        numel = len(all_gather_input)
        messages = new_messages(group.size, numel, block_format, all_gather_output.device)
        shards = all_gather_output.view(group.size, numel)

        def fill(_: Tensor) -> Tensor:
            deferred.attempt(lambda: dequantize(messages, numel, block_format, out=shards))
            return all_gather_output

        work = all_gather_quantized(messages, all_gather_input, group, block_format, tag=tag, deferred=deferred)
        return work.then(fill)

    def new_all_gather_input(self, shard: Tensor, all_gather_output: Tensor) -> Tensor:
        if self.formats.gather is None or self.group.size == 1:
            return super().new_all_gather_input(shard, all_gather_output)
        return torch.empty(shard.shape, dtype=shard.dtype, device=all_gather_output.device)

    def reduce(
        self, reduce_scatter_input: Tensor, dtype: torch.dtype, *, tag: int = UNTAGGED, divisor: float | None = None
    ) -> ReduceWork:
        full, numel = reduce_scatter_input, reduce_scatter_input.numel() // self.group.size
        second_half = self._replicate_quantized(numel, full.device, divisor, tag)  # Its memory comes first.
        if self.formats.reduce is None or self.group.size == 1 or not numel:
            reduction = super().reduce(full, dtype, tag=tag, divisor=divisor)
        else:
            mean = QuantizedMean(self.group, self.formats.reduce, divisor, tag, self.deferred)
            work = reduce_scatter_quantized(full, mean, dtype=dtype, feedback=self.scatter_feedback)
            reduction = ReduceWork(work, full, self.replicate(divisor) if self.replicas.size > 1 else None)
        return reduction if second_half is None else reduction._replace(second_half=second_half)

    @property
    def scatter_feedback(self) -> ErrorFeedback | None:
        """The rounding errors of the reduce-scatter, if they are kept."""
        return self.feedback[0] if self.feedback else None

    def _replicate_quantized(
        self, numel: int, device: torch.device, divisor: float | None, tag: int
    ) -> Callable[[Tensor], CollectiveWork] | None:
        """As `replicate`, of quantized messages of `numel` values; None where these are not quantized."""
        replicas, block_format = self.replicas, self.formats.replicate
        if block_format is None or replicas.size == 1 or not numel:
            return None
        # Memory for messages, taken now: a rank that has none then could not answer the others.
        messages = ReduceMessages.new(replicas, part_size(numel, replicas), block_format, device)
        mean = QuantizedMean(replicas, block_format, replicas.size if divisor is None else 1, tag, self.deferred)
        feedback = (self.feedback[1], self.feedback[2]) if self.feedback else None
        return lambda reduced: all_reduce_quantized(reduced, mean, feedback=feedback, messages=messages)
