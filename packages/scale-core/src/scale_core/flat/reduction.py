"""From a rank's own gradients of whole parameters to the gradients of its shard, which an optimizer sees.

What was reduced stands aside until the pass has gone well on every rank: an optimizer must not see half of a pass, and
a pass that fails must leave no trace in a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_core import buffer_pool
from scale_core.autograd_hooks import local_grads_wanted, report_local_grads
from scale_core.comm.collectives import Pending, all_reduce, reduce_scatter
from scale_core.comm.group import Group
from scale_core.flat.gradient import FlatGradient
from scale_core.flat.layout import FlatLayout
from scale_core.flat.shard_storage import Devices, FlatShard, Groups
from scale_core.streams import Event, HostStream, Stream, copy_over, copy_to, stream_for
from scale_core.uneven_inputs import current_share


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


@functools.cache
def copy_stream(device: torch.device, what: str) -> Stream:
    """The stream on which copies of one kind run; the ways to a device and back can be used at the same time."""
    return stream_for(device)


class FlatReduced(FlatShard):
    """The gradients of parameters that are sharded over a group.

    Attributes:
        gradient: This rank's own gradients of the wholes, before they are reduced.
        reduction: What they have become, until `commit`.
    """

    gradient: FlatGradient
    reduction: Reduction
    _aside: list[tuple[nn.Parameter, Tensor]]

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self.gradient)

    def reduce(self, tag: int = 0) -> None:
        """Starts to average the own gradients over the ranks, in `reduce_dtype`; what has none counts as zeros.

        So does all of it on a rank that has run out of data (see `join`).
        """
        share = current_share()
        if share is not None and not share.weight:
            self.gradient.drop()
        if local_grads_wanted():
            self._report_local_grads()
        gradient = self.gradient.take(self.compute_device)
        if share is not None and share.weight not in (0, 1):
            gradient.mul_(share.weight)
        self.reduction.start(gradient.to(self.reduce_dtype), tag, None if share is None else share.divisor)

    def wait_reduced(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduction, if there is one; its result waits for `commit`.

        Raises:
            TransferError: See `Pending.wait`.
        """
        self.reduction.wait(limit_seconds)

    def set_aside(self, limit_seconds: float | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        """Waits for what was reduced since the last call, and returns it by exposed parameter, in their shapes.

        It stands aside until `hand_out` or `commit`; until then it may be read.

        Raises:
            TransferError: See `Pending.wait`.
        """
        new: list[tuple[nn.Parameter, Tensor]] = []
        for reduced in self.reduction.results(limit_seconds):
            if reduced.device != self.shard.device:
                reduced = copy_over(reduced, self.shard.device, self._grad_stream)
            new += self._by_exposed(reduced)
        self._aside += new
        return new

    def hand_out(self, params: Container[Tensor] | None = None) -> None:
        """Adds what stands aside to the gradients of these exposed parameters; None is all."""
        aside, self._aside = self._aside, []
        for param, gradient in aside:
            if params is not None and param not in params:
                self._aside.append((param, gradient))
            elif param.requires_grad or self.flatten:
                _add_to_grad(param, gradient)

    def commit(self, limit_seconds: float | None = None) -> None:
        """Adds all that was reduced since the last commit to the gradients of the exposed parameters.

        Own gradients that were not reduced join those that wait for a later reduction.

        Raises:
            TransferError: See `Pending.wait`.
        """
        self.set_aside(limit_seconds)
        self.hand_out()
        if local_grads_wanted() and self.gradient.has_begun:
            self._report_local_grads()
        self.gradient.settle()

    # What these are made of.

    def _report_local_grads(self) -> None:
        """Tells of the gradients of the pass that runs now, without the sum of those before it."""
        indices, flat = self.gradient.of_pass()
        if self.flatten:
            report_local_grads(self.exposed if indices else [], [flat] if flat is not None and indices else [])
        else:
            report_local_grads(
                [self.exposed[i] for i in indices], [self._view(flat, i) for i in indices] if flat is not None else []
            )

    def _plan(self, layout: FlatLayout, groups: Groups, devices: Devices) -> None:
        super()._plan(layout, groups, devices)
        stays = devices.shard == devices.compute == devices.reduced
        self._grad_stream: Stream = HostStream() if stays else copy_stream(self.compute_device, "gradients")

    def _furnish_gradients(self, wholes: Sequence[nn.Parameter]) -> None:
        """No gradient yet, and whatever brings one from the wholes to the shard."""
        wide = torch.promote_types(self.reduce_dtype, self.dtype)
        self.gradient = FlatGradient(wholes, self.layout, self.reduce_dtype, wide)
        self.gradient.names = self.names
        self._aside = []
        assert self.devices.reduced is not None
        where = self.devices.reduced, self._grad_stream
        self.reduction = Reduction(self.group, self.groups.replicas, self.dtype, *where)

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        """A parameter's place in a buffer [W * S], in its full shape."""
        entry = self.layout.entries[index]
        return buffer.narrow(0, entry.offset, entry.numel).view(entry.shape)


def _add_to_grad(param: nn.Parameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
