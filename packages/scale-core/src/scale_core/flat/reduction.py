"""Gradients of one flat buffer: a rank's own ones, their reduce-scatter, and those of the shard for an optimizer.

A rank's own gradients are in one flat tensor of W * S elements, as the collective wants them. It exists only while
there are gradients, and each one is copied into it as soon as it is complete, while it is in the processor's cache.
Where gradients of several passes are accumulated, those of the current pass are kept apart from the sum of earlier ones
until the pass has succeeded: a failed pass could not be subtracted again.

Reduced gradients are published to `.grad` only when the pass has succeeded on every rank: an optimizer must not see
half of a pass, and a failed pass must leave no trace in a sum.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from scale_core import uneven_inputs
from scale_core.comm.collectives import CollectiveWork, all_reduce, reduce_scatter
from scale_core.comm.group import Group
from scale_core.device import buffer_pool
from scale_core.device.streams import Stream, StreamEvent, copy_over, copy_to, stream_for
from scale_core.flat.layout import FlatLayout, LayoutEntry
from scale_core.flat.shard_storage import DevicePolicy, FlatShard, NodeGroups, ShardGroups
from scale_core.hooks.autograd import call_local_grad_hooks
from scale_core.hooks.registry import gradient_hooks
from scale_core.quantization.collectives import (
    DeferredError,
    QuantizedMean,
    ReduceMessages,
    WireFormats,
    all_reduce_quantized,
    part_size,
    reduce_scatter_quantized,
)
from scale_core.quantization.error_feedback import ErrorFeedback
from scale_core.shard import as_local, on_local_tensors
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad

# From this size on, gradients wait outside of the flat one until the backward is over: they are far too large to be
# packed while they are in a processor's cache, so smaller ones are packed at once.
_HELD_FROM_BYTES = 256 * 2**20


class FlatGradient:
    """The local gradients of the unsharded parameters of one flat buffer."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        entries: Sequence[LayoutEntry],
        full_numel: int,
        dtype: torch.dtype,
        wide_dtype: torch.dtype,
    ) -> None:
        # [W * S], the gradients of the current pass; None while there are none, or while all are held.
        self.flat: Tensor | None = None
        self.accumulated: Tensor | None = None  # [W * S], the sum of earlier passes, which the next `take` adds.
        # Whether `accumulate` keeps gradients apart, as large buffers do.
        self.holds = full_numel * dtype.itemsize >= _HELD_FROM_BYTES
        self.names: Sequence[str] = ()  # The parameters' names, for errors
        self.wide = False  # Whether `make_hook`'s hooks accumulate in the wider dtype, as in a pass that is not reduced
        self.observer: Callable[[int], object] | None = None  # Called by them before a parameter's gradient is moved
        self._params, self._entries, self._full_numel = params, entries, full_numel
        self._has_padding = full_numel > sum(entry.numel for entry in entries)
        self._dtype, self._wide_dtype = dtype, wide_dtype
        self._held: dict[int, Tensor] = {}  # By index, as the sets that follow
        self._packed: set[int] = set()  # Parameters whose gradient is in the flat gradient
        self._waits: set[int] = set()  # Those whose gradient is in the accumulated sum
        self._summed: set[int] = set()  # Those whose gradient is in both together
        self._is_taken = False  # The accumulated sum is being reduced: a second `take` must not add it again.

    def __bool__(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        accumulates = self.accumulated is not None and not self._is_taken
        return accumulates or self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether the current pass has brought a gradient."""
        return self.flat is not None or bool(self._held)

    def make_hook(self, index: int, before_first: Callable[[], None]) -> Callable[[Tensor], None]:
        """Returns a post-accumulate-grad hook; `before_first` is called before the first gradient of a pass."""
        self_ref = weakref.ref(self)  # Autograd's hooks are invisible to the garbage collector.

        def hook(_: Tensor) -> None:
            gradient = self_ref()
            assert gradient is not None, "a gradient has come whose buffer is gone"
            if gradient.flat is None and not gradient._held:
                before_first()
            if not gradient._params[index].requires_grad:  # Frozen since the forward; torch calls hooks all the same.
                set_unreduced_grad(gradient._params[index], None)
                return
            if gradient.observer is not None:
                gradient.observer(index)
            gradient.accumulate(index, wide=gradient.wide)

        return hook

    def accumulate(self, index: int, *, wide: bool = False) -> None:
        """Moves the gradient of parameter `index` from `.grad` into the flat gradient, or adds it there."""
        # In a large buffer it stays apart until the next `pack` or `take`: the flat gradient then takes its W * S
        # elements after the backward, when the full buffer and the activations are free.
        param = self._params[index]
        grad = unreduced_grad(param)
        if grad is None:
            return
        set_unreduced_grad(param, None)
        if grad.requires_grad or grad.layout is not torch.strided:
            grad = self._dense(index, grad)
        elif grad.untyped_storage()._cdata == param.untyped_storage()._cdata:
            grad = grad.clone()  # A custom backward has returned the weight: the full buffer may be released first.
        if self.holds and self.flat is None and index not in self._held:
            self._held[index] = grad
            return
        if self._held:
            self.pack(wide=wide)
        if self.flat is None or self.accumulated is not None:
            self._pack(index, grad, wide)
            return
        entry = self._entries[index]
        target = self.flat.narrow(0, entry.offset, entry.numel).view(entry.shape)
        if index in self._packed:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._packed.add(index)

    def pack(self, *, wide: bool = False) -> None:
        """Moves gradients that were kept apart into the flat one; `wide` as in `accumulate`."""
        while self._held:  # Each is free as soon as it is copied.
            self._pack(*self._held.popitem(), wide)

    def has_grad(self) -> list[int]:
        """The parameters that got a gradient since the last `take`."""
        adds = self.accumulated is not None and not self._is_taken
        return sorted(self._packed | self._held.keys() | (self._waits if adds else set()))

    def missing(self) -> list[int]:
        """The trainable parameters that got none since the last `take`."""
        with_grad = set(self.has_grad())
        return [index for index, param in enumerate(self._params) if param.requires_grad and index not in with_grad]

    def frozen(self) -> list[int]:
        """The parameters that were frozen after they got an accumulated gradient; plain torch keeps it in `.grad`."""
        return [index for index in sorted(self._waits) if not self._params[index].requires_grad]

    def pass_gradient(self) -> tuple[list[int], Tensor | None]:
        """The parameters with gradients of the current pass, and these [W * S], without the sum of earlier passes."""
        self.pack()
        if self.flat is not None:
            self._fill_gaps(self.flat)
        return sorted(self._packed), self.flat

    def take(self, device: torch.device) -> Tensor:
        """Returns the flat gradient [W * S] with the accumulated sum, and drops it; unused parameters are zero."""
        # The accumulated sum is kept until `commit_pass`: the pass may fail.
        self.pack()
        flat = self.flat
        if self.accumulated is not None and not self._is_taken:
            flat = self._add_accumulated(flat, self.accumulated)
            self._is_taken = True
        if flat is None:
            flat = torch.zeros(self._full_numel, dtype=self._dtype, device=device)
        else:
            self._fill_gaps(flat)
        self._forget_pass()
        return flat

    def commit_pass(self) -> None:
        """Adds the gradients of a pass that has succeeded to the accumulated sum, or drops a sum that was reduced."""
        if self._is_taken:
            self._drop_accumulated()
        self.pack(wide=True)
        flat, packed, summed = self.flat, self._packed, self._summed
        self._forget_pass()
        if flat is None:
            return
        if self.accumulated is None:
            self.accumulated, self._waits = flat.to(self._wide_dtype), packed
            return
        for index in packed:
            adds = index in self._waits and index not in summed
            _add(self._view(self.accumulated, index), self._view(flat, index), adds)
        self._waits |= packed

    def rollback_pass(self) -> None:
        """Drops the gradients of a pass that has failed; the accumulated sum stays."""
        self._forget_pass()
        self._is_taken = False
        for param in self._params:
            set_unreduced_grad(param, None)

    def use_zeros(self) -> None:
        """Makes every `take` return zeros until `rollback_pass`: the pass failed here and goes on elsewhere."""
        self.rollback_pass()
        self._is_taken = True

    def adopt(self, other: FlatGradient, device: torch.device) -> None:
        """Takes over the accumulated gradients of the same parameters on another device or in another dtype."""
        other.commit_pass()
        if other.accumulated is not None:
            self.accumulated, self._waits = other.accumulated.to(device, self._wide_dtype), set(other._waits)

    def zero_accumulated(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Drops the accumulated gradients of these parameters, or sets them to zeros."""
        for index in self._waits.intersection(indices):
            assert self.accumulated is not None, "what waits is in the sum"
            if set_to_none:
                self._waits.discard(index)
            else:
                self._view(self.accumulated, index).zero_()
        if not self._waits:
            self._drop_accumulated()

    def drop(self) -> None:
        """Drops all gradients."""
        self.rollback_pass()
        self._drop_accumulated()

    def _forget_pass(self) -> None:
        self.flat, self._held, self._packed, self._summed = None, {}, set(), set()

    def _drop_accumulated(self) -> None:
        self.accumulated, self._waits, self._is_taken = None, set(), False

    def _dense(self, index: int, grad: Tensor) -> Tensor:
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of '{self.names[index]}' has a gradient of its own, which can't follow it into a shard: "
                "call backward() without create_graph=True, or compute the penalty from outputs and inputs instead"
            )
        return grad.to_dense()

    def _pack(self, index: int, grad: Tensor, wide: bool) -> None:
        """As `accumulate`, where the flat gradient has to be allocated or there is a sum of earlier passes."""
        accumulated = None if self._is_taken else self.accumulated
        if self.flat is None:
            dtype = self._wide_dtype if wide else self._dtype
            if accumulated is not None:
                dtype = grad.dtype  # It is added to the sum in a dtype that is wide enough.
            is_flat = len(self._params) == 1 and grad.numel() == self._full_numel
            if is_flat and grad.dtype == dtype and grad.is_contiguous():
                self.flat = grad.view(-1)  # It is laid out as the buffer is: taken over, not copied.
                self._packed.add(index)
                return
            if self._full_numel * dtype.itemsize >= buffer_pool.SMALLEST_BYTES:
                self.flat = buffer_pool.empty(self._full_numel, dtype, grad.device)
            else:
                self.flat = torch.empty(self._full_numel, dtype=dtype, device=grad.device)
        if index in self._packed and accumulated is not None and index not in self._summed:
            # A second gradient in one pass, as of reentrant checkpoints: added as autograd does, each to all before it.
            self.flat = self.flat.to(self._wide_dtype)
            if index in self._waits:
                self._view(self.flat, index).add_(self._view(accumulated, index))
                self._summed.add(index)
        _add(self._view(self.flat, index), grad, index in self._packed)
        self._packed.add(index)

    def _add_accumulated(self, flat: Tensor | None, accumulated: Tensor) -> Tensor:
        """Returns this pass's gradients plus the accumulated sum, [W * S] in the wide dtype; gaps are undefined."""
        if flat is None:
            self._packed = set(self._waits)
            return accumulated.clone()
        flat = flat.to(accumulated.dtype)
        for index in self._waits - self._summed:
            _add(self._view(flat, index), self._view(accumulated, index), index in self._packed)
        self._packed |= self._waits
        return flat

    def _view(self, flat: Tensor, index: int) -> Tensor:
        return view_of(flat, self._entries[index])

    def _fill_gaps(self, flat: Tensor) -> None:
        """Zeroes padding and unused parameters."""
        if len(self._packed) == len(self._params) and not self._has_padding:
            return
        offset = 0
        entries = (self._entries[index] for index in self._packed)
        for entry in sorted((entry for entry in entries if entry.numel), key=lambda entry: entry.offset):
            if offset < entry.offset:
                flat[offset : entry.offset].zero_()
            offset = entry.offset + entry.numel
        flat[offset:].zero_()


