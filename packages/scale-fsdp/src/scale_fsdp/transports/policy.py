"""Which of the transports a flat buffer has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scale_core.flat.buffer import FlatBuffer, PlainTransport
from scale_core.flat.config import ShardGroups
from scale_core.flat.layout import ShardSpan
from scale_core.flat.transport import ShardTransport
from scale_fsdp.transports.float8 import Float8Transport, Float8Weight
from scale_fsdp.transports.hierarchical import HierarchicalTransport
from scale_fsdp.transports.quantized import QuantizedTransport, WireFormats


@dataclass(frozen=True)
class WirePolicy:
    """How one flat buffer is sent; the `TransportPolicy` of scale-fsdp.

    Attributes:
        formats: Of quantized messages; None quantizes nothing.
        float8: How torchao computes with each parameter, where they are gathered in fp8 for that; else empty.
    """

    formats: WireFormats | None = None
    float8: Sequence[Float8Weight] = ()

    def transport(self, groups: ShardGroups, spans: Sequence[ShardSpan]) -> ShardTransport:
        transport = self._quantized(groups)
        if not self.float8 or groups.shard.size == 1:
            return transport
        return Float8Transport(transport, self.float8, spans, groups.shard)

    def _quantized(self, groups: ShardGroups) -> ShardTransport:
        if self.formats is None:
            return PlainTransport(groups)
        if groups.nodes is None:
            return QuantizedTransport(groups, self.formats)
        if groups.nodes.inter_node.size > 1:
            return HierarchicalTransport(groups, groups.nodes, self.formats)
        return QuantizedTransport(groups, replace(self.formats, gather=None, reduce=None))  # All are one node.


def wire_formats(buffer: FlatBuffer) -> WireFormats | None:
    """The formats of a buffer's quantized messages; None where nothing is quantized."""
    policy = buffer.transport_policy
    return policy.formats if isinstance(policy, WirePolicy) else None


def float8_weights(buffer: FlatBuffer) -> Sequence[Float8Weight]:
    """How torchao computes with a buffer's parameters, where they are gathered in fp8; else empty."""
    policy = buffer.transport_policy
    return policy.float8 if isinstance(policy, WirePolicy) else ()
