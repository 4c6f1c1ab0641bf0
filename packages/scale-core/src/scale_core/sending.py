"""The way of a shard that stands on the host to the device that computes with it.

The copy runs beside the computation, on a stream of its own, and beside the host: when it has been started, the host
goes on. So there is a moment at which the shard may be written to again, and not before.

Where the device computes in another dtype, the shard is cast there, piece by piece. The host would be busy with that:
one of its cores casts some 1.7 billion elements per second, and as many fp32 elements take a seventh of that time to
cross a link of 50 GB/s, twice the bytes of bf16. A copy in the other dtype that is kept on the host would cost 2 bytes
per parameter, and a whole one on the device 4 for each of a unit's elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scale_core.streams import Event, Stream, copy_into

PIECE_ELEMENTS = 1 << 24
"""How many elements are cast at once: 64 MiB of fp32 stand on the device beside the parameters."""


class Sending:
    """Copies of one shard to the device, on a stream.

    Args:
        stream: Of the device; on it stands all that follows a copy as well.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sent: Event | None = None

    def start(self, shard: Tensor, target: Tensor) -> None:
        """Starts to copy; to be called inside of `stream.run()`.

        Args:
            shard: [S] on the host, pinned where the device is a CUDA device.
            target: [S] on the device, of any dtype.
        """
        if shard.dtype == target.dtype:
            copy_into(target, shard)
        elif shard.numel():
            size = min(PIECE_ELEMENTS, shard.numel())
            room = torch.empty(size, dtype=shard.dtype, device=target.device)
            for source, place in zip(shard.split(size), target.split(size), strict=True):
                piece = room[: source.numel()]
                copy_into(piece, source)
                place.copy_(piece)
        self._sent = self._stream.record()

    def wait(self) -> None:
        """Returns when the shard may be written to: all copies of it have ended."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
