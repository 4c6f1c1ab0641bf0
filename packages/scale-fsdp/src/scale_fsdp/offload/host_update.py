"""One update of parameters whose optimizer state is partly on the host and partly on the device.

The device starts first and computes while the host is busy. The host's share goes through in buckets of some megabytes:
while one is updated, the next one arrives and the last one leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from scale_fsdp.offload.host_kernel import CHUNK_ELEMENTS, HostChunk, HostKernel, InnerOptimizer, scale_grads
from scale_fsdp.offload.placement import StatePart, chunk_ranges
from scale_fsdp.offload.transfer import ElementRange, HostTransfer, TransferBucket


class OffloadUpdate:
    """Updates each part of a parameter where its state is."""

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self.device_optimizer = InnerOptimizer(optim_cls, settings)
        self._host_kernel = HostKernel(optim_cls, settings)
        self._transfers: dict[torch.device, HostTransfer] = {}

    def transfer_for(self, device: torch.device) -> HostTransfer:
        """The transfer between this device and the host."""
        if device not in self._transfers:
            self._transfers[device] = HostTransfer(device)
        return self._transfers[device]

    @torch.no_grad()
    def run(self, parts: Sequence[StatePart], early: Mapping[StatePart, Tensor], factor: float) -> None:
        """Updates parts that have gradients, multiplied by `factor`; `early` are gradients already on the host."""
        self.update_on_device([part for part in parts if not part.on_host], factor)
        in_flight: deque[TransferBucket] = deque()
        try:
            for ranges in buckets(part for part in parts if part.on_host and not part.param_on_host()):
                in_flight.append(self.fetch(ranges, early))
                if len(in_flight) > 1:
                    self.finish_bucket(in_flight.popleft(), factor)
            while in_flight:
                self.finish_bucket(in_flight.popleft(), factor)
        finally:
            for bucket in in_flight:  # After an error; a buffer that is not freed would be waited for forever.
                bucket.transfer.release(bucket)
        self._update_host_params([part for part in parts if part.on_host and part.param_on_host()], factor)
        self.join()

    def _update_host_params(self, parts: Sequence[StatePart], factor: float) -> None:
        """Updates parts whose parameters are on the host; nothing is copied."""
        for members in _by_group_and_dtype(parts):
            chunks = []
            for part in members:
                cast = None if part.cast_target is None else part.slice(part.cast_target)
                chunks.append(HostChunk(part.slice(part.param), part.slice(part.grad), part.state, cast))
            self._host_kernel.step(chunks, members[0].group, factor)
        # Fused kernels leave the version of a tensor as it is, and autograd would not notice the change.
        increment_version({part.param for part in parts})

    @torch.no_grad()
    def update_on_device(self, parts: Sequence[StatePart], factor: float = 1.0) -> None:
        """Updates parts whose state is on their parameters' device."""
        for members in _by_group_and_dtype(parts):
            params = [part.slice(part.param) for part in members]
            grads = [part.slice(part.grad) for part in members]
            if factor != 1.0:
                scale_grads(grads, factor)
            options = {k: v for k, v in members[0].group.items() if k not in ("params", "param_names")}
            self.device_optimizer.step(params, grads, [part.state for part in members], options)
            for part in members:
                if part.cast_target is not None:
                    part.slice(part.cast_target).copy_(part.slice(part.param))

    def fetch(self, ranges: Sequence[ElementRange], early: Mapping[StatePart, Tensor]) -> TransferBucket:
        """Starts to copy a bucket to the host."""
        return self.transfer_for(ranges[0].part.param.device).fetch(ranges, early)

    @torch.no_grad()
    def finish_bucket(self, bucket: TransferBucket, factor: float = 1.0) -> None:
        """Updates a bucket on the host and starts to copy it back."""
        try:
            bucket.ready.synchronize()
            self._host_kernel.step(bucket.chunks, bucket.ranges[0].part.group, factor)
            for part_range, chunk in zip(bucket.ranges, bucket.chunks, strict=True):
                part_range.part.store_state(part_range.start, part_range.stop, chunk.state)
            bucket.transfer.write_back(bucket)
            increment_version({part_range.part.param for part_range in bucket.ranges})
        finally:
            bucket.transfer.release(bucket)

    def join(self) -> None:
        """Makes the current streams wait for all copies back."""
        for transfer in self._transfers.values():
            transfer.join()


def _by_group_and_dtype(parts: Iterable[StatePart]) -> Iterable[list[StatePart]]:
    parts_by_kind: dict[tuple[int, torch.dtype, torch.dtype], list[StatePart]] = {}
    for part in parts:
        parts_by_kind.setdefault((id(part.group), part.param.dtype, part.grad.dtype), []).append(part)
    return parts_by_kind.values()


def buckets(parts: Iterable[StatePart]) -> Iterator[list[ElementRange]]:
    """Yields the parts' elements in order, in buckets of one group, device and dtype, of about `CHUNK_ELEMENTS`."""
    bucket: list[ElementRange] = []
    size, kind = 0, None
    for part in parts:
        spans = chunk_ranges(part.numel, CHUNK_ELEMENTS) if part.divisible else [(0, part.numel)]
        for start, stop in spans:
            new_kind = id(part.group), part.param.device, part.param.dtype, part.grad.dtype
            if bucket and (new_kind != kind or size + stop - start > CHUNK_ELEMENTS):
                yield bucket
                bucket, size = [], 0
            bucket.append(ElementRange(part, start, stop))
            size, kind = size + stop - start, new_kind
    if bucket:
        yield bucket
