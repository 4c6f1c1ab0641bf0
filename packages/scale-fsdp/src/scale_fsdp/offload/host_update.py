"""One update of parameters whose optimizer state stands in two places.

The device gets its share first: it computes while the host is busy. The host's share goes by in buckets of some
megabytes: while one is updated, the next one arrives and the last one leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from scale_fsdp.offload.host_kernel import PIECE_ELEMENTS, HostPiece, HostStep, multiply
from scale_fsdp.offload.inner_optimizer import BareOptimizer
from scale_fsdp.offload.placement import Part, ranges
from scale_fsdp.offload.transfer import Ferry, Load, Stretch


class OffloadUpdate:
    """Updates parts of parameters where their state is.

    Args:
        optim_cls: The class of the optimizer.
        settings: Its constructor's arguments, without the parameters.
    """

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._device_step = BareOptimizer(optim_cls, settings)
        self._host_step = HostStep(optim_cls, settings)
        self._ferries: dict[torch.device, Ferry] = {}

    @property
    def defaults(self) -> dict[str, Any]:
        """The options of a group that sets none."""
        return self._device_step.defaults

    def complete(self, groups: list[dict[str, Any]]) -> None:
        """Gives groups that were loaded the options that they lack."""
        self._device_step.complete(groups)

    def ferry(self, device: torch.device) -> Ferry:
        """What copies between this device and the host."""
        if device not in self._ferries:
            self._ferries[device] = Ferry(device)
        return self._ferries[device]

    @torch.no_grad()
    def run(self, parts: Sequence[Part], early: Mapping[Part, Tensor], factor: float) -> None:
        """Updates parts that have gradients.

        Args:
            parts: Those on the device, and those on the host.
            early: Gradients of parts that have arrived on the host before, in the shapes of their parts.
            factor: What gradients are multiplied by; those on the device are changed by that.
        """
        self.on_device([part for part in parts if not part.on_host], factor)
        under_way: deque[Load] = deque()
        try:
            for bucket in buckets(part for part in parts if part.on_host and not part.stands_on_host()):
                under_way.append(self.fetch(bucket, early))
                if len(under_way) > 1:
                    self.finish(under_way.popleft(), factor)
            while under_way:
                self.finish(under_way.popleft(), factor)
        finally:
            for load in under_way:  # After an error: a slot that does not come back would be waited for without end.
                self._ferry_of(load).give_back(load)
        self._in_place([part for part in parts if part.on_host and part.stands_on_host()], factor)
        self.join()

    def _in_place(self, parts: Sequence[Part], factor: float) -> None:
        """Updates parts of parameters that are on the host themselves: nothing has to be copied."""
        for members in _alike(parts):
            pieces = [
                HostPiece(
                    part.of(part.param),
                    part.of(part.grad),
                    part.state,
                    None if part.target is None else part.of(part.target),
                )
                for part in members
            ]
            self._host_step.step(pieces, members[0].group, factor)
        # Fused kernels change tensors without a new version, by which others know that what they have is stale.
        increment_version({part.param for part in parts})

    @torch.no_grad()
    def on_device(self, parts: Sequence[Part], factor: float = 1.0) -> None:
        """Updates parts whose state is on their parameters' device."""
        for members in _alike(parts):
            params = [part.of(part.param) for part in members]
            grads = [part.of(part.grad) for part in members]
            if factor != 1.0:
                multiply(grads, factor)
            options = {k: v for k, v in members[0].group.items() if k not in ("params", "param_names")}
            self._device_step.step(params, grads, [part.state for part in members], options)
            for part in members:
                if part.target is not None:
                    part.of(part.target).copy_(part.of(part.param))

    def fetch(self, bucket: Sequence[Stretch], early: Mapping[Part, Tensor]) -> Load:
        """Begins to bring a bucket to the host."""
        return self.ferry(bucket[0].part.param.device).fetch(bucket, early)

    @torch.no_grad()
    def finish(self, load: Load, factor: float = 1.0) -> None:
        """Updates a bucket on the host, and begins to bring it back."""
        ferry = self._ferry_of(load)
        try:
            load.arrived.synchronize()
            self._host_step.step(load.pieces, load.stretches[0].part.group, factor)
            for stretch, piece in zip(load.stretches, load.pieces, strict=True):
                stretch.part.keep(stretch.start, stretch.stop, piece.state)
            ferry.bring_back(load)
            increment_version({stretch.part.param for stretch in load.stretches})
        finally:
            ferry.give_back(load)

    def _ferry_of(self, load: Load) -> Ferry:
        return self.ferry(load.stretches[0].part.param.device)

    def join(self) -> None:
        """What is computed from now on, anywhere, sees the new values."""
        for ferry in self._ferries.values():
            ferry.join()


def _alike(parts: Iterable[Part]) -> Iterable[list[Part]]:
    """The parts by group and dtypes."""
    found: dict[tuple[int, torch.dtype, torch.dtype], list[Part]] = {}
    for part in parts:
        found.setdefault((id(part.group), part.param.dtype, part.grad.dtype), []).append(part)
    return found.values()


def buckets(parts: Iterable[Part]) -> Iterator[list[Stretch]]:
    """Yields the parts' elements in order, in buckets of one group, device and dtype of about `PIECE_ELEMENTS`."""
    bucket: list[Stretch] = []
    size, kind = 0, None
    for part in parts:
        pieces = ranges(part.numel, PIECE_ELEMENTS) if part.divisible else [(0, part.numel)]
        for start, stop in pieces:
            new_kind = id(part.group), part.param.device, part.param.dtype, part.grad.dtype
            if bucket and (new_kind != kind or size + stop - start > PIECE_ELEMENTS):
                yield bucket
                bucket, size = [], 0
            bucket.append(Stretch(part, start, stop))
            size, kind = size + stop - start, new_kind
    if bucket:
        yield bucket
