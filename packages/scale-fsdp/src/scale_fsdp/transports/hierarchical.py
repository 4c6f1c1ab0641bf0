"""Quantized messages between nodes only: inside a node, values are sent as they are.

With N nodes of L ranks, a rank receives one shard from each other node, and the ranks of a node pass these on to each
other. Gradients are averaged inside a node first.

    all_gather   quantized between nodes, [S] -> [N, S]     then in the node, [N, S] -> [L, N, S]
    reduce       in the node, [L, N, S] -> [N, S]           then quantized between nodes, [N, S] -> [S]

The second half of a reduction runs during the backward of the next unit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scale_core.comm.collectives import UNTAGGED, all_gather, reduce_scatter
from scale_core.comm.work import CollectiveWork
from scale_core.flat.config import NodeGroups, ShardGroups
from scale_core.flat.transport import ReduceWork
from scale_fsdp.transports.blocks import dequantize
from scale_fsdp.transports.quantized import QuantizedTransport, WireFormats
from scale_fsdp.transports.quantized_collectives import (
    QuantizedMean,
    ReduceMessages,
    all_gather_quantized,
    new_messages,
    reduce_scatter_quantized,
)


class HierarchicalTransport(QuantizedTransport):
    """Quantizes between nodes, of which there are at least two."""

    def __init__(self, groups: ShardGroups, nodes: NodeGroups, formats: WireFormats) -> None:
        super().__init__(groups, formats)
        self.nodes = nodes
        gathers, reduces = formats.gather is not None, formats.reduce is not None
        self.traits = replace(
            self.traits, gathers_in_halves=gathers, reduces_in_halves=reduces, reduces_messages_late=reduces
        )

    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        block_format, deferred = self.formats.gather, self.deferred
        if block_format is None:
            return super().all_gather(all_gather_input, all_gather_output, tag=tag, copies_input=copies_input)
        inter_node, intra_node, numel = self.nodes.inter_node, self.nodes.intra_node, len(all_gather_input)
        messages = new_messages(inter_node.size, numel, block_format, all_gather_output.device)
        # Memory for the second half, taken now: a rank that has none then could not answer the others.
        by_local_rank = torch.empty_like(all_gather_output)

        def gather_inside(_: Tensor) -> CollectiveWork:
            shards = by_local_rank.view(intra_node.size, -1)[intra_node.rank]
            deferred.fill(shards, lambda: dequantize(messages, numel, block_format, out=shards.view(-1, numel)))
            return all_gather(by_local_rank, shards, intra_node, tag=tag).then(order_by_rank)

        def order_by_rank(_: Tensor) -> Tensor:
            by_node = all_gather_output.view(inter_node.size, intra_node.size, numel)
            by_node.copy_(by_local_rank.view(intra_node.size, inter_node.size, numel).transpose(0, 1))
            return all_gather_output

        work = all_gather_quantized(messages, all_gather_input, inter_node, block_format, tag=tag, deferred=deferred)
        return work.then(gather_inside)

    def reduce(
        self, reduce_scatter_input: Tensor, dtype: torch.dtype, *, tag: int = UNTAGGED, divisor: float | None = None
    ) -> ReduceWork:
        block_format, inter_node, intra_node = self.formats.reduce, self.nodes.inter_node, self.nodes.intra_node
        if block_format is None or not reduce_scatter_input.numel():
            return super().reduce(reduce_scatter_input, dtype, tag=tag, divisor=divisor)
        by_node = reduce_scatter_input.view(inter_node.size, intra_node.size, -1)
        by_local_rank = by_node.transpose(0, 1).reshape(-1)
        # Memory for the second half, taken now: a rank that has none then could not answer the others.
        messages = ReduceMessages.new(inter_node, by_node.shape[2], block_format, by_node.device)
        divisor = None if divisor is None else divisor / intra_node.size
        mean = QuantizedMean(inter_node, block_format, divisor, tag, self.deferred)

        def scatter_between_nodes(reduced: Tensor) -> CollectiveWork:
            return reduce_scatter_quantized(
                reduced, mean, dtype=dtype, feedback=self.scatter_feedback, messages=messages
            )

        work = reduce_scatter(by_local_rank, intra_node, dtype=torch.float32, tag=tag)
        return ReduceWork(work, by_local_rank, scatter_between_nodes)