def view_of(flat: Tensor, entry: LayoutEntry) -> Tensor:
    """A parameter's view of a flat tensor [W * S], in its full shape."""
    return flat.narrow(0, entry.offset, entry.numel).view(entry.shape)


def _add(target: Tensor, grad: Tensor, has: bool) -> None:
    """Adds `grad` to `target`, or copies it where there is none yet."""
    if has:
        target.add_(grad)
    else:
        target.copy_(grad)


class Reduction:
    """Averages flat gradients of W * S elements over the ranks; keeps this rank's S elements of the results.

    With `wire` formats some of it is quantized. With `NodeGroups` the ranks of a node come first, in the gradient's own
    dtype; only their averages are quantized and go on between nodes, during the backward of the next unit.
    """

    def __init__(
        self,
        group: Group,
        replicas: Group,
        dtype: torch.dtype,
        device: torch.device,
        stream: Stream,
        sizes: Sequence[int] | None = None,
        wire: WireFormats | None = None,
    ) -> None:
        self._sizes, self._wire = sizes, wire or WireFormats()
        # Of the reduce-scatter, and of the two halves of the all-reduce between replicas.
        self.feedback = [ErrorFeedback() for _ in range(3)] if self._wire.error_feedback else []
        self.deferred = DeferredError()
        # For the reduce-scatter between nodes, after the one inside the node.
        self._pending_inter_node: tuple[Group, float | None, int] | None = None
        # Memory for the quantized part, taken now: a rank that has none then could not answer the others.
        self._messages: ReduceMessages | None = None
        self._tag = 0
        self._group, self._replicas = group, replicas
        self._dtype, self._device, self._stream = dtype, device, stream
        self._scattering: CollectiveWork | None = None
        self._flat: Tensor | None = None
        self.keeps_memory = True  # That of a large flat gradient is kept for the next one of its size.
        self._replicating: CollectiveWork | None = None
        self._copies = replicas.size  # the divisor of the sum over the replicas
        self._reduced: list[tuple[Tensor, StreamEvent | None]] = []  # [S] each; the copy that brings it to its device

    def start(
        self, gradient: Tensor, tag: int = 0, divisor: float | None = None, nodes: NodeGroups | None = None
    ) -> None:
        """Starts to average a flat gradient [W * S] in its own dtype; the reduction owns it from now on."""
        assert self._scattering is None, "a reduction is under way already"
        self._copies = self._replicas.size if divisor is None else 1
        group = self._group if nodes is None else nodes.inter_node
        numel = gradient.numel() // self._group.size
        if self._wire.replicate is not None and self._replicas.size > 1 and numel:
            parts = part_size(numel, self._replicas)
            self._messages = ReduceMessages.new(self._replicas, parts, self._wire.replicate, gradient.device)
        if self._wire.reduce is None or group.size == 1 or not gradient.numel():
            self._scattering = reduce_scatter(
                gradient, self._group, dtype=self._dtype, divisor=divisor, sizes=self._sizes, tag=tag
            )
        elif nodes is None:
            self._scattering = self._scatter_quantized(gradient, group, divisor, tag)
        else:
            gradient = self._by_local_rank(gradient, nodes)
            self._messages = ReduceMessages.new(group, numel, self._wire.reduce, gradient.device)
            self._pending_inter_node = group, None if divisor is None else divisor / nodes.intra_node.size, tag
            self._scattering = reduce_scatter(gradient, nodes.intra_node, dtype=torch.float32, tag=tag)
        self._flat, self._tag = gradient, tag

    def wait(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduce-scatter, if one was started, and frees its flat gradient."""
        if self._scattering is None:
            return
        pending, self._scattering = self._scattering, None
        flat, self._flat = self._flat, None
        reduced = pending.wait(limit_seconds)
        if flat is not None and self.keeps_memory and flat.nbytes >= buffer_pool.SMALLEST_BYTES:
            buffer_pool.free_unshared(flat)
        if self._pending_inter_node is not None:
            self._wait_replicated(limit_seconds)
            (group, divisor, tag), self._pending_inter_node = self._pending_inter_node, None
            self._replicating = self._scatter_quantized(reduced, group, divisor, tag)
        elif self._replicas.size > 1:
            self._wait_replicated(limit_seconds)
            self._replicating = self._all_reduce(reduced)
        else:
            self._keep(reduced)
        if self.deferred.error is not None:
            self.deferred.check()

    def finish(self, limit_seconds: float | None = None) -> None:
        """Waits for all parts of the average, those between nodes or replicas too."""
        self.wait(limit_seconds)
        self._wait_replicated(limit_seconds)
        if self.deferred.error is not None:
            self.deferred.check()

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
        for pending in (self._scattering, self._replicating):
            if pending is not None:
                pending.cancel()
        self._scattering = self._replicating = self._flat = self._pending_inter_node = self._messages = None
        self._reduced = []
        self.deferred.reset()
        for feedback in self.feedback:
            feedback.rollback()

    def commit(self) -> None:
        """The pass has succeeded: the errors of its messages wait for the next one."""
        for feedback in self.feedback:
            feedback.commit()

    def _scatter_quantized(self, full: Tensor, group: Group, divisor: float | None, tag: int) -> CollectiveWork:
        assert self._wire.reduce is not None
        messages = None
        if group is not self._group:
            messages, self._messages = self._messages, None
        how = QuantizedMean(group, self._wire.reduce, divisor, tag, self.deferred)
        feedback = self.feedback[0] if self.feedback else None
        return reduce_scatter_quantized(full, how, dtype=self._dtype, feedback=feedback, messages=messages)

    def _all_reduce(self, reduced: Tensor) -> CollectiveWork:
        copies = self._copies
        if self._wire.replicate is None or not reduced.numel():
            return all_reduce(reduced, self._replicas).then(lambda total: total.div_(copies))
        messages, self._messages = self._messages, None
        how = QuantizedMean(self._replicas, self._wire.replicate, copies, self._tag, self.deferred)
        feedback = (self.feedback[1], self.feedback[2]) if self.feedback else None
        return all_reduce_quantized(reduced, how, feedback=feedback, messages=messages)

    @staticmethod
    def _by_local_rank(gradient: Tensor, nodes: NodeGroups) -> Tensor:
        """The parts of a flat gradient for the ranks of one place in their nodes, place after place."""
        by_node = gradient.view(nodes.inter_node.size, nodes.intra_node.size, -1)
        return by_node.transpose(0, 1).reshape(-1)

    def _wait_replicated(self, limit_seconds: float | None) -> None:
        if self._replicating is not None:
            pending, self._replicating = self._replicating, None
            self._keep(pending.wait(limit_seconds))

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
    wire: WireFormats | None  # In which formats they and the parameters are sent
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
        return self.reduction.feedback

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
    def reduces_in_parts(self) -> bool:
        """Whether its gradients are averaged in a node, or over the ranks of one copy, first, and then beyond."""
        return self.groups.nodes is not None or self.groups.replicas.size > 1

    @property
    def replicates_in_halves(self) -> bool:
        """Whether their average over replicas has a second half, which starts when the first is waited for."""
        return self.wire is not None and self.wire.replicate is not None and self.groups.replicas.size > 1

    @property
    def quantizes_after_scatter(self) -> bool:
        """Whether this rank still has to quantize or dequantize, and may fail, when all gradients are scattered."""
        return self.reduces_in_parts and self.wire is not None and (self.wire.reduce or self.wire.replicate) is not None

    def reduce(self, tag: int = 0) -> None:
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
        self.reduction.start(gradient.to(self.reduce_dtype), tag, divisor, self.groups.nodes)

    def contribute_zeros(self) -> None:
        """This rank has failed: until `discard` it takes part in collectives for the other ranks alone, with zeros."""
        self.gradient.use_zeros()
        self.reduction.deferred.is_ignored = True

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
        stream = self._grad_stream
        self.reduction = Reduction(self.group, self.groups.replicas, self.dtype, device, stream, wire=self.wire)
