"""The flat buffers of this process, for simulated runs, which count their memory, and for writes to their shards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from scale_core.flat.buffer import FlatBuffer, State
from scale_core.optim.step_checks import shard_owners


def _live_flat_buffers() -> list[FlatBuffer]:
    return [owner for owner in shard_owners() if isinstance(owner, FlatBuffer)]


def live_buffers() -> Iterator[tuple[str, Tensor]]:
    """Yields every flat tensor that exists now: "shard" [S], "gathered" [W * S], "gradient" [W * S]."""
    for buffer in _live_flat_buffers():
        yield "shard", buffer.shard
        if buffer.state is not State.SHARDED and not buffer.is_aliased:
            yield "gathered", buffer.full
        if buffer.part is not None:
            yield "gathered", buffer.part
        for gradient in (buffer.gradient.flat, buffer.gradient.accumulated):
            if gradient is not None:
                yield "gradient", gradient


def wait_sent() -> None:
    """Waits until every shard may be written to; see `FlatBuffer.wait_sent`."""
    for buffer in _live_flat_buffers():
        buffer.wait_sent()
