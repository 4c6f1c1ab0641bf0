"""A shard on the host that is computed with on a device: its way there, on a stream of its own.

The copy runs while the device and the host compute, and the shard may be written to again when it has ended. Where the
device computes in another dtype, it casts the shard, piece by piece: one core of the host casts some 1.7 billion
elements per second, and as many fp32 elements take a seventh of that time to cross a link of 50 GB/s. A copy in the
other dtype would cost the host 2 bytes per parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scale_core.comm.collectives import UNTAGGED
from scale_core.comm.work import CollectiveWork
from scale_core.device.streams import Stream, StreamEvent, copy_into
from scale_core.flat.transport import ReduceWork, ShardTransport

PIECE_ELEMENTS = 1 << 24
"""How many elements are cast at once: 64 MiB of fp32 stand on the device beside the parameters."""


class HostToDeviceCopy:
    """Copies of one shard from the host to the device, on a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._sent: StreamEvent | None = None

    def start(self, shard: Tensor, target: Tensor) -> None:
        """Starts to copy `shard` [S] to `target` [S] of any dtype; called inside of `stream.run()`."""
        if shard.dtype == target.dtype:
            copy_into(target, shard)
        elif shard.numel():
            size = min(PIECE_ELEMENTS, shard.numel())
            room = torch.empty(size, dtype=shard.dtype, device=target.device)
            for source, target_piece in zip(shard.split(size), target.split(size), strict=True):
                piece = room[: source.numel()]
                copy_into(piece, source)
                target_piece.copy_(piece)
        self._sent = self.stream.record()

    def wait(self) -> None:
        """Waits until the shard may be written to: all copies of it have ended."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None


class HostStagedTransport(ShardTransport):
    """Copies the shard from the host to the device, and gathers it there by another transport.

    Args:
        transport: That which sends it.
        copies: Of the shard; its stream is where the gather starts.
    """

    def __init__(self, transport: ShardTransport, copies: HostToDeviceCopy) -> None:
        self.inner, self.copies = transport, copies
        self.traits, self.deferred, self.feedback = transport.traits, transport.deferred, transport.feedback
        self.all_gather_dtype = transport.all_gather_dtype

    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        stream = self.copies.stream
        if self.traits.reads_shard_late:
            # Work with it runs on the caller's stream, which collectives wait for.
            local_shard = self.inner.new_all_gather_input(all_gather_input, all_gather_output)
            with stream.run():
                self.copies.start(all_gather_input, local_shard)
            stream.join()
            return self.inner.all_gather(local_shard, all_gather_output, tag=tag)
        with stream.run():  # The collective starts there, when the shard has arrived.
            local_shard = self.inner.new_all_gather_input(all_gather_input, all_gather_output)
            self.copies.start(all_gather_input, local_shard)
            return self.inner.all_gather(local_shard, all_gather_output, tag=tag).then(self._join)

    def _join(self, all_gather_output: Tensor) -> Tensor:
        # Memory that was taken on that stream is used again in its next `run`, which waits for the caller.
        self.copies.stream.join()
        return all_gather_output

    def reduce(
        self, reduce_scatter_input: Tensor, dtype: torch.dtype, *, tag: int = UNTAGGED, divisor: float | None = None
    ) -> ReduceWork:
        return self.inner.reduce(reduce_scatter_input, dtype, tag=tag, divisor=divisor)

    def post_all_gather(self, index: int, unsharded_param: Tensor, data: Tensor) -> Tensor:
        return self.inner.post_all_gather(index, unsharded_param, data)
