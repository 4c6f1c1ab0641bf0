"""Reduce-scatter of flat gradients, and the gradients of the shard that an optimizer sees.

Reduced gradients are published to `.grad` only when the pass has succeeded on every rank: an optimizer must not see
half of a pass, and a failed pass must leave no trace in a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence

import torch
from torch import Tensor, nn

from scale_core import buffer_pool, uneven_inputs
from scale_core.autograd_hooks import call_local_grad_hooks, local_grad_hooks
from scale_core.comm.collectives import CollectiveWork, all_reduce, reduce_scatter
from scale_core.comm.group import Group
from scale_core.flat.gradient import FlatGradient
from scale_core.flat.layout import FlatLayout
from scale_core.flat.shard_storage import DevicePolicy, FlatShard, ShardGroups
from scale_core.streams import HostStream, Stream, StreamEvent, copy_over, copy_to, stream_for


class Reduction:
    """Averages flat gradients of W * S elements over the ranks; keeps this rank's S elements of the results."""

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
        self._scattering: CollectiveWork | None = None
        self._flat: Tensor | None = None
        self._replicating: CollectiveWork | None = None
        self._copies = replicas.size  # what the sum over the replicas is still to be divided by
        self._reduced: list[tuple[Tensor, StreamEvent | None]] = []  # [S] each; the copy that brings it to its device

    def start(self, gradient: Tensor, tag: int = 0, divisor: int | None = None) -> None:
        """Starts to average a flat gradient [W * S] in its own dtype; the reduction owns it from now on."""
        assert self._scattering is None, "a reduction is under way already"
        self._copies = self._replicas.size if divisor is None else 1
        self._scattering = reduce_scatter(
            gradient, self._group, dtype=self._dtype, divisor=divisor, sizes=self._sizes, tag=tag
        )
        self._flat = gradient

    def wait(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduce-scatter, if one was started, and frees its flat gradient."""
        if self._scattering is None:
            return
        pending, self._scattering = self._scattering, None
        flat, self._flat = self._flat, None
        reduced = pending.wait(limit_seconds)
        if flat is not None and flat.nbytes >= buffer_pool.SMALLEST_BYTES:
            buffer_pool.free_unshared(flat)
        if self._replicas.size > 1:
            self._wait_replicated(limit_seconds)
            self._replicating = all_reduce(reduced, self._replicas)
        else:
            self._keep(reduced)

    def results(self, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns what was reduced since the last call, each [S], in the order of `start`."""
        if self._scattering is not None:
            self.wait(limit_seconds)
        self._wait_replicated(limit_seconds)
        reduced, self._reduced = self._reduced, []
        for _, copied in reduced:
            if copied is not None:
                copied.synchronize()
        return [gradient for gradient, _ in reduced]

    def cancel(self) -> None:
        """After an error: cancels every transfer and drops every result."""
        for pending in (self._scattering, self._replicating):
            if pending is not None:
                pending.cancel()
        self._scattering = self._replicating = self._flat = None
        self._reduced = []

    def _wait_replicated(self, limit_seconds: float | None) -> None:
        if self._replicating is not None:
            pending, self._replicating = self._replicating, None
            self._keep(pending.wait(limit_seconds).div_(self._copies))

    def _keep(self, reduced: Tensor) -> None:
        """Keeps a result, on the device of the results."""
        if reduced.device == self._device:
            self._reduced.append((reduced, None))
        else:
            copy = copy_to(reduced, self._device, self._stream)
            self._reduced.append((copy, self._stream.record()))


@functools.cache
def copy_stream(device: torch.device, what: str) -> Stream:
    """The stream for one kind of copies; those to a device and back run side by side."""
    return stream_for(device)


class FlatReduced(FlatShard):
    """The gradients of parameters that are sharded over a group."""

    gradient: FlatGradient  # This rank's own gradients, before they are reduced
    reduction: Reduction  # What they have become, until `commit`
    _unpublished: list[tuple[nn.Parameter, Tensor]]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        return any(param.requires_grad for param in self.sharded_params)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self.gradient)

    def reduce(self, tag: int = 0) -> None:
        """Starts to average the local gradients over the ranks in `reduce_dtype`; missing ones count as zeros."""
        # So does all of it on a rank that has run out of data (see `join`).
        share = uneven_inputs.active_share
        if share is not None and not share.weight:
            self.gradient.drop()
        if local_grad_hooks:
            self._report_local_grads()
        gradient = self.gradient.take(self.compute_device)
        if share is not None and share.weight not in (0, 1):
            gradient.mul_(share.weight)
        self.reduction.start(gradient.to(self.reduce_dtype), tag, None if share is None else share.divisor)

    def wait_reduced(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduction, if there is one; its result is kept until `commit`."""
        self.reduction.wait(limit_seconds)

    def wait_results(self, limit_seconds: float | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        """Waits for what was reduced since the last call; returns it by sharded parameter, in local shapes."""
        new: list[tuple[nn.Parameter, Tensor]] = []
        for reduced in self.reduction.results(limit_seconds):
            if reduced.device != self.shard.device:
                reduced = copy_over(reduced, self.shard.device, self._grad_stream)
            if self.flatten:
                new.append((self.sharded_params[0], reduced))
                continue
            for param, span in zip(self.sharded_params, self.spans, strict=True):
                new.append((param, reduced.narrow(0, span.shard_offset, span.numel).view(span.shape)))
        self._unpublished += new
        return new

    def publish_grads(self, params: Container[Tensor] | None = None) -> None:
        """Adds kept results to the `.grad` of these sharded parameters; None is all."""
        aside, self._unpublished = self._unpublished, []
        for param, gradient in aside:
            if params is not None and param not in params:
                self._unpublished.append((param, gradient))
            elif param.requires_grad or self.flatten:
                if param.grad is None:
                    param.grad = gradient
                else:
                    param.grad.add_(gradient)

    def commit(self, limit_seconds: float | None = None) -> None:
        """Publishes all reduced gradients, and adds local ones that were not reduced to the accumulated sum."""
        # Own gradients that were not reduced join those that wait for a later reduction.
        self.wait_results(limit_seconds)
        self.publish_grads()
        if local_grad_hooks and self.gradient.has_begun:
            self._report_local_grads()
        self.gradient.commit_pass()

    # What these are made of.

    def _report_local_grads(self) -> None:
        """Calls the local gradient hooks with the current pass, without the sum of earlier ones."""
        indices, flat = self.gradient.pass_gradient()
        if self.flatten:
            call_local_grad_hooks(
                self.sharded_params if indices else [], [flat] if flat is not None and indices else []
            )
        else:
            call_local_grad_hooks(
                [self.sharded_params[i] for i in indices],
                [self._view(flat, i) for i in indices] if flat is not None else [],
            )

    def _plan(self, layout: FlatLayout, groups: ShardGroups, devices: DevicePolicy) -> None:
        super()._plan(layout, groups, devices)
        stays = devices.shard == devices.compute == devices.reduced
        self._grad_stream: Stream = HostStream() if stays else copy_stream(self.compute_device, "gradients")

    def _init_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Makes the empty gradient and its reduction."""
        wide = torch.promote_types(self.reduce_dtype, self.dtype)
        self.gradient = FlatGradient(params, self.layout, self.reduce_dtype, wide)
        self.gradient.names = self.names
        self._unpublished = []
        assert self.devices.reduced is not None
        where = self.devices.reduced, self._grad_stream
        self.reduction = Reduction(self.group, self.groups.replicas, self.dtype, *where)

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        """A parameter's view of a buffer [W * S], in its full shape."""
        entry = self.layout.entries[index]
        return buffer.narrow(0, entry.offset, entry.numel).view(entry.shape)
