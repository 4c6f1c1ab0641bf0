"""The reduction of one flat buffer's gradients: from this rank's own, whole, to its shard of their average.

It runs beside the backward pass of other buffers, and its result waits until the whole pass is known to have gone
well on every rank: only then does it touch a gradient that an optimizer sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core import buffer_pool
from scale_core.collectives import Pending, all_reduce, reduce_scatter
from scale_core.group import Group
from scale_core.streams import Event, HostStream, Stream, copy_to


class _Arrival(NamedTuple):
    """A reduced gradient [S], and the copy that brings it to where it waits."""

    gradient: Tensor
    copied: Event


class Reduction:
    """Averages flat gradients of W * S elements over the ranks, and keeps this rank's S elements of the results.

    Args:
        group: The W ranks, each of which gets its part.
        replicas: The ranks that get the same part as this one, in other copies of the model; of size 1 without such.
        dtype: Of the results.
        device: Where the results wait.
        stream: On which they are copied there.
        sizes: How many elements each rank gets, by rank; None is S each.
    """

    def __init__(
        self,
        group: Group,
        replicas: Group,
        dtype: torch.dtype,
        device: torch.device,
        stream: Stream,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._sizes = sizes
        self._group, self._replicas = group, replicas
        self._dtype, self._device, self._stream = dtype, device, stream
        self._scattering: Pending | None = None
        self._flat: Tensor | None = None
        self._replicating: Pending | None = None
        self._copies = replicas.size  # what the sum over the replicas is still to be divided by
        self._arrived: list[_Arrival] = []

    def start(self, gradient: Tensor, tag: int = 0, divisor: int | None = None) -> None:
        """Starts to average a flat gradient [W * S] in its own dtype; it belongs to the reduction from now on.

        Args:
            gradient: This rank's own.
            tag: What the reduction is for, as in `reduce_scatter`.
            divisor: What to divide by; None is the number of all ranks, replicas too.
        """
        assert self._scattering is None, "a reduction is under way already"
        self._copies = self._replicas.size if divisor is None else 1
        self._scattering = reduce_scatter(
            gradient, self._group, dtype=self._dtype, divisor=divisor, sizes=self._sizes, tag=tag
        )
        self._flat = gradient

    def wait(self, limit_seconds: float | None = None) -> None:
        """Waits for what was started, if anything was, so that its flat gradient is free.

        Raises:
            TransferError: See `Pending.wait`.
        """
        if self._scattering is None:
            return
        pending, self._scattering = self._scattering, None
        flat, self._flat = self._flat, None
        reduced = pending.wait(limit_seconds)
        if flat is not None:
            buffer_pool.free_unshared(flat)
        if self._replicas.size > 1:
            self._wait_replicated(limit_seconds)
            self._replicating = all_reduce(reduced, self._replicas)
        else:
            self._bring(reduced)

    def results(self, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns what was reduced since the last call, each [S], in the order of `start`.

        Raises:
            TransferError: See `Pending.wait`.
        """
        self.wait(limit_seconds)
        self._wait_replicated(limit_seconds)
        arrived, self._arrived = self._arrived, []
        for arrival in arrived:
            arrival.copied.synchronize()
        return [arrival.gradient for arrival in arrived]

    def abandon(self) -> None:
        """After an error: gives up every transfer and every result."""
        for pending in (self._scattering, self._replicating):
            if pending is not None:
                pending.abandon()
        self._scattering = self._replicating = self._flat = None
        self._arrived = []

    def _wait_replicated(self, limit_seconds: float | None) -> None:
        if self._replicating is not None:
            pending, self._replicating = self._replicating, None
            self._bring(pending.wait(limit_seconds).div_(self._copies))

    def _bring(self, reduced: Tensor) -> None:
        if reduced.device == self._device:
            self._arrived.append(_Arrival(reduced, HostStream().record()))
        else:
            copy = copy_to(reduced, self._device, self._stream)
            self._arrived.append(_Arrival(copy, self._stream.record()))
