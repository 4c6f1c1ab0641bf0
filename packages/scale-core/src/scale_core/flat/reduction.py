"""The reduction of one flat buffer's gradients, and those of the shard for an optimizer.

Reduced gradients are published to `.grad` only when the pass has succeeded on every rank: an optimizer must not see
half of a pass, and a failed pass must leave no trace in a sum. `gradient` has a rank's own gradients before that,
`transport` the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from scale_core import uneven_inputs
from scale_core.comm.collectives import UNTAGGED, CollectiveWork
from scale_core.device import buffer_pool
from scale_core.device.streams import Stream, StreamEvent, copy_over, copy_to, stream_for
from scale_core.flat.gradient import FlatGradient, view_of
from scale_core.flat.layout import FlatLayout
from scale_core.flat.shard_storage import DevicePolicy, FlatShard, ShardGroups
from scale_core.flat.transport import ReduceWork, ShardTransport
from scale_core.hooks.autograd import call_local_grad_hooks
from scale_core.hooks.registry import gradient_hooks
from scale_core.optim.error_feedback import ErrorFeedback
from scale_core.shard import as_local, on_local_tensors


class Reduction:
    """Averages flat gradients of W * S elements over the ranks; keeps this rank's S elements of the results.

    One reduction is under way at a time. Its second half, if the transport has one, runs on until the next one is
    waited for: during the backward of the next unit.

    Args:
        transport: The collectives.
        dtype: Of the results.
        device: Where results are kept.
        stream: Brings them there.
    """

    def __init__(self, transport: ShardTransport, dtype: torch.dtype, device: torch.device, stream: Stream) -> None:
        self.transport = transport
        self._dtype, self._device, self._stream = dtype, device, stream
        self.keeps_memory = True  # That of a large flat gradient is kept for the next one of its size.
        self._first_half: ReduceWork | None = None
        self._second_half: CollectiveWork | None = None
        self._reduced: list[tuple[Tensor, StreamEvent | None]] = []  # [S] each; the copy that brings it to its device

    def start(self, gradient: Tensor, tag: int = UNTAGGED, divisor: float | None = None) -> None:
        """Starts to average a flat gradient [W * S] in its own dtype; the reduction owns it from now on."""
        assert self._first_half is None, "a reduction is under way already"
        self._first_half = self.transport.reduce(gradient, self._dtype, tag=tag, divisor=divisor)

    def wait(self, limit_seconds: float | None = None) -> None:
        """Waits for the first half of a reduction, if one was started, and frees its flat gradient."""
        if self._first_half is None:
            return
        (work, flat, second_half), self._first_half = self._first_half, None
        reduced = work.wait(limit_seconds)
        if self.keeps_memory and flat.nbytes >= buffer_pool.SMALLEST_BYTES:
            buffer_pool.free_unshared(flat)
        if second_half is None:
            self._keep(reduced)
        else:
            self._wait_second_half(limit_seconds)
            self._second_half = second_half(reduced)
        self._check_error()

    def finish(self, limit_seconds: float | None = None) -> None:
        """Waits for both halves."""
        self.wait(limit_seconds)
        self._wait_second_half(limit_seconds)
        self._check_error()

    def results(self, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns the gradients reduced since the last call, each [S], in the order of `start`."""
        self.finish(limit_seconds)
        reduced, self._reduced = self._reduced, []
        for _, copied in reduced:
            if copied is not None:
                copied.synchronize()
        return [gradient for gradient, _ in reduced]

    def cancel(self) -> None:
        """After an error: cancels every transfer and drops every result."""
        if self._first_half is not None:
            self._first_half.work.cancel()
        if self._second_half is not None:
            self._second_half.cancel()
        self._first_half = self._second_half = None
        self._reduced = []
        self.transport.deferred.reset()
        for feedback in self.transport.feedback:
            feedback.rollback()

    def commit(self) -> None:
        """The pass has succeeded: the errors of its messages wait for the next one."""
        for feedback in self.transport.feedback:
            feedback.commit()

    def _check_error(self) -> None:
        if self.transport.deferred.error is not None:
            self.transport.deferred.check()

    def _wait_second_half(self, limit_seconds: float | None) -> None:
        if self._second_half is not None:
            work, self._second_half = self._second_half, None
            self._keep(work.wait(limit_seconds))

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
    reduction: Reduction  # Of these gradients, until `commit`
    transport: ShardTransport  # Of parameters and gradients
    gradient_divisor: float | None = None  # The divisor of their sum; None is the number of ranks
    _unpublished: list[tuple[nn.Parameter, Tensor]]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        with as_local():
            return any(param.requires_grad for param in self.sharded_params)

    @property
    def error_feedback(self) -> Sequence[ErrorFeedback]:
        """The rounding errors of the gradients, which are added to those of the next step; empty without it."""
        return self.transport.feedback

    def has_grad(self, index: int) -> bool:
        """Whether a sharded parameter has a reduced gradient; one that is flattened always counts as having one."""
        return self.flatten or self.sharded_param(index).grad is not None

    def drop_grad(self, index: int) -> None:
        """Takes the reduced gradient of a sharded parameter away."""
        self.sharded_param(index).grad = None

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self.gradient)

    @property
    def needs_transfer_after_reduce(self) -> bool:
        """Whether reduced gradients still have to be sent to replicas, between nodes or to another device."""
        return self.transport.traits.reduces_in_halves or self.devices.reduced != self.compute_device

    def reduce(self, tag: int = UNTAGGED) -> None:
        """Starts to average the local gradients over the ranks in `reduce_dtype`; missing ones count as zeros."""
        # So does all of it on a rank that has run out of data (see `join`).
        share = uneven_inputs.active_share
        if share is not None and not share.weight:
            self.gradient.drop()
        if gradient_hooks.local:
            self._report_local_grads()
        gradient = self.gradient.take(self.compute_device)
        if share is not None and share.weight not in (0, 1):
            gradient.mul_(share.weight)
        divisor: float | None = None if share is None else share.divisor
        if self.gradient_divisor is not None:
            num_ranks = self.group.size * self.groups.replicas.size
            divisor = self.gradient_divisor * ((divisor or num_ranks) / num_ranks)
        self.reduction.start(gradient.to(self.reduce_dtype), tag, divisor)

    def contribute_zeros(self) -> None:
        """This rank has failed: until `discard` it takes part in collectives only for the other ranks, with zeros."""
        self.gradient.use_zeros()
        self.transport.deferred.is_ignored = True

    def wait_reduced(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduction, if there is one; its result is kept until `commit`."""
        self.reduction.wait(limit_seconds)

    def finish_reduction(self, limit_seconds: float | None = None) -> None:
        """As `wait_reduced`, for all parts of it."""
        self.reduction.finish(limit_seconds)

    @on_local_tensors
    def wait_results(self, limit_seconds: float | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        """Waits for the gradients reduced since the last call; returns them by sharded parameter, in local shapes."""
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

    def zero_accumulated(self, params: Container[int], *, set_to_none: bool) -> None:
        """Drops gradients of these sharded parameters, by id, that are not reduced yet, or sets them to zeros."""
        indices = [index for index in range(len(self.names)) if id(self.sharded_param(index)) in params]
        self.gradient.zero_accumulated(indices, set_to_none=set_to_none)

    @on_local_tensors
    def publish_grads(self, params: Container[Tensor] | None = None, frozen: Collection[Tensor] = ()) -> None:
        """Adds kept results to the `.grad` of these sharded parameters, None is all, that train or are `frozen` now."""
        aside, self._unpublished = self._unpublished, []
        for param, gradient in aside:
            if params is not None and param not in params:
                self._unpublished.append((param, gradient))
            elif param.requires_grad or self.flatten or param in frozen:
                if param.grad is None:
                    param.grad = gradient
                else:
                    param.grad.add_(gradient)

    def commit(self, limit_seconds: float | None = None, frozen: Iterable[int] = ()) -> None:
        """Publishes all reduced gradients, and adds local ones that were not reduced to the accumulated sum.

        `frozen` are the parameters that some rank had an accumulated gradient for when they were frozen.
        """
        # Own gradients that were not reduced join those that wait for a later reduction.
        self.wait_results(limit_seconds)
        self.publish_grads(frozen={self.sharded_param(index) for index in frozen})
        if gradient_hooks.local and self.gradient.has_begun:
            self._report_local_grads()
        self.gradient.commit_pass()
        self.reduction.commit()

    # The parts of these operations.

    def _report_local_grads(self) -> None:
        """Calls the local gradient hooks with the current pass, without the sum of earlier ones."""
        indices, flat = self.gradient.pass_gradient()
        if flat is None or not indices:
            call_local_grad_hooks([], [])
        elif self.flatten:
            call_local_grad_hooks(self.sharded_params, [flat])
        else:
            views = [view_of(flat, self.layout.entries[index]) for index in indices]
            call_local_grad_hooks([self.sharded_params[index] for index in indices], views)

    def _plan(self, layout: FlatLayout, groups: ShardGroups, devices: DevicePolicy) -> None:
        super()._plan(layout, groups, devices)
        stays = devices.shard == devices.compute == devices.reduced
        self._grad_stream = Stream() if stays else copy_stream(self.compute_device, "gradients")

    def _init_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Makes the empty gradient and its reduction."""
        wide = torch.promote_types(self.reduce_dtype, self.dtype)
        entries, numel = self.layout.entries, self.layout.full_numel
        self.gradient = FlatGradient(params, entries, numel, self.reduce_dtype, wide)
        self.gradient.names = self.names
        self._unpublished = []
        device = self.devices.reduced or self.shard.device
        self.reduction = Reduction(self.transport, self.dtype, device, self._grad_stream)
